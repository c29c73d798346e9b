"""F.conv1d calls inside a block: which are passed to the strategy, with which arguments, and which are
refused.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.model.context_parallel.conv_call import Conv1dArguments, Conv1dMode, ShardedConv1dCall
from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.sequence_info import ConvSpec

LENGTH, WIDTH = 8, 4
SHARE = TokenShard(LENGTH, ((0, 2), (6, 8)))
CAUSAL = ConvSpec("layer", "layer.conv", LENGTH, WIDTH, 2, 0, num_extra_outputs=2)
PADDED = ConvSpec("layer", "layer.conv", LENGTH, WIDTH, 2, 0, pad_before=2)
WEIGHT, OWN = torch.ones(WIDTH, WIDTH, 3), torch.ones(1, WIDTH, 4)
ALONE = ConvSpec("layer", "layer.gate")


class Asking:
    """A technique that notes what it is asked, and gives a three for each token."""

    def __init__(self, *known: ConvSpec, share: TokenShard = SHARE) -> None:
        self.asked: list[ShardedConv1dCall] = []
        self._known, self._share, self._met = known, share, 0

    def mode(self) -> Conv1dMode:
        return Conv1dMode(self._answer, self._told, nullcontext)

    def _answer(self, asked: ShardedConv1dCall) -> torch.Tensor:
        self.asked.append(asked)
        return torch.full((1, WIDTH, asked.local_input.shape[-1]), 3.0)

    def _told(self) -> tuple[str, Sequence[ConvSpec], int, Any]:
        self._met += 1
        return "layer", self._known, self._met - 1, lambda planned, found: self._share


def test_a_causal_convolution_returns_padding_to_crop():
    asking = Asking(CAUSAL)
    with asking.mode():
        made = F.conv1d(OWN, WEIGHT, padding=2)
    assert made.tolist() == [[[3.0] * 4 + [1.0] * 2] * WIDTH]
    assert asking.asked[0].local_input.equal(OWN)
    assert (asking.asked[0].conv_spec, asking.asked[0].token_shard) == (CAUSAL, SHARE)


def test_padding_added_by_the_model_is_removed():
    asking = Asking(PADDED)
    with asking.mode():
        made = F.conv1d(input=F.pad(OWN, (2, 0)), weight=WEIGHT)
    assert made.shape == OWN.shape
    assert asking.asked[0].local_input.equal(OWN)


def test_a_convolution_of_single_tokens_is_torch_s():
    asking = Asking(ALONE, CAUSAL)
    with asking.mode():
        alone = F.conv1d(OWN, WEIGHT[..., :1])
        F.conv1d(OWN, WEIGHT, padding=2)
    assert alone.flatten().tolist() == [4.0] * 16
    assert len(asking.asked) == 1


def test_where_no_block_runs_it_is_torch_s():
    with Conv1dMode(lambda asked: torch.zeros(0), lambda: None, nullcontext):
        assert F.conv1d(OWN, WEIGHT).shape == (1, WIDTH, 2)


def test_a_rank_without_tokens_convolves_a_stand_in():
    asking = Asking(CAUSAL, share=TokenShard(LENGTH, ()))
    with asking.mode():
        assert F.conv1d(OWN[..., :2], WEIGHT, padding=2).shape == (1, WIDTH, 4)


def test_more_convolutions_than_in_the_trial_run_are_refused():
    with Asking(CAUSAL).mode():
        F.conv1d(OWN, WEIGHT, padding=2)
        with pytest.raises(PlanError, match="convolves 2 times, and in the trial 1 times"):
            F.conv1d(OWN, WEIGHT, padding=2)


@pytest.mark.parametrize(
    ("known", "given", "kwargs"),
    [
        (CAUSAL, OWN[..., :3], {"padding": 2}),
        (replace(CAUSAL, token_numel=2), OWN, {"padding": 2}),
        (CAUSAL, OWN, {"padding": 1}),
        (CAUSAL, OWN, {"padding": 4, "dilation": 2}),
        (CAUSAL, OWN, {"padding": 2, "stride": 2}),
        (PADDED, OWN, {}),
    ],
)
def test_another_convolution_than_in_the_trial_run_is_refused(
    known: ConvSpec, given: torch.Tensor, kwargs: dict[str, Any]
):
    with (
        Asking(known).mode(),
        pytest.raises(PlanError, match=r"'layer.conv' convolves \[4, \d\](?s:.*)4 tokens of width") as told,
    ):
        F.conv1d(given, WEIGHT, **kwargs)
    assert "let the block run the same convolutions on every batch" in told.value.diagnostics[0].fix


@pytest.mark.parametrize(
    ("kwargs", "reach", "padded"),
    [
        ({}, 2, (0, 0)),
        ({"padding": "same"}, 2, (1, 1)),
        ({"padding": "same", "dilation": 2}, 4, (2, 2)),
        ({"padding": "valid"}, 2, (0, 0)),
        ({"padding": (3,), "dilation": (3,)}, 6, (3, 3)),
    ],
)
def test_kernel_reach_and_padding_follow_from_the_arguments(
    kwargs: dict[str, Any], reach: int, padded: tuple[int, int]
):
    given = Conv1dArguments(OWN, WEIGHT, **kwargs)
    assert (given.kernel_reach, given.padding_sizes) == (reach, padded)


def test_the_same_size_by_name_has_one_more_zero_behind():
    assert Conv1dArguments(OWN, WEIGHT[..., :2], padding="same").padding_sizes == (0, 1)
