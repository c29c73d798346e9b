"""Runs that measure the gradient noise scale: where it is written, and that a resumed run continues its
averages.
"""

from dataclasses import replace

import pytest

from meshwright.run.checkpoint.distributed_checkpoint import compare_checkpoints, load_tensors
from meshwright.run.telemetry.callbacks import Callback
from meshwright.run.telemetry.trackers import metrics_by_name
from tests.run.training.small_run import SmallRun


def test_it_stands_in_the_metrics_and_callbacks_hear_it(tmp_path):
    told = {}
    spy = Callback(on_step_end=lambda moment: told.update({moment.step: moment.step_record}))
    run = SmallRun(tmp_path, ranks=3, noise_scale=True, callbacks=(spy,))
    run.play()
    written = {step: line["noise_scale"] for step, line in run.lines().items()}
    known = next(step for step, scale in written.items() if scale is not None)
    assert written == {step: line.noise_scale for step, line in told.items()}
    assert metrics_by_name(told[known])["train/noise_scale"] == written[known]


def test_a_run_that_does_not_measure_it_says_none_and_saves_nothing_of_it(tmp_path):
    run = SmallRun(tmp_path, ranks=3)
    run.play()
    assert {line["noise_scale"] for line in run.lines().values()} == {None}
    assert not [name for name in load_tensors(run.at(12))[0] if name.startswith("state/noise_scale/")]


@pytest.mark.parametrize("last", [3, 7])
def test_the_averages_go_on_after_a_resume_as_if_nothing_had_happened(tmp_path, last):
    straight = SmallRun(tmp_path / "straight", ranks=3, noise_scale=True)
    straight.play()
    run = replace(straight, folder=tmp_path / "stopped", stop=lambda rank, done: done == last - 1)
    run.play()
    replace(run, stop=lambda rank, done: False).play()
    assert {step: line["noise_scale"] for step, line in run.lines().items()} == {
        step: line["noise_scale"] for step, line in straight.lines().items()
    }
    assert "state/noise_scale/averages" in load_tensors(straight.at(12))[0]
    assert compare_checkpoints(run.at(12), straight.at(12)) == []
