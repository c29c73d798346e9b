"""The longest sequence under a limit of live bytes, at a small size; what exceeds the limit fails."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.context_parallel.context_memory import (
    Case,
    MeasuredPeak,
    longest_sequence,
    measure_one_rank,
    result,
    row_of,
)
from benchmarks.harness.peak_bytes import PeakLive

LIMIT = 14 * 2**20
WITHIN_LIMIT = {"technique": "ring", "tokens": 512, "peak": [LIMIT - 1], "loss off": 0.0, "off": [-0.04]}


def test_an_operation_that_goes_beyond_the_limit_fails() -> None:
    with PeakLive(limit=4000) as live:
        kept = torch.ones(900)
        with pytest.raises(MemoryError, match="4,400 bytes live, and there are 4,000"):
            kept + torch.ones(200)
    assert live.peak == 4400


def test_fake_tensors_use_nothing_of_the_limit() -> None:
    with PeakLive(limit=4000) as live, FakeTensorMode():
        torch.ones(2000)
    assert live.peak == 0


def test_one_rank_trains_on_the_longest_sequence_and_on_no_longer_one() -> None:
    tokens = longest_sequence(LIMIT)
    found = measure_one_rank(Case(tokens, limit=LIMIT))
    assert isinstance(found, MeasuredPeak)
    assert found.peak <= LIMIT
    assert measure_one_rank(Case(tokens + 64, limit=LIMIT)) is None
    row = row_of(Case(tokens, limit=LIMIT), [found], found.losses)
    assert row["loss off"] == 0.0


def test_short_sequences_a_wrong_loss_or_a_wrong_plan_fail_the_claim() -> None:
    assert result(LIMIT, 128, [WITHIN_LIMIT], {}).holds is True
    assert result(LIMIT, 129, [WITHIN_LIMIT], {}).holds is False
    assert result(LIMIT, 128, [{**WITHIN_LIMIT, "loss off": 1e-3}], {}).holds is False
    assert result(LIMIT, 128, [{**WITHIN_LIMIT, "peak": [LIMIT + 1]}], {}).holds is False
    assert result(LIMIT, 128, [{**WITHIN_LIMIT, "off": [0.01, -0.06]}], {}).holds is False
