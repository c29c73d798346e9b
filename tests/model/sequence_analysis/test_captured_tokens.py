"""Tokens in side channels: along a dim of their own, or merged with samples in an order that is known."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.model.hf.captured_outputs import CaptureMark
from meshwright.model.sequence_analysis.captured_tokens import find_captured_tokens
from meshwright.model.sequence_analysis.token_rules import SHARDED, TokenLayout, TokenLayouts
from meshwright.model.sequence_analysis.trial_lengths import TrialLengths
from meshwright.plan.model_spec.sequence_info import CapturedTokens

SAMPLES, PRIME, PLANNED, WIDTH = 3, 11, 13, 4
LENGTHS = TrialLengths({PRIME: PLANNED}, lambda length, used: 17, SAMPLES)
ROUTER = nn.Linear(WIDTH, 2)


def hidden() -> torch.Tensor:
    return torch.randn(SAMPLES, PRIME, WIDTH, requires_grad=True)


def found(tensor: torch.Tensor, layout: TokenLayout | None = SHARDED) -> tuple[Any, tuple[str, ...]]:
    layouts: TokenLayouts = WeakIdKeyDictionary()
    if layout is not None:
        layouts[tensor] = layout
    (captured,), leaks = find_captured_tokens([CaptureMark("states", [tensor], 0)], layouts, LENGTHS)
    assert tensor not in layouts
    return captured, leaks


def test_a_dim_of_tokens_is_found_and_a_tensor_without_tokens_is_none():
    assert found(hidden() * 2) == (CapturedTokens(1, PLANNED), ())
    assert found(torch.zeros(SAMPLES, WIDTH), None) == (None, ())


@pytest.mark.parametrize(
    "merge",
    [
        lambda x: ROUTER(x.view(-1, WIDTH)),
        lambda x: ROUTER(x.reshape(-1, WIDTH).tanh()).softmax(-1),
        lambda x: ROUTER(x).flatten(0, 1),
    ],
    ids=["viewed", "computed with", "flattened at the end"],
)
def test_rows_of_samples_and_tokens_are_in_the_order_of_samples(merge: Callable[..., torch.Tensor]):
    assert found(merge(hidden())) == (CapturedTokens(0, PLANNED, is_merged=True), ())


@pytest.mark.parametrize(
    "merge",
    [
        lambda x: ROUTER(x.transpose(0, 1).reshape(-1, WIDTH)),
        lambda x: ROUTER(x.view(-1, WIDTH)).flip(0),
        lambda x: ROUTER(x.view(-1, WIDTH))[torch.randperm(SAMPLES * PRIME)],
        lambda x: ROUTER(x.view(-1, WIDTH)).detach(),
    ],
    ids=["tokens first", "flipped", "permuted", "without a graph"],
)
def test_rows_in_another_order_leak(merge: Callable[..., torch.Tensor]):
    assert found(merge(hidden())) == (None, ("states",))


def test_tokens_of_unknown_origin_leak():
    assert found(hidden() * 2, None) == (None, ("states",))
