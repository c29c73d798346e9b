"""Limits: what is told to fit fits, one step more does not, and what stops it is where the memory is."""

from dataclasses import replace

import pytest

from meshwright.planner.analytic.memory import footprint
from meshwright.planner.analytic.model_shape import parse_shape
from meshwright.planner.analytic.parallel_config import FOLDED, Order
from meshwright.planner.machine.machine import machine
from meshwright.planner.search.candidates import over
from meshwright.planner.search.max_fit import LIMITS, fits, limit, stopped
from meshwright.planner.search.request import Wish
from meshwright.planner.search.search import search

SHAPE = parse_shape("7b: layers 32 hidden 4096 heads 32")
WISH = Wish(SHAPE, machine("A100", 8), 16, {"1f1b": (Order(), 1), "zb_v": (FOLDED, 2)})


@pytest.mark.parametrize("what", LIMITS)
def test_the_limit_has_a_plan_that_fits(what: str):
    found = limit(WISH, what)
    assert found is not None
    assert found.found.best
    assert all(each.footprint.total <= WISH.memory for each in found.found.best)
    assert found.stopped is not None
    assert found.stopped.held.total > WISH.memory
    assert found.value != found.beyond


@pytest.mark.parametrize(("what", "step"), [("sequence", 1024), ("layers", 1)])
def test_one_step_more_fits_nowhere(what: str, step: int):
    found = limit(WISH, what)
    assert found is not None
    for more in (0, 1):
        shape = replace(SHAPE, **{what: found.value + more * step})
        asked = replace(WISH, shape=shape, least=1)
        assert fits(asked) == (not more)
        assert bool(search(asked, 1).best) == (not more)


def test_rows_go_as_far_as_positions_were_learnt_and_memory_before_them():
    far = limit(WISH, "sequence")
    assert far is not None
    near = limit(replace(WISH, longest=1000), "sequence")
    assert near is not None
    assert (near.value, near.beyond, near.learnt, near.stopped) == (1000, 1001, True, None)
    assert near.found.best
    between = limit(replace(WISH, longest=far.value + 1024), "sequence")
    assert between is not None
    assert (between.value, between.learnt, far.learnt) == (far.value, False, False)


def test_the_largest_batch_is_that_of_no_other_layout_at_once():
    found = limit(replace(WISH, machine=machine("A100", 4)), "batch")
    assert found is not None
    best = found.found.best[0].layout
    assert best.micros <= best.pp
    assert best.dp * best.micros * best.micro_batch == found.value
    assert found.apart is not None
    assert found.apart.seconds <= found.found.best[0].seconds
    for rows in range(found.value + 1, found.value + 9):
        assert not search(replace(WISH, machine=machine("A100", 4), batch=rows, at_once=True), 1).best


def test_the_fewest_devices_are_told_with_those_that_are_too_few():
    found = limit(
        replace(WISH, shape=parse_shape("70b: layers 80 hidden 8192 heads 64"), batch=64), "devices"
    )
    assert found is not None
    assert found.wish.machine.count == found.value
    fewer = replace(found.wish, machine=machine("A100", found.beyond))
    assert fits(found.wish)
    assert not fits(fewer)
    assert found.stopped is not None
    assert found.stopped.most == "moments"


def test_what_is_given_stays_at_the_limit():
    found = limit(replace(WISH, fixed={"tp": 2, "shards": 1}, reruns=("none",)), "layers")
    free = limit(WISH, "layers")
    assert found is not None
    assert free is not None
    assert found.value < free.value
    assert {(each.layout.tp, each.layout.shards, each.layout.reruns) for each in found.found.best} <= {
        (2, 1, "none"),
        (2, 0, "none"),
    }


def test_where_not_even_the_least_fits_there_is_no_limit():
    wide = replace(
        WISH, shape=parse_shape("odd: layers 4 hidden 81920 heads 640"), machine=machine("V100", 2)
    )
    assert limit(wide, "layers") is None
    assert limit(wide, "sequence") is None
    assert limit(wide, "batch") is None


def test_what_stops_is_the_leanest_layout_and_its_fullest_rank():
    tight = replace(WISH, shape=replace(SHAPE, layers=400))
    found = stopped(tight)
    assert found is not None
    assert found.held.total == footprint(tight.shape, found.layout).total
    sized = replace(found.layout, shards=0, reruns="none", order=Order(), chunks=1)
    assert all(footprint(tight.shape, layout).total >= found.held.total for layout, _ in over(tight, sized))


@pytest.mark.parametrize(("kind", "devices", "batch", "heads"), [("H100", 12, 24, 16), ("A100", 12, 12, 12)])
def test_no_longer_row_fits_though_what_fits_does_not_fall_evenly(
    kind: str, devices: int, batch: int, heads: int
):
    """Of 12 devices 3 divide a row: lengths of which tensor ranks have equal parts fit where shorter ones do not."""
    shape = parse_shape(f"r: layers 24 hidden {256 * heads} heads {heads} gated vocab 128256")
    asked = replace(WISH, shape=shape, machine=machine(kind, devices), batch=batch)
    found = limit(asked, "sequence", 1)
    assert found is not None
    assert found.found.best
    for more in (*range(1, 40), 64, 128, 256):
        longer = replace(asked, shape=replace(asked.shape, sequence=found.value + more * 1024), least=1)
        assert not fits(longer), more
