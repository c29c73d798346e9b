"""Splits of the matrices of each expert are found by their shapes, and shown by a trial."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright.model.trial.expert_slices import with_inner_splits
from meshwright.plan.model_spec.model_spec import OUTPUT_BIAS, ExpertsCall
from meshwright.plan.model_spec.param_dim_split import DimSplit

D, INNER, E = 6, 24, 3
UNITS = 3  # of 8 features


class Loop(nn.Module):
    """Experts as loops over what `expert(self, number, x)` returns, with parameters of the given shapes."""

    def __init__(self, expert: Callable[..., torch.Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.num_experts, self.expert = E, expert
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(E, *shape, device="meta")))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(hidden)
        for number in range(self.num_experts):
            token, slot = (index == number).nonzero(as_tuple=True)
            outputs = self.expert(self, number, hidden[token]) * weights[token, slot, None]
            total = total.index_add(0, token, outputs)
        return total


def packed(self: Loop, number: int, x: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ self.up[number].t()).chunk(2, -1)
    return (gate.sigmoid() * up) @ self.down[number].t()


def in_turn(self: Loop, number: int, x: torch.Tensor) -> torch.Tensor:
    both = x @ self.up[number] + self.up_bias[number]
    return (both[:, ::2].tanh() * both[:, 1::2]) @ self.down[number] + self.down_bias[number]


def apart(self: Loop, number: int, x: torch.Tensor) -> torch.Tensor:
    return ((x @ self.gate[number]).relu() * (x @ self.up[number])) @ self.down[number].t()


def normed(self: Loop, number: int, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(packed(self, number, x), (x.shape[1],))


def of_fixed_size(self: Loop, number: int, x: torch.Tensor) -> torch.Tensor:
    return (
        packed(self, number, x).view(-1, D) if self.down.shape[2] == INNER else packed(self, number, x[:, :0])
    )


def found(expert: Callable[..., torch.Tensor], **shapes: tuple[int, ...]) -> dict[str, DimSplit]:
    call = ExpertsCall("experts", "block", tuple(shapes), E, 2, 5, D)
    (known,) = with_inner_splits([call], nn.ModuleDict({"experts": Loop(expert, **shapes)}))
    return {name.removeprefix("experts."): split for name, split in known.inner_splits}


def test_halves_of_a_packed_matrix_are_split_apart():
    assert found(packed, up=(2 * INNER, D), down=(D, INNER)) == {
        "up": DimSplit(1, UNITS, (INNER, INNER)),
        "down": DimSplit(2, UNITS, (INNER,)),
    }


def test_pairs_stay_together_and_the_last_bias_is_added_once():
    assert found(in_turn, up=(D, 2 * INNER), up_bias=(2 * INNER,), down=(INNER, D), down_bias=(D,)) == {
        "up": DimSplit(2, UNITS, (2 * INNER,)),
        "up_bias": DimSplit(1, UNITS, (2 * INNER,)),
        "down": DimSplit(1, UNITS, (INNER,)),
        "down_bias": DimSplit(1, D, (D,), OUTPUT_BIAS),
    }


def test_square_matrices_are_split_where_the_results_add_up():
    splits = found(apart, gate=(D, D), up=(D, D), down=(D, D))
    assert {name: split.dim for name, split in splits.items()} == {"gate": 2, "up": 2, "down": 2}


@pytest.mark.parametrize("expert", [normed, of_fixed_size])
def test_what_does_not_add_up_is_not_split(expert: Callable[..., torch.Tensor]):
    assert found(expert, up=(2 * INNER, D), down=(D, INNER)) == {}
