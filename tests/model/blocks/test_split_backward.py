"""A backward in two halves leaves the gradients of a whole one, to the bit, and computes no product twice."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from meshwright.model.blocks.driver import Drive, Visit, backward, backward_from
from meshwright.model.blocks.split_backward import half
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_share import shares
from meshwright.plan.sharding.sharding_plan import Space
from tests.model.dissimilar_blocks import BLOCKS, ONCE, Chain
from tests.parallel.tensor.odd_llama import known, llama

Gradients = dict[str, torch.Tensor | None]


def gradients(model: nn.Module, *, halves: bool, lean: bool = False) -> tuple[Gradients, int]:
    """The gradients of all parameters, and the operations of the backward."""
    drive = Drive({"embed": model.embed, "block": model.block, "head": model.head}, in_place=True)
    model.zero_grad()
    ids = torch.tensor([3, 1, 4, 1, 5, 9])
    try:
        out, closing, passed = drive.forward(lambda visit: lean and visit == "block", lambda: model(ids))
    finally:
        drive.detach()
    with FlopCounterMode(display=False) as counted:
        backward_from((out * torch.arange(3.0, dtype=torch.float64)).square().sum(), 1.0)
        backward(closing)
        owed = []
        for visit in reversed(list(passed.visits.values())):
            drive.again(visit)
            if halves:
                owed.append(half(visit))
            else:
                backward(visit)
        for each in owed:
            each.settle()
    return {name: p.grad for name, p in model.named_parameters()}, counted.get_total_flops()


def made(block: str) -> nn.Module:
    torch.manual_seed(0)
    return Chain(BLOCKS[block]()).double()


def same(one: Gradients, other: Gradients) -> bool:
    return one.keys() == other.keys() and all(
        (one[name] is None and other[name] is None) or torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("block", BLOCKS)
def test_gradients_are_those_of_a_whole_backward(block: str):
    (whole, products), (apart, twice) = (gradients(made(block), halves=halves) for halves in (False, True))
    assert same(whole, apart)
    assert any(grad is not None for grad in whole.values())
    if block in ONCE:
        assert twice == products


def test_a_block_that_is_run_again_has_halves_too():
    whole, apart = (gradients(made("residual"), halves=halves, lean=True)[0] for halves in (False, True))
    assert same(whole, apart)


def started(block: str) -> tuple[nn.Module, set[str]]:
    """A model whose first halves have run, and the parameters that have a gradient by then."""
    model = made(block)
    drive = Drive({"embed": model.embed, "block": model.block, "head": model.head}, in_place=True)
    out, closing, passed = drive.forward(lambda visit: None, lambda: model(torch.tensor([3, 1, 4])))
    drive.detach()
    backward_from(out.square().sum(), 1.0)
    backward(closing)
    for visit in reversed(list(passed.visits.values())):
        half(visit)
    return model, {name for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("block", "early"),
    [
        ("residual", set()),
        ("attention", set()),
        ("a layer called twice", {"block.turn.weight", "block.turn.bias"}),
        ("a function in Python", {"block.up.weight"}),
    ],
)
def test_the_first_half_leaves_weights_alone_but_for_those_it_cannot_tell_apart(block: str, early: set[str]):
    _, found = started(block)
    assert found == {"scale", *early}


def under_way() -> tuple[nn.Module, Visit]:
    """A Llama of one layer, and the visit of that, to whose outputs gradients have come."""
    model = llama(num_hidden_layers=1).double()
    drive = Drive({"layer": model.model.layers[0]})
    out, closing, passed = drive.forward(lambda visit: None, lambda: model(torch.arange(9)[None], use_cache=False))
    drive.detach()
    backward_from(out.logits.square().sum(), 1.0)
    backward(closing)
    return model, passed.visits["layer"]


def test_of_a_llama_each_half_has_half_of_the_products():
    model, visit = under_way()
    share = shares(Space.one_device(Mesh(), known(num_hidden_layers=1).anatomy))["model.layers.0"]
    with FlopCounterMode(display=False) as first:
        owed = half(visit)
    with FlopCounterMode(display=False) as second:
        owed.settle()
    weights = sum(p.numel() for p in model.model.layers[0].parameters() if p.ndim == 2)
    assert second.get_total_flops() == share.weights == 2 * 9 * weights
    assert share.weights < share.flops < 2 * share.flops - share.weights
    assert first.get_total_flops() >= second.get_total_flops()  # what counts here does not know attention on a CPU


def test_between_the_halves_waits_what_the_plan_says():
    space = Space.one_device(Mesh(), known(num_hidden_layers=1).anatomy)
    _, visit = under_way()
    owed = half(visit)
    left = (
        gradient.untyped_storage() for _, left, _ in owed.frontiers for gradient in left.gradients or () if gradient is not None
    )
    nbytes = {storage._cdata: storage.nbytes() for storage in left}
    assert sum(nbytes.values()) == 8 * shares(space)["model.layers.0"].owed


def test_what_the_forward_kept_goes_with_the_second_half():
    model = made("residual")
    kept: list[StorageWeakRef] = []
    model.block.up.register_forward_hook(lambda module, given, out: kept.append(StorageWeakRef(out.untyped_storage())))
    drive = Drive({"block": model.block})
    out, closing, passed = drive.forward(lambda visit: None, lambda: model(torch.tensor([3, 1, 4])))
    drive.detach()
    backward_from(out.square().sum(), 1.0)
    backward(closing)
    owed = half(passed.visits["block"])
    assert not kept[0].expired()
    owed.settle()
    assert kept[0].expired()


def test_products_are_counted_where_they_are_made_twice():
    """What the tests above would show, if frontiers ran all that lies behind them."""
    layer = nn.Linear(3, 3)
    out = layer(torch.ones(2, 3, requires_grad=True))
    with FlopCounterMode(display=False) as once:
        torch.autograd.grad(out.sum(), list(layer.parameters()), retain_graph=True)
    with FlopCounterMode(display=False) as both:
        out.sum().backward()
    assert 2 * once.get_total_flops() == both.get_total_flops()
