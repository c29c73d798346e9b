"""expert_vs_peers: both sides start from one loss, and a token travels once per rank in ours."""

import pytest

from benchmarks.experts.expert_vs_peers import BYTES_BAR, PRELOAD, RANKS, SIDES
from benchmarks.harness.rank_processes import Ranks
from benchmarks.models.llama_steps import fresh_store


def test_both_train_the_same_model_and_ours_exchanges_fewer_bytes():
    notes = {}
    for name in ("transformers", "ours"):
        with Ranks(name, SIDES[name], RANKS, preload=PRELOAD, store=fresh_store()) as group:
            notes[name] = group.step().notes
    theirs, ours = (notes[name] for name in ("transformers", "ours"))
    assert sum(each["loss"] for each in theirs) / RANKS == pytest.approx(ours[0]["loss"], rel=1e-4)
    assert sum(each["exchanged"] for each in ours) <= BYTES_BAR * sum(each["exchanged"] for each in theirs)
