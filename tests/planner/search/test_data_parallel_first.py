"""Data parallelism alone comes first where the model fits on one device and nothing is clearly faster."""

from dataclasses import replace

import pytest

from meshwright.planner.analytic.model_shape import parse_shape
from meshwright.planner.analytic.parallel_config import ZB_H1, ScheduleProfile
from meshwright.planner.machine.machine import make_machine
from meshwright.planner.search.data_parallel_first import (
    ESTIMATE_ERROR,
    DataParallelChoice,
    compare_data_parallel,
    put_first,
)
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import SearchResult, search

SMALL = SearchRequest(
    parse_shape("1b: layers 16 hidden 2048 heads 16 vocab 32000"),
    make_machine("H100", 8),
    64,
    {"1f1b": (ScheduleProfile(), 1)},
)


def compared(request: SearchRequest) -> tuple[SearchResult, DataParallelChoice | None]:
    found = search(request, 8)
    return found, compare_data_parallel(request, found)


def test_it_comes_first_although_another_configuration_seems_a_little_faster():
    """A model so small that launching kernels takes most of the time, which pipeline stages share."""
    tiny = replace(SMALL, shape=parse_shape("3m: layers 4 hidden 256 heads 8 vocab 256 sequence 1024 gated"))
    found, choice = compared(replace(tiny, schedules={"zb_h1": (ZB_H1, 1)}))
    assert found.best[0].config.pp > 1
    assert choice is not None
    assert choice.candidate is not None
    assert choice.is_first
    config = choice.candidate.config
    assert (config.dp, config.tp, config.pp, config.cp) == (8, 1, 1, 1)
    assert choice.candidate.seconds <= (1 + ESTIMATE_ERROR) * found.best[0].seconds


def test_what_is_put_first_is_there_once_and_no_more_are_kept():
    found, choice = compared(SMALL)
    assert choice is not None
    assert choice.candidate is not None
    moved = put_first(found, choice.candidate, 3)
    assert moved.best[0] is choice.candidate
    assert len(moved.best) == 3
    assert len({each.config for each in moved.best}) == 3


def test_a_model_that_does_not_fit_is_not_compared():
    large = replace(SMALL, shape=parse_shape("13b: layers 40 hidden 5120 heads 40"))
    assert compared(large)[1] is None


@pytest.mark.parametrize("fixed", [{"tp": 2}, {"pp": 2}, {"cp": 2}])
def test_a_choice_of_the_user_comes_before_it(fixed: dict[str, int]):
    assert compared(replace(SMALL, fixed=fixed))[1] is None


def test_a_fixed_zero_stage_is_kept():
    _, choice = compared(replace(SMALL, fixed={"zero_stage": 2}))
    assert choice is not None
    assert choice.candidate is not None
    assert choice.candidate.config.zero_stage == 2


def test_one_device_has_nothing_to_compare():
    assert compared(replace(SMALL, machine=make_machine("H100", 1)))[1] is None


def test_a_batch_that_does_not_divide_has_no_data_parallelism_alone():
    _, choice = compared(replace(SMALL, batch=4))
    assert choice is not None
    assert (choice.candidate, choice.batch_divides, choice.is_first) == (None, False, False)


def test_what_is_clearly_faster_stays_first():
    _, choice = compared(SMALL)
    assert choice is not None
    assert choice.candidate is not None
    step = choice.candidate.step
    faster = replace(choice.candidate, step=replace(step, compute=step.compute - 0.1 * step.seconds))
    assert not replace(choice, fastest=faster).is_first
