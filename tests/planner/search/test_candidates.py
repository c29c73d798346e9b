"""What there is to choose from: every share, order, method and placement, and nothing that cannot be."""

from dataclasses import replace

from meshwright.planner.analytic.memory import footprint
from meshwright.planner.analytic.model_shape import Shape
from meshwright.planner.analytic.parallel_config import BOTH, FOLDED, HALVES, Order
from meshwright.planner.machine.machine import machine
from meshwright.planner.search.candidates import batches, lean, may_fit, meshes, over, turns
from meshwright.planner.search.request import Wish

ORDERS = {"1f1b": (Order(), 1), "interleaved": (Order(), 0), "zb_h1": (HALVES, 1), "zb_v": (FOLDED, 2)}
SMALL = Shape("small", 12, 1536, 12, vocab=32_000, sequence=8192)


def wish(shape: Shape = SMALL, devices: int = 8, batch: int = 16, **said: object) -> Wish:
    return replace(Wish(shape, machine("A100", devices), batch, ORDERS), **said)


def test_all_that_may_be_chosen_is_looked_at():
    """Every kind of share, order, method and placement is among the layouts of some mesh."""
    asked = replace(wish(replace(SMALL, sequence=32_768), batch=16), machine=machine("A100", 16, per_host=4))
    laid = [each for mesh in meshes(asked) for sized in batches(asked, mesh) for each in over(asked, sized)]
    assert {schedule for _, schedule in laid} == {"", *ORDERS}
    assert {layout.shards for layout, _ in laid} == {0, 1, 2, 3}
    assert {layout.within for layout, _ in laid} >= {0, 2, 4}
    assert {(layout.cp, layout.swaps) for layout, _ in laid} == {
        (1, 1),
        (2, 1),
        (2, 2),
        (4, 1),
        (4, 2),
        (4, 4),
        (8, 1),
        (8, 2),
        (8, 4),
    }
    assert {layout.reruns for layout, _ in laid} == {"none", "layers"}
    assert not any(list(layout.faults(asked.shape)) for layout, _ in laid)


def test_tensor_ranks_stay_on_a_host():
    assert max(layout.tp for layout in meshes(wish(devices=64))) <= 8


def test_an_axis_that_is_fixed_is_no_choice():
    assert {layout.pp for layout in meshes(wish(fixed={"pp": 4}))} == {4}


def test_of_all_orders_those_that_were_allowed_are_laid():
    asked = wish()
    sized = next(sized for mesh in meshes(asked) if mesh.pp == 4 for sized in batches(asked, mesh))
    every = list(turns(asked, sized))
    assert {schedule for _, schedule in over(asked, sized)} == {schedule for schedule, _, _ in every}
    assert {schedule for _, schedule in over(asked, sized, every[:1])} == {every[0][0]}
    assert not list(over(asked, sized, []))


def test_no_layout_holds_less_than_the_leanest_and_more_rows_hold_more():
    """Also where micro-batches enter at both ends of a pipeline, on meshes that have none: nothing lies there twice."""
    for orders in (ORDERS, {"dualpipe": (BOTH, 1)}):
        asked = wish(orders=orders)
        for mesh in meshes(asked):
            before = 0.0
            for sized in batches(asked, mesh):
                least = min(footprint(asked.shape, layout).total for layout in lean(asked, sized))
                assert all(footprint(asked.shape, layout).total >= least for layout, _ in over(asked, sized))
                assert least >= before
                before = least
                assert may_fit(asked, sized) == (least <= asked.memory)
