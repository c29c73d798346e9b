"""Learning-rate schedules: the factor at the steps where it changes."""

import math
from itertools import pairwise

import pytest

from meshwright.engine.optim.lr_schedule import lr_factor
from meshwright.plan.job.job import LRScheduleConfig


def factors(schedule: LRScheduleConfig, steps: int) -> list[float]:
    return [lr_factor(schedule, step, steps) for step in range(steps)]


def test_constant_is_one_throughout_and_beyond():
    assert factors(LRScheduleConfig("constant"), 3) == [1.0] * 3
    assert lr_factor(LRScheduleConfig("constant"), 100, 3) == 1.0


@pytest.mark.parametrize("name", ["constant", "cosine", "wsd"])
def test_warm_up_rises_linearly_to_one(name: str):
    assert factors(LRScheduleConfig(name, warmup=4), 20)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_cosine_is_half_way_in_the_middle_and_ends_at_its_floor():
    schedule = LRScheduleConfig("cosine", warmup=10, floor=0.1)
    found = factors(schedule, 111)
    assert found[10] == 1.0
    assert found[60] == pytest.approx(0.55)
    assert found[110] == pytest.approx(0.1)
    assert lr_factor(schedule, 500, 111) == pytest.approx(0.1)
    assert found[35] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert all(later < earlier for earlier, later in pairwise(found[10:]))


def test_wsd_is_stable_and_then_falls_linearly_to_its_floor():
    schedule = LRScheduleConfig("wsd", warmup=2, decay=4, floor=0.2)
    assert factors(schedule, 10) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert lr_factor(schedule, 99, 10) == pytest.approx(0.2)


def test_wsd_without_decay_stays_at_one_beyond_the_last_step():
    assert [lr_factor(LRScheduleConfig("wsd"), step, 5) for step in (0, 4, 5, 9)] == [1.0] * 4


@pytest.mark.parametrize(
    "schedule",
    [LRScheduleConfig("cosine"), LRScheduleConfig("wsd", decay=1), LRScheduleConfig("cosine", warmup=1)],
)
def test_a_run_of_one_step_has_a_factor(schedule: LRScheduleConfig):
    assert 0 <= lr_factor(schedule, 0, 1) <= 1
