"""What a run taught: one factor on all that is computed, one on all that is sent."""

import pytest

from meshwright.planner.analytic.model_shape import Shape
from meshwright.planner.analytic.parallel_config import Layout
from meshwright.planner.analytic.step_time import step
from meshwright.planner.machine.from_run import Learnt, taught
from meshwright.planner.machine.machine import machine

SHAPE = Shape("wide", 8, 8192, 64)
GIVEN = machine("A100", 16)


def test_everything_that_is_computed_takes_so_many_times_as_long():
    layout = Layout(micros=4, micro_batch=2)
    before = step(SHAPE, layout, GIVEN)
    after = step(SHAPE, layout, taught(GIVEN, Learnt("run", 20, 1.7, None, apart=True)))
    assert after.seconds == pytest.approx(1.7 * before.seconds, rel=1e-6)


def test_everything_that_is_sent_takes_so_many_times_as_long_inside_a_host_and_beyond_where_it_was_seen():
    layout = Layout(tp=4, dp=4, micros=1, sequence=True)
    before = step(SHAPE, layout, GIVEN)
    inside = step(SHAPE, layout, taught(GIVEN, Learnt("run", 20, 1.0, 2.0, apart=True)))
    between = step(SHAPE, layout, taught(GIVEN, Learnt("run", 20, 1.0, 2.0, apart=True, between=True)))
    assert inside.compute == pytest.approx(before.compute, rel=0.01)
    assert inside.tensor == pytest.approx(2 * before.tensor)
    assert before.copies < inside.copies < between.copies


def test_what_was_learnt_is_told_in_words():
    assert "computing took 1.7 times as long as planned, sending 2 times" in str(
        Learnt("runs/a", 20, 1.7, 2.0, apart=True)
    )
    assert "too little was sent" in str(Learnt("runs/a", 20, 1.7, None, apart=True))
    assert "20 steps took 1.7 times as long as planned (no trace" in str(
        Learnt("runs/a", 20, 1.7, 1.7, apart=False)
    )
