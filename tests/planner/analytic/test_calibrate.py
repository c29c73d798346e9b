"""Rates learnt from measured steps: planted ones are found again, and one disturbed step does not bend them."""

from dataclasses import replace

import pytest

from meshwright.planner.analytic.calibrate import Measured, calibrated
from meshwright.planner.analytic.model_shape import Shape
from meshwright.planner.analytic.parallel_config import Layout
from meshwright.planner.analytic.step_time import step
from meshwright.planner.machine.efficiency import NAMES, Rates, rates_of
from meshwright.planner.machine.machine import machine

MACHINE = machine("A100", 64)
PLANTED = replace(MACHINE.rates, product=0.55, memory=0.45, link=0.35, nic=0.4)
SHAPES = (
    Shape("small", 24, 2048, 16),
    Shape("wide", 16, 6144, 48),
    Shape("long", 12, 2048, 16, sequence=8192),
)
LAYOUTS = (
    Layout(dp=8),
    Layout(dp=8, tp=8),
    Layout(dp=64, shards=3),
    Layout(tp=4, pp=4, micros=16),
    Layout(dp=2, tp=2, micro_batch=4),
)


def steps(of: Rates, layouts: tuple[Layout, ...] = LAYOUTS) -> list[Measured]:
    given = replace(MACHINE, rates=of)
    return [
        Measured(shape, layout, MACHINE, step(shape, layout, given).seconds)
        for shape in SHAPES
        for layout in layouts
    ]


def test_planted_rates_are_found_again():
    found = calibrated(MACHINE.rates, steps(PLANTED), strength=0.01)
    unseen = steps(PLANTED, (Layout(dp=4, tp=2, micro_batch=2, micros=3), Layout(dp=2, pp=8, micros=24)))
    assert [each.predicted(found) for each in unseen] == pytest.approx(
        [each.seconds for each in unseen], rel=0.03
    )
    assert any(abs(each.predicted(MACHINE.rates) / each.seconds - 1) > 0.1 for each in unseen)


def test_a_disturbed_step_does_not_bend_the_rest():
    clean = steps(PLANTED)
    found = calibrated(
        MACHINE.rates, [replace(clean[0], seconds=5 * clean[0].seconds), *clean[1:]], strength=0.01
    )
    off = sorted(abs(each.predicted(found) / each.seconds - 1) for each in clean)
    assert off[len(off) // 2] < 0.05


def test_without_steps_nothing_is_learnt():
    assert calibrated(MACHINE.rates, []) is MACHINE.rates


def test_rates_that_no_step_tells_anything_of_stay():
    found = calibrated(MACHINE.rates, steps(PLANTED))
    assert found.scores_eager == pytest.approx(MACHINE.rates.scores_eager)


def test_the_file_of_rates_says_known_ones_for_known_devices():
    assert set(vars(rates_of("A100"))) == set(NAMES)
    assert rates_of("a device that nobody has fitted") == rates_of("another one")


@pytest.mark.parametrize(
    ("kind", "other"), [("GH200", "H100"), ("H100 96GB", "H100"), ("H200", "H100"), ("V100 16GB", "V100")]
)
def test_kinds_of_one_die_reach_alike(kind: str, other: str):
    """One slow code base alone had run on GH200: a planner said that it takes three times as long as an H100."""
    assert 0.75 < rates_of(kind).product / rates_of(other).product < 1.34
