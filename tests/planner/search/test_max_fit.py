"""Limits: the reported size fits, the next one does not, and the limiting rank is the one with most
memory.
"""

from dataclasses import replace

import pytest

from meshwright.planner.analytic.closed_form_memory import estimate_memory
from meshwright.planner.analytic.model_shape import parse_shape
from meshwright.planner.analytic.parallel_config import ZB_V, ScheduleProfile
from meshwright.planner.machine.machine import make_machine
from meshwright.planner.search.candidates import configs_on_mesh
from meshwright.planner.search.max_fit import FIT_QUANTITIES, find_max_fit, find_nearest_miss, fits
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import search

SHAPE = parse_shape("7b: layers 32 hidden 4096 heads 32")
REQUEST = SearchRequest(
    SHAPE, make_machine("A100", 8), 16, {"1f1b": (ScheduleProfile(), 1), "zb_v": (ZB_V, 2)}
)


@pytest.mark.parametrize("what", FIT_QUANTITIES)
def test_the_limit_has_a_plan_that_fits(what: str):
    found = find_max_fit(REQUEST, what)
    assert found is not None
    assert found.result.best
    assert all(each.memory.total <= REQUEST.usable_memory for each in found.result.best)
    assert found.nearest_miss is not None
    assert found.nearest_miss.memory.total > REQUEST.usable_memory
    assert found.value != found.next_value


@pytest.mark.parametrize(("what", "step"), [("sequence", 1024), ("layers", 1)])
def test_one_step_more_fits_nowhere(what: str, step: int):
    found = find_max_fit(REQUEST, what)
    assert found is not None
    for more in (0, 1):
        shape = replace(SHAPE, **{what: found.value + more * step})
        asked = replace(REQUEST, shape=shape, min_tokens_per_rank=1)
        assert fits(asked) == (not more)
        assert bool(search(asked, 1).best) == (not more)


def test_sequence_length_is_limited_by_learned_positions_or_by_memory():
    far = find_max_fit(REQUEST, "sequence")
    assert far is not None
    near = find_max_fit(replace(REQUEST, max_positions=1000), "sequence")
    assert near is not None
    assert (near.value, near.next_value, near.limited_by_positions, near.nearest_miss) == (
        1000,
        1001,
        True,
        None,
    )
    assert near.result.best
    between = find_max_fit(replace(REQUEST, max_positions=far.value + 1024), "sequence")
    assert between is not None
    assert (between.value, between.limited_by_positions, far.limited_by_positions) == (
        far.value,
        False,
        False,
    )


def test_the_largest_batch_is_that_of_no_other_layout_at_once():
    found = find_max_fit(replace(REQUEST, machine=make_machine("A100", 4)), "batch")
    assert found is not None
    best = found.result.best[0].config
    assert best.num_microbatches <= best.pp
    assert best.dp * best.num_microbatches * best.micro_batch == found.value
    assert found.best_sequential is not None
    assert found.best_sequential.seconds <= found.result.best[0].seconds
    for rows in range(found.value + 1, found.value + 9):
        assert not search(
            replace(REQUEST, machine=make_machine("A100", 4), batch=rows, single_wave=True), 1
        ).best


def test_the_fewest_devices_are_reported_with_a_number_that_is_too_small():
    found = find_max_fit(
        replace(REQUEST, shape=parse_shape("70b: layers 80 hidden 8192 heads 64"), batch=64), "devices"
    )
    assert found is not None
    assert found.request.machine.num_devices == found.value
    fewer = replace(found.request, machine=make_machine("A100", found.next_value))
    assert fits(found.request)
    assert not fits(fewer)
    assert found.nearest_miss is not None
    assert found.nearest_miss.largest_category == "optimizer_states"


def test_fixed_sizes_are_kept_at_the_limit():
    found = find_max_fit(
        replace(REQUEST, fixed={"tp": 2, "zero_stage": 1}, recompute_modes=("none",)), "layers"
    )
    free = find_max_fit(REQUEST, "layers")
    assert found is not None
    assert free is not None
    assert found.value < free.value
    assert {
        (each.config.tp, each.config.zero_stage, each.config.recompute) for each in found.result.best
    } <= {
        (2, 1, "none"),
        (2, 0, "none"),
    }


def test_without_any_size_that_fits_there_is_no_limit():
    wide = replace(
        REQUEST, shape=parse_shape("odd: layers 4 hidden 81920 heads 640"), machine=make_machine("V100", 2)
    )
    assert find_max_fit(wide, "layers") is None
    assert find_max_fit(wide, "sequence") is None
    assert find_max_fit(wide, "batch") is None


def test_the_limiting_layout_is_the_leanest_and_its_fullest_rank():
    tight = replace(REQUEST, shape=replace(SHAPE, layers=400))
    found = find_nearest_miss(tight)
    assert found is not None
    assert found.memory.total == estimate_memory(tight.shape, found.config).total
    sized = replace(
        found.config, zero_stage=0, recompute="none", schedule_profile=ScheduleProfile(), virtual_stages=1
    )
    assert all(
        estimate_memory(tight.shape, layout).total >= found.memory.total
        for layout, _ in configs_on_mesh(tight, sized)
    )


@pytest.mark.parametrize(("kind", "devices", "batch", "heads"), [("H100", 12, 24, 16), ("A100", 12, 12, 12)])
def test_no_longer_sequence_fits_although_fit_is_not_monotonic(
    kind: str, devices: int, batch: int, heads: int
):
    """Of 12 devices 3 divide a row: lengths of which tensor ranks have equal parts fit where shorter ones do
    not.
    """
    shape = parse_shape(f"r: layers 24 hidden {256 * heads} heads {heads} gated vocab 128256")
    asked = replace(REQUEST, shape=shape, machine=make_machine(kind, devices), batch=batch)
    found = find_max_fit(asked, "sequence", 1)
    assert found is not None
    assert found.result.best
    for more in (*range(1, 40), 64, 128, 256):
        longer = replace(
            asked, shape=replace(asked.shape, sequence=found.value + more * 1024), min_tokens_per_rank=1
        )
        assert not fits(longer), more
