"""Heterogeneous devices: how work is divided, that a step takes as long as its slowest rank, and that groups
do not mix kinds.
"""

from dataclasses import replace
from math import inf

import pytest

from meshwright.planner.analytic.closed_form_step_time import step_time
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ZB_H1, ZB_V, ParallelConfig, ScheduleProfile
from meshwright.planner.machine.machine import Machine, make_machine
from meshwright.planner.search.candidates import with_microbatch_sizes
from meshwright.planner.search.heterogeneous import (
    DeviceKind,
    HeterogeneousEstimator,
    assign_layers,
    search_each_kind,
    search_heterogeneous,
    slowest_rates_machine,
)
from meshwright.planner.search.lower_bounds import SAFETY_FACTOR
from meshwright.planner.search.request import USABLE_MEMORY_FRACTION, SearchRequest
from meshwright.planner.search.search import TopCandidates, search

SHAPE = ModelShape("7b", 32, 4096, 32, vocab=32_000)
ORDERS = {"1f1b": (ScheduleProfile(), 1), "zb_h1": (ZB_H1, 1), "zb_v": (ZB_V, 2)}


def request(machines: list[Machine], **said: object) -> SearchRequest:
    return SearchRequest(SHAPE, slowest_rates_machine(machines), 64, ORDERS, **said)


def test_two_halves_of_one_kind_are_that_kind():
    halves = [make_machine("A100", 8), make_machine("A100", 8)]
    given = replace(request(halves), devices_by_kind=(8, 8))
    one = replace(given, machine=make_machine("A100", 16))
    found, whole = search_heterogeneous(given, halves, 3), search(one, 3)
    assert found.best[0].seconds == pytest.approx(whole.best[0].seconds, rel=0.02)


def test_slow_devices_have_fewer_layers_in_proportion_to_their_speed():
    kinds = [make_machine("H100", 8), make_machine("A100", 8)]
    found = search_heterogeneous(request(kinds, fixed={"pp": 2, "tp": 1}), kinds, 1).best[0]
    counts = dict(found.layer_assignment)
    assert sum(count for _, count in found.layer_assignment) == 32
    paces = {}
    for kind in kinds:
        less, more = (step_time(replace(SHAPE, layers=2 * layers), found.config, kind) for layers in (1, 2))
        paces[kind.device.name] = more.compute + more.tp_comm - less.compute - less.tp_comm
    late = max(counts[name] * paces[name] for name in paces)
    for more, less in (
        ("H100", "A100"),
        ("A100", "H100"),
    ):  # a layer from the one to the other makes nobody faster
        assert max((counts[more] + 1) * paces[more], (counts[less] - 1) * paces[less]) >= late


def test_a_step_takes_as_long_as_its_slowest_rank():
    kinds = [make_machine("H100", 8), make_machine("A100", 8)]
    found = search_heterogeneous(request(kinds, fixed={"pp": 4}), kinds, 1).best[0]
    busy = [
        step_time(
            replace(SHAPE, layers=4 * count),
            found.config,
            replace(make_machine(kind, 16), host_size_override=8),
        )
        for kind, count in found.layer_assignment
    ]
    assert found.step.compute + found.step.tp_comm == pytest.approx(
        max(each.compute + each.tp_comm for each in busy), rel=0.01
    )


def test_memory_bounds_the_layers_of_a_kind():
    small = make_machine("H100", 2)
    small = replace(small, device=replace(small.device, memory=30 * 2**30))
    kinds = (DeviceKind(make_machine("A100", 2), 0, 2), DeviceKind(small, 2, 2))
    assigned = assign_layers(SHAPE, ParallelConfig(pp=4, num_microbatches=8), kinds)
    assert assigned is not None
    assert sum(sum(kind.layers_by_rank) for kind in assigned) == 32
    assert assigned[1].max_layers < assigned[0].max_layers  # though it is three times as fast
    assert assign_layers(replace(SHAPE, layers=300), ParallelConfig(pp=4, num_microbatches=8), kinds) is None


def test_replicas_wait_for_the_slowest_and_fit_on_the_smallest():
    kinds = [make_machine("H100", 8), make_machine("A100 40GB", 8)]
    found = search_heterogeneous(request(kinds, fixed={"pp": 1}), kinds, 3)
    assert all(each.memory.total <= USABLE_MEMORY_FRACTION * 40 * 2**30 for each in found.best)
    assert all(8 % (each.config.tp * each.config.cp) == 0 for each in found.best)
    slow = search(SearchRequest(SHAPE, make_machine("A100 40GB", 16), 64, ORDERS, fixed={"pp": 1}), 1).best[0]
    assert found.best[0].seconds >= 0.99 * slow.seconds


def test_each_kind_alone_is_reported():
    kinds = [make_machine("H100", 8), make_machine("V100", 8)]
    found = {kind.device.name: each for kind, each in search_each_kind(request(kinds), kinds)}
    fast, slow = found["H100"], found["V100"]
    assert fast is not None
    assert slow is None or fast.seconds < slow.seconds


@pytest.mark.parametrize("sequence", [2048, 131_072])
@pytest.mark.parametrize("counts", [(8, 8), (4, 8), (6, 12)])
def test_the_winner_on_heterogeneous_devices_is_that_of_all_layouts(sequence: int, counts: tuple[int, int]):
    kinds = [make_machine("H100", counts[0]), make_machine("A100 40GB", counts[1])]
    shape = ModelShape("3b", 13, 2048, 16, vocab=32_000, sequence=sequence)
    asked = replace(request(kinds), shape=shape, devices_by_kind=counts, batch=24)
    short, whole = search_heterogeneous(asked, kinds), search_heterogeneous(asked, kinds, prune=False)
    assert [(each.config, each.layer_assignment) for each in short.best] == [
        (each.config, each.layer_assignment) for each in whole.best
    ]
    assert short.best
    assert short.num_estimated < whole.num_estimated * 0.75


def test_no_split_takes_less_than_the_lower_bound_of_its_mesh():
    kinds = [make_machine("H100", 4), make_machine("V100", 8), make_machine("A100", 4)]
    shape = ModelShape("1b", 9, 1024, 8, vocab=32_000, sequence=16_384)
    ground, assigned = (
        HeterogeneousEstimator(
            replace(request(kinds), shape=shape, devices_by_kind=(4, 8, 4), batch=16), kinds
        ),
        0,
    )
    for mesh in ground.meshes():
        for sized in with_microbatch_sizes(ground.request, mesh):
            best = TopCandidates(1000)
            ground.estimate(sized, best, inf)
            assigned += len(best.candidates)
            for each in best.candidates:
                order, chunks = ground.request.schedules[each.schedule]
                assert ground.mesh_bound_s(mesh) <= ground.bound_s(sized) / SAFETY_FACTOR
                assert ground.bound_s(sized) <= ground.schedule_bound_s(sized, order, chunks) <= each.seconds
                assert ground.may_fit(sized)
    assert assigned > 50


def test_thousands_of_heterogeneous_devices_estimate_few_configurations():
    """Of 82,000 configurations with long rows, 2 in a hundred are estimated."""
    kinds = [make_machine("H100", 2048), make_machine("H200", 2048)]
    shape = ModelShape("8b", 32, 4096, 32, kv_heads=8, ffn=14_336, gated=True, sequence=131_072)
    asked = replace(request(kinds), shape=shape, devices_by_kind=(2048, 2048), batch=4096)
    found = search_heterogeneous(asked, kinds, 8)
    assert len(found.best) == 8
    assert found.num_estimated < 4000
