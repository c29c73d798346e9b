"""All sides train the same model alike, and what is measured of parts that sleep is what a step took."""

import pytest

from benchmarks.harness.rank_processes import Ranks
from benchmarks.models.llama_steps import fresh_store
from benchmarks.pipeline.pipeline_steps import by_hand, cuts, ours, theirs
from benchmarks.pipeline.pipeline_vs_torch import MICROS, PRELOAD
from benchmarks.pipeline.sleeping_stages import Slept, asleep


def losses(build: object) -> list[object]:
    """What both ranks say of two steps."""
    how = {"workload": "toy8", "store": fresh_store(), "schedule": "1f1b", "micros": MICROS}
    with Ranks("side", build, 2, preload=PRELOAD, **how) as group:
        return [note for _ in range(2) for note in group.step().notes]


def test_the_loop_by_hand_and_torch_take_the_same_losses_and_ours_learns_from_the_same_rows():
    hand = losses(by_hand)
    assert losses(theirs) == pytest.approx(hand, abs=1e-4)
    first, _, last, _ = losses(ours)
    assert last < first == pytest.approx(hand[0], abs=0.2)


def test_stages_begin_where_our_cuts_lie():
    assert cuts("toy8", 2, 2) == ("model.layers.2", "model.layers.4", "model.layers.6")


def test_a_step_of_parts_that_sleep_waits_as_long_as_on_paper_or_longer():
    how = {"store": fresh_store(), "schedule": "gpipe", "micros": 3, "seconds": 0.01}
    with Ranks("asleep", asleep, 4, preload=PRELOAD, **how) as group:
        found = [note for _ in range(2) for note in group.step().notes][4:]
    for note in found:
        assert isinstance(note, Slept)
        assert 0.4 < note.simulated < 0.6  # 3 of 6 turns, and a first part whose backward is shorter
        assert note.simulated - 0.01 <= note.bubble < 1
