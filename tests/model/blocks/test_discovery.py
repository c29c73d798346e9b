"""The blocks of a model without annotations, and the blocks that contain each parameter."""

from collections.abc import Callable

import pytest
from torch import nn

from meshwright.model.blocks.discovery import WHOLE_MODEL, find_blocks, param_owners
from meshwright.plan.job.errors import PlanError


def net(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def linears(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(2, 2) for _ in range(count))


def language_model() -> nn.Module:
    body = net(embed=nn.Embedding(3, 2), drop=nn.Dropout(0.1), layers=linears(2), norm=nn.LayerNorm(2))
    return net(body=body, head=nn.Linear(2, 3))


SHAPES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "modules beside a chain are blocks, those without parameters are not": (
        language_model,
        ["body.embed", "body.layers.0", "body.layers.1", "body.norm", "head"],
    ),
    "a chain inside a block is a part of the block": (
        lambda: net(layers=nn.ModuleList(net(parts=linears(2), norm=nn.LayerNorm(2)) for _ in range(2))),
        ["layers.0", "layers.1"],
    ),
    "a chain of chains is entered": (
        lambda: net(stages=nn.ModuleList([linears(2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())])),
        ["stages.0.0", "stages.0.1", "stages.1.0"],
    ),
    "a dict of modules is a chain": (
        lambda: net(towers=nn.ModuleDict({"left": nn.Linear(2, 2), "right": nn.Linear(2, 2)})),
        ["towers.left", "towers.right"],
    ),
    "a sequential model is a chain itself": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
        ["0", "2"],
    ),
    "a module that stands in a chain twice is one block": (
        lambda: net(layers=nn.ModuleList([nn.Linear(2, 2)] * 3)),
        ["layers.0"],
    ),
    "a module that stands in two chains is one block": (
        lambda: (
            lambda shared: net(left=nn.ModuleList([shared]), right=nn.ModuleList([shared, nn.Linear(2, 2)]))
        )(nn.Linear(2, 2)),
        ["left.0", "right.1"],
    ),
    "a chain without parameters is none": (
        lambda: net(one=nn.Linear(2, 2), acts=nn.ModuleList([nn.ReLU(), nn.Tanh()])),
        [WHOLE_MODEL],
    ),
    "a model without a chain is one block": (
        lambda: net(one=nn.Linear(2, 2), two=nn.Linear(2, 2)),
        [WHOLE_MODEL],
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_found(shape: str):
    build, names = SHAPES[shape]
    module = build()
    blocks = find_blocks(module)
    assert list(blocks) == names
    for name, block in blocks.items():
        assert block is (module if name == WHOLE_MODEL else module.get_submodule(name))


def test_declared_blocks_replace_the_search():
    model = language_model()
    assert list(find_blocks(model, ["body.layers", "head"])) == ["body.layers", "head"]
    assert find_blocks(model, [WHOLE_MODEL]) == {WHOLE_MODEL: model}


def test_declared_blocks_that_cannot_be_are_all_refused_at_once():
    model = language_model()
    model.alias = model.head
    with pytest.raises(PlanError) as caught:
        find_blocks(model, ["body.layer.1", "body", "body.norm", "head", "alias"])
    said = [str(diagnostic) for diagnostic in caught.value.diagnostics]
    assert said == [
        "model.blocks: the model has no module 'body.layer.1'\n  repair: did you mean 'body.layers.1'?",
        "model.blocks: 'body.norm' is inside 'body', and both are declared as blocks\n"
        "  repair: declare one of the two",
        "model.blocks: 'alias' is the same module as 'head', and both are declared as blocks\n"
        "  repair: declare one of the two",
    ]


def test_every_block_that_contains_a_tied_parameter_is_named():
    model = language_model()
    model.head.weight = model.body.embed.weight
    held = param_owners(model, find_blocks(model))
    assert held[id(model.head.weight)] == ["body.embed", "head"]
    assert held[id(model.head.bias)] == ["head"]
    assert len(held) == len(list(model.parameters()))
    model.scale = nn.Parameter(model.head.bias.detach().clone())
    assert id(model.scale) not in param_owners(model, find_blocks(model))
