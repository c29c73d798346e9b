"""Both sides train the same model, and the bytes of both are counted: ours are four sevenths."""

import pytest

from benchmarks.harness.rank_processes import Ranks
from benchmarks.models.llama_steps import fresh_store
from benchmarks.tensor_parallel.step_ours_and_dtensor import byte_counting_step, dtensor, ours
from benchmarks.tensor_parallel.tensor_vs_dtensor import BYTES_BAR, PRELOAD, ratio


def notes(step_build: object, **arguments: object) -> list[object]:
    """The values that three steps of rank 0 return."""
    with Ranks(
        "side", step_build, 2, preload=PRELOAD, workload="toy", store=fresh_store(), **arguments
    ) as group:
        return [group.step().notes[0] for _ in range(3)]


def test_bytes_are_counted_on_both_sides():
    sent = {
        "ours": notes(byte_counting_step, build_step=ours)[-1],
        "DTensor": notes(byte_counting_step, build_step=dtensor)[-1],
    }
    assert {name: each["calls"] >= 32 for name, each in sent.items()} == {"ours": True, "DTensor": True}
    assert ratio(sent) == pytest.approx(4 / 7, rel=1e-3)
    assert ratio(sent) <= BYTES_BAR
    prepared = notes(byte_counting_step, build_step=dtensor, prepared=True)[-1]
    assert ratio({"ours": sent["ours"], "DTensor": prepared}) == pytest.approx(1, rel=1e-2)


def test_both_sides_learn():
    for build in (ours, dtensor):
        first, _, last = notes(build)
        assert last < first
