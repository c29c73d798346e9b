"""generation_bytes: its law on small numbers, some cases against it, and planted messages that it notices."""

from fractions import Fraction
from typing import Any

import pytest

from benchmarks.generation.generation_bytes import (
    KEPT_CASES,
    LENGTH,
    NEW,
    NUM_PROMPTS,
    SENT_CASES,
    Case,
    compare_kept,
    compare_sent,
    law,
    result,
)
from meshwright.engine.generation.stage_forwards import StageForwards
from meshwright.planner.program_cost import kv_cache_memory

CASES = {case.name: case for case in (*SENT_CASES, *KEPT_CASES)}
WIDTH, NUM_LAYERS = 32, 3


def test_the_law_on_small_numbers():
    case, tokens = CASES["tp 2"], LENGTH + NEW - 1
    sums = (2 * NUM_LAYERS + 1) * NUM_PROMPTS * tokens * WIDTH * 8  # a sum sends as much over two ranks
    assert law(case, case.plan(), 1, NEW) == sums + 48 * NUM_PROMPTS * NEW + 24
    case = CASES["pp 3"]
    of_ranks = [law(case, case.plan(), rank, NEW) for rank in range(3)]
    assert of_ranks[0] == of_ranks[1] == NUM_PROMPTS * tokens * WIDTH * 8 + 48
    assert of_ranks[2] == NUM_PROMPTS * NEW * (8 + 16) + 48
    case = CASES["ZeRO-3 on 2"]
    of_shards = [law(case, case.plan(), 0, new) for new in (NEW, NEW + 1)]
    assert of_shards[1] - of_shards[0] == Fraction(24 * NUM_PROMPTS, 2)  # no weights


@pytest.mark.parametrize("name", ["tp 3, sharded tokens", "pp 2, tp 3", "ZeRO-3 on 3, block by block"])
def test_ledgers_are_the_law(name: str):
    assert compare_sent(CASES[name])["off"] == 0


@pytest.mark.parametrize("name", ["ZeRO-3 on 2, tp 3", "mistral, tp 3"])
def test_live_bytes_are_those_of_the_plan(name: str):
    row = compare_kept(CASES[name])
    assert row["off"] == 0
    assert all(peak > 0 for peak in row["cache"])


def test_planted_bytes_are_noticed(monkeypatch):
    right = StageForwards.share_tokens

    def twice(self: Any, ids: Any) -> Any:
        right(self, ids).wait()
        return right(self, ids)

    monkeypatch.setattr(StageForwards, "share_tokens", twice)
    assert compare_sent(CASES["pp 2"])["off"] == 8 * NUM_PROMPTS * NEW
    monkeypatch.setattr(kv_cache_memory, "_num_local_heads", lambda layer, view: layer.num_heads)
    case: Case = CASES["mistral, tp 2"]
    assert compare_kept(case)["off"] > 0


def test_a_row_that_is_off_fails_the_claim():
    rows = [{"case": "tp 2", "off": 0.0}, {"case": "tp 3", "off": 0.0}]
    assert result(rows).holds
    assert not result([*rows, {"case": "pp 2", "off": 8.0}]).holds
