"""All sides train the same model alike, and a step of sleeping stages takes as long as simulated."""

import pytest

from benchmarks.harness.rank_processes import Ranks
from benchmarks.models.llama_steps import fresh_store
from benchmarks.pipeline.pipeline_vs_torch import NUM_MICROBATCHES, PRELOAD
from benchmarks.pipeline.sleeping_stages import SleepStep, sleeping_pipeline
from benchmarks.pipeline.step_ours_and_torch import engine_step, plain_loop_step, split_points, torch_step


def losses(build: object) -> list[object]:
    """Returns the losses that both ranks report of two steps."""
    how = {
        "workload": "toy8",
        "store": fresh_store(),
        "schedule": "1f1b",
        "num_microbatches": NUM_MICROBATCHES,
    }
    with Ranks("side", build, 2, preload=PRELOAD, **how) as group:
        return [note for _ in range(2) for note in group.step().notes]


def test_the_plain_loop_and_torch_have_equal_losses_and_ours_learns_from_the_same_samples():
    plain = losses(plain_loop_step)
    assert losses(torch_step) == pytest.approx(plain, abs=1e-4)
    first, _, last, _ = losses(engine_step)
    assert last < first == pytest.approx(plain[0], abs=0.2)


def test_split_points_are_the_first_layers_of_the_stages():
    assert split_points("toy8", 2, 2) == ("model.layers.2", "model.layers.4", "model.layers.6")


def test_a_step_of_sleeping_stages_waits_as_long_as_simulated_or_longer():
    how = {"store": fresh_store(), "schedule": "gpipe", "num_microbatches": 3, "seconds": 0.01}
    with Ranks("sleeping stages", sleeping_pipeline, 4, preload=PRELOAD, **how) as group:
        found = [note for _ in range(2) for note in group.step().notes][4:]
    for note in found:
        assert isinstance(note, SleepStep)
        assert 0.4 < note.simulated < 0.6  # 3 of 6 actions, and a first stage whose backward is shorter
        assert note.simulated - 0.01 <= note.bubble < 1
