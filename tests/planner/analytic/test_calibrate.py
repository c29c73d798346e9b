"""Rates fitted to measured steps: planted rates are recovered, and one disturbed step does not change
them.
"""

from dataclasses import replace

import pytest

from meshwright.planner.analytic.calibrate import MeasuredStep, calibrate
from meshwright.planner.analytic.closed_form_step_time import step_time
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.machine.machine import make_machine
from meshwright.planner.machine.machine_rates import RATE_NAMES, MachineRates, load_rates

MACHINE = make_machine("A100", 64)
PLANTED = replace(MACHINE.rates, matmul=0.55, memory=0.45, link=0.35, nic=0.4)
SHAPES = (
    ModelShape("small", 24, 2048, 16),
    ModelShape("wide", 16, 6144, 48),
    ModelShape("long", 12, 2048, 16, sequence=8192),
)
LAYOUTS = (
    ParallelConfig(dp=8),
    ParallelConfig(dp=8, tp=8),
    ParallelConfig(dp=64, zero_stage=3),
    ParallelConfig(tp=4, pp=4, num_microbatches=16),
    ParallelConfig(dp=2, tp=2, micro_batch=4),
)


def steps(of: MachineRates, layouts: tuple[ParallelConfig, ...] = LAYOUTS) -> list[MeasuredStep]:
    given = replace(MACHINE, rates=of)
    return [
        MeasuredStep(shape, layout, MACHINE, step_time(shape, layout, given).seconds)
        for shape in SHAPES
        for layout in layouts
    ]


def test_planted_rates_are_found_again():
    found = calibrate(MACHINE.rates, steps(PLANTED), strength=0.01)
    unseen = steps(
        PLANTED,
        (
            ParallelConfig(dp=4, tp=2, micro_batch=2, num_microbatches=3),
            ParallelConfig(dp=2, pp=8, num_microbatches=24),
        ),
    )
    assert [each.predicted_s(found) for each in unseen] == pytest.approx(
        [each.seconds for each in unseen], rel=0.03
    )
    assert any(abs(each.predicted_s(MACHINE.rates) / each.seconds - 1) > 0.1 for each in unseen)


def test_a_disturbed_step_does_not_bend_the_rest():
    clean = steps(PLANTED)
    found = calibrate(
        MACHINE.rates, [replace(clean[0], seconds=5 * clean[0].seconds), *clean[1:]], strength=0.01
    )
    off = sorted(abs(each.predicted_s(found) / each.seconds - 1) for each in clean)
    assert off[len(off) // 2] < 0.05


def test_without_steps_nothing_is_calibrated():
    assert calibrate(MACHINE.rates, []) is MACHINE.rates


def test_rates_that_no_step_depends_on_are_unchanged():
    found = calibrate(MACHINE.rates, steps(PLANTED))
    assert found.eager_score_passes == pytest.approx(MACHINE.rates.eager_score_passes)


def test_the_file_of_rates_has_known_rates_for_known_devices():
    assert set(vars(load_rates("A100"))) == set(RATE_NAMES)
    assert load_rates("a device that nobody has fitted") == load_rates("another one")


@pytest.mark.parametrize(
    ("kind", "other"), [("GH200", "H100"), ("H100 96GB", "H100"), ("H200", "H100"), ("V100 16GB", "V100")]
)
def test_kinds_of_one_die_reach_similar_rates(kind: str, other: str):
    """One slow code base alone had run on GH200: a planner said that it takes three times as
    long as an H100.
    """
    assert 0.75 < load_rates(kind).matmul / load_rates(other).matmul < 1.34
