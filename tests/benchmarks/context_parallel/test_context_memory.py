"""Rows of four times as many tokens on four ranks, at a small size: the limit is kept, and what breaks it is
told.
"""

import pytest
import torch

from benchmarks.context_parallel.context_memory import Case, Found, alone, longest, result, row_of
from benchmarks.harness.peak_bytes import PeakLive

LIMIT = 14 * 2**20
HELD = {"how": "ring", "tokens": 512, "peak": [LIMIT - 1], "loss off": 0.0, "off": [-0.04]}


def test_an_operation_that_goes_beyond_the_limit_fails() -> None:
    with PeakLive(limit=4000) as live:
        kept = torch.ones(900)
        with pytest.raises(MemoryError, match="4,400 bytes live, and there are 4,000"):
            kept + torch.ones(200)
    assert live.peak == 4400


def test_one_rank_trains_on_the_longest_row_and_on_no_longer_one() -> None:
    tokens = longest(LIMIT)
    found = alone(Case(tokens, limit=LIMIT))
    assert isinstance(found, Found)
    assert found.peak <= LIMIT
    assert alone(Case(tokens + 64, limit=LIMIT)) is None
    row = row_of(Case(tokens, limit=LIMIT), [found], found.losses)
    assert row["loss off"] == 0.0


def test_rows_too_short_or_a_loss_that_is_off_fail_the_claim() -> None:
    assert result(LIMIT, 128, [HELD], {}).holds is True
    assert result(LIMIT, 129, [HELD], {}).holds is False
    assert result(LIMIT, 128, [{**HELD, "loss off": 1e-3}], {}).holds is False
    assert result(LIMIT, 128, [{**HELD, "peak": [LIMIT + 1]}], {}).holds is False
    assert result(LIMIT, 128, [{**HELD, "off": [0.01, -0.06]}], {}).holds is False
