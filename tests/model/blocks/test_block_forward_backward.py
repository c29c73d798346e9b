"""Plain modules run block by block: gradients equal those of one backward, for any glue."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.plan.job.errors import PlanError
from tests.model.block_backward import (
    Block,
    Chain,
    Driven,
    Forward,
    analyze_model,
    both_ways,
    writing_in_place,
)

X = {"x": torch.linspace(-2, 2, 24).view(4, 6)}


def driven(
    glue: Forward, block: Forward | None = None, blocks: list[str] | None = None, refused: str = ""
) -> Driven:
    done = both_ways(lambda: Chain(glue, block), X, blocks, refused=refused)
    assert done.error < 1e-14
    return done


def test_skips_over_blocks_and_values_that_many_blocks_take():
    def glue(model: Chain, x: torch.Tensor) -> object:
        first = model.layers[0](x)
        mixed = first * model.shift + x
        second = model.layers[1](mixed)
        third = model.layers[2](second + mixed)
        return model.head(third * first + mixed), second

    done = driven(glue)
    assert done.block_calls == ["layers.0", "layers.1", "layers.2", "head"]
    assert done.in_glue == ["scale"]  # used by nothing, so complete at the end


def test_a_block_called_several_times_has_several_block_calls():
    def glue(model: Chain, x: torch.Tensor) -> object:
        for _ in range(2):
            x = model.layers[0](model.layers[1](x) + x)
        return model.head(x)

    done = driven(glue)
    assert done.block_calls == ["layers.1", "layers.0", "layers.1#2", "layers.0#2", "head"]
    weights = {weight.name: weight.block_calls for weight in done.analyzed.model_spec.params}
    assert weights["layers.0.linear.weight"] == ("layers.0", "layers.0#2")
    assert weights["layers.2.linear.weight"] == ("(root)",)


def test_parameters_of_the_root_and_of_blocks_used_in_glue():
    def glue(model: Chain, x: torch.Tensor) -> object:
        for layer in model.layers:
            x = layer(x) * model.scale
        return F.linear(x, model.layers[0].linear.weight)

    assert driven(glue).in_glue == ["scale", "layers.0.linear.weight", "head.weight", "head.bias"]


def test_a_parameter_handed_to_another_block_belongs_to_both():
    def block(block: Block, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(block.linear(x).tanh(), weight)

    def glue(model: Chain, x: torch.Tensor) -> object:
        for layer in model.layers[:2]:
            x = layer(x, model.layers[2].linear.weight)
        return model.layers[2](x, model.layers[2].linear.weight)

    weights = {weight.name: weight.block_calls for weight in driven(glue, block).analyzed.model_spec.params}
    assert weights["layers.2.linear.weight"] == ("layers.0", "layers.1", "layers.2")
    assert weights["layers.2.linear.bias"] == ("layers.2",)


def test_a_block_called_by_another_block_belongs_to_it():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(6, 6)
            self.layers = nn.ModuleList(
                Block(lambda block, x: block.shared(block.linear(x).tanh())) for _ in range(3)
            )
            for layer in self.layers:
                layer.shared = self.shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    done = both_ways(Outer, X)
    assert done.error < 1e-14
    assert done.block_calls == ["layers.0", "layers.1", "layers.2"]
    assert done.analyzed.model_spec.params[0].block_calls == ("layers.0", "layers.1", "layers.2")


def test_submodules_of_a_block_called_directly_are_glue():
    def glue(model: Chain, x: torch.Tensor) -> object:
        x = model.layers[1](model.layers[0].linear(x))
        return model.head(model.layers[1].linear(x))

    done = driven(glue)
    assert done.block_calls == ["layers.1", "head"]
    assert {"layers.0.linear.weight", "layers.1.linear.weight"} <= set(done.in_glue)


def test_several_inputs_and_outputs_with_views_integers_and_things_that_are_no_tensors():
    def block(
        block: Block, x: torch.Tensor, y: torch.Tensor, *, name: str, forward: None, size: torch.Size
    ) -> object:
        z = block.linear(y)
        return x, z.view(size), x[:2], y, 3, None, x.argmax(), torch.max(z, 0, keepdim=True)

    def glue(model: Chain, x: torch.Tensor) -> object:
        y, total = x, 0.0
        for layer in model.layers:
            same, z, part, y, _, _, index, most = layer(x * 1.5, y, name="a", forward=None, size=x.shape)
            x, y, total = same + 1, z.tanh() * y, total + part.sum() * index + most.values
        return x * total, y

    assert driven(glue, block).block_calls == ["layers.0", "layers.1", "layers.2"]


def test_lists_that_blocks_write_into_stay_the_callers_lists():
    def block(block: Block, x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
        past.append(past.pop(0).detach())
        return block.linear(x * past[0]).tanh()

    def glue(model: Chain, x: torch.Tensor) -> object:
        past = [model.head.weight[:1, :6] * i for i in range(1, 6)]
        for layer in model.layers:
            x = layer(x, past)
        return x, past[0], past[4], past[2:4]

    assert driven(glue, block).block_calls == ["layers.0", "layers.1", "layers.2"]


def test_objects_that_hold_tensors_unseen_pass_uncut():
    class Opaque:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    def glue(model: Chain, x: torch.Tensor) -> object:
        for layer in model.layers:
            x = layer(x).x
        return model.head(x)

    again = r"a backward passes through the block 'layers\.2' by a path other than its inputs and outputs"
    done = driven(glue, lambda block, x: Opaque(block.linear(x).tanh()), refused=again)
    assert "layers.1.linear.weight" in done.in_glue


def test_writing_in_place_into_a_blocks_output():
    done = driven(writing_in_place, lambda block, x: block.linear(x))
    assert done.analyzed.model_spec.writes_in_place


def test_glue_that_is_overwritten_after_a_block_took_it():
    def glue(model: Chain, x: torch.Tensor) -> object:
        glue = model.layers[0](x) * 3
        before = model.layers[1](glue)
        glue *= 2
        after = model.layers[2](glue)
        return before * after, glue

    again = (
        r"an input of the block 'layers\.1' was written in place after the block ran, and its recomputation"
    )
    done = driven(glue, lambda block, x: x + block.linear.bias, refused=again)
    assert done.block_calls == ["layers.0", "layers.1", "layers.2"]


def test_a_block_that_overwrites_its_input_is_refused_by_name():
    def glue(model: Chain, x: torch.Tensor) -> object:
        x = model.head(x)[:, :1] * x
        for layer in model.layers:
            x = x + layer(x)
        return x

    with pytest.raises(
        PlanError, match=r"(?s)the block 'layers\.0' writes into its input in place.*inplace=False"
    ):
        analyze_model(lambda: Chain(glue, lambda block, x: block.linear(F.relu(x, inplace=True))), X)


def test_frozen_parameters_and_a_frozen_embedding():
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 6).requires_grad_(False)
            self.layers = nn.ModuleList(Block() for _ in range(3))
            self.layers[1].linear.weight.requires_grad_(False)
            self.layers[2].requires_grad_(False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x) + x
            return x

    done = both_ways(Frozen, {"ids": torch.arange(8).view(2, 4) % 7})
    assert done.error < 1e-14
    assert {name for name, grad in done.gradients.items() if grad is not None} == {
        "layers.0.linear.weight",
        "layers.0.linear.bias",
        "layers.1.linear.bias",
    }
    assert done.block_calls == ["embed", "layers.0", "layers.1", "layers.2"]
