"""Factors fitted to a run: one on all computation, one on all communication."""

import pytest

from meshwright.planner.analytic.closed_form_step_time import step_time
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.machine.machine import make_machine
from meshwright.planner.machine.run_calibration import RunCalibration, apply_calibration

SHAPE = ModelShape("wide", 8, 8192, 64)
GIVEN = make_machine("A100", 16)


def test_everything_that_is_computed_takes_so_many_times_as_long():
    layout = ParallelConfig(num_microbatches=4, micro_batch=2)
    before = step_time(SHAPE, layout, GIVEN)
    after = step_time(
        SHAPE, layout, apply_calibration(GIVEN, RunCalibration("run", 20, 1.7, None, is_traced=True))
    )
    assert after.seconds == pytest.approx(1.7 * before.seconds, rel=1e-6)


def test_everything_that_is_sent_takes_so_many_times_as_long_inside_a_host_and_beyond_where_it_was_seen():
    layout = ParallelConfig(tp=4, dp=4, num_microbatches=1, sequence_parallel=True)
    before = step_time(SHAPE, layout, GIVEN)
    inside = step_time(
        SHAPE, layout, apply_calibration(GIVEN, RunCalibration("run", 20, 1.0, 2.0, is_traced=True))
    )
    between = step_time(
        SHAPE,
        layout,
        apply_calibration(GIVEN, RunCalibration("run", 20, 1.0, 2.0, is_traced=True, crosses_hosts=True)),
    )
    assert inside.compute == pytest.approx(before.compute, rel=0.01)
    assert inside.tp_comm == pytest.approx(2 * before.tp_comm)
    assert before.dp_comm < inside.dp_comm < between.dp_comm


def test_fitted_factors_are_reported():
    assert "computation took 1.7 times as long as planned, communication 2 times" in str(
        RunCalibration("runs/a", 20, 1.7, 2.0, is_traced=True)
    )
    assert "too little was sent" in str(RunCalibration("runs/a", 20, 1.7, None, is_traced=True))
    assert "20 steps took 1.7 times as long as planned (there is no trace" in str(
        RunCalibration("runs/a", 20, 1.7, 1.7, is_traced=False)
    )
