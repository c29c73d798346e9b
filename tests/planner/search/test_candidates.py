"""Candidate configurations: every stage of ZeRO, schedule, method and placement, and no invalid one."""

from dataclasses import replace

from meshwright.planner.analytic.closed_form_memory import estimate_memory
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import DUALPIPE, ZB_H1, ZB_V, ScheduleProfile
from meshwright.planner.machine.machine import make_machine
from meshwright.planner.search.candidates import (
    candidate_meshes,
    configs_on_mesh,
    low_memory_configs,
    may_fit,
    valid_schedules,
    with_microbatch_sizes,
)
from meshwright.planner.search.request import SearchRequest

ORDERS = {
    "1f1b": (ScheduleProfile(), 1),
    "interleaved": (ScheduleProfile(), 0),
    "zb_h1": (ZB_H1, 1),
    "zb_v": (ZB_V, 2),
}
SMALL = ModelShape("small", 12, 1536, 12, vocab=32_000, sequence=8192)


def request(shape: ModelShape = SMALL, devices: int = 8, batch: int = 16, **said: object) -> SearchRequest:
    return replace(SearchRequest(shape, make_machine("A100", devices), batch, ORDERS), **said)


def test_every_allowed_choice_is_a_candidate():
    """Every kind of share, order, method and placement is among the configurations of some mesh."""
    asked = replace(
        request(replace(SMALL, sequence=32_768), batch=16),
        machine=make_machine("A100", 16, host_size_override=4),
    )
    laid = [
        each
        for mesh in candidate_meshes(asked)
        for sized in with_microbatch_sizes(asked, mesh)
        for each in configs_on_mesh(asked, sized)
    ]
    assert {schedule for _, schedule in laid} == {"", *ORDERS}
    assert {layout.zero_stage for layout, _ in laid} == {0, 1, 2, 3}
    assert {layout.zero_group_size for layout, _ in laid} >= {0, 2, 4}
    assert {(layout.cp, layout.ulysses_degree) for layout, _ in laid} == {
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
    assert {layout.recompute for layout, _ in laid} == {"none", "layers"}
    assert not any(list(layout.diagnostics(asked.shape)) for layout, _ in laid)


def test_tensor_ranks_stay_on_a_host():
    assert max(layout.tp for layout in candidate_meshes(request(devices=64))) <= 8


def test_an_axis_that_is_fixed_is_no_choice():
    assert {layout.pp for layout in candidate_meshes(request(fixed={"pp": 4}))} == {4}


def test_only_allowed_schedules_are_candidates():
    asked = request()
    sized = next(
        sized
        for mesh in candidate_meshes(asked)
        if mesh.pp == 4
        for sized in with_microbatch_sizes(asked, mesh)
    )
    every = list(valid_schedules(asked, sized))
    assert {schedule for _, schedule in configs_on_mesh(asked, sized)} == {
        schedule for schedule, _, _ in every
    }
    assert {schedule for _, schedule in configs_on_mesh(asked, sized, every[:1])} == {every[0][0]}
    assert not list(configs_on_mesh(asked, sized, []))


def test_no_layout_holds_less_than_the_leanest_and_more_samples_hold_more():
    """Also where microbatches enter at both ends of a pipeline, on meshes that have none: nothing lies there
    twice.
    """
    for orders in (ORDERS, {"dualpipe": (DUALPIPE, 1)}):
        asked = request(schedules=orders)
        for mesh in candidate_meshes(asked):
            before = 0.0
            for sized in with_microbatch_sizes(asked, mesh):
                least = min(
                    estimate_memory(asked.shape, layout).total for layout in low_memory_configs(asked, sized)
                )
                assert all(
                    estimate_memory(asked.shape, layout).total >= least
                    for layout, _ in configs_on_mesh(asked, sized)
                )
                assert least >= before
                before = least
                assert may_fit(asked, sized) == (least <= asked.usable_memory)
