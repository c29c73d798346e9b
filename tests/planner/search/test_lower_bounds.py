"""Lower bounds of a mesh: below the time of any configuration, and close to it."""

from dataclasses import replace
from math import inf
from statistics import median

import pytest

from meshwright.commands.search.constraints import SCHEDULES
from meshwright.planner.analytic.closed_form_step_time import microbatch_time, step_time
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.machine.machine import make_machine
from meshwright.planner.search.candidates import (
    candidate_meshes,
    configs_on_mesh,
    valid_schedules,
    with_microbatch_sizes,
)
from meshwright.planner.search.lower_bounds import SAFETY_FACTOR, sample_bound
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import HomogeneousEstimator

SMALL = ModelShape("small", 7, 1536, 12, kv_heads=4, vocab=32_000, sequence=8192)
EXPERTS = replace(SMALL, experts=12, top_k=2, expert_ffn=512, shared_ffn=256, dense_layers=1)


@pytest.mark.parametrize(
    "shape",
    [*(replace(SMALL, sequence=sequence) for sequence in (512, 8192, 131_072)), EXPERTS],
    ids=["512", "8192", "131072", "experts"],
)
@pytest.mark.parametrize(
    ("kind", "start", "latency"), [("A100", 4e-6, 3e-5), ("V100", 1e-3, 0.0), ("H100", 4e-6, 1e-2)]
)
def test_no_layout_takes_less_than_the_lower_bound_of_its_mesh(
    shape: ModelShape, kind: str, start: float, latency: float
):
    """Parts that do not come out even, every order, kernels that start slowly, and links that answer late or
    at once.
    """
    given = make_machine(kind, 12, host_size_override=4)
    given = replace(given, rates=replace(given.rates, kernel_start_s=start, latency_s=latency))
    asked = SearchRequest(shape, given, 24, SCHEDULES, min_tokens_per_rank=256)
    ground, close = HomogeneousEstimator(asked), []
    for mesh in candidate_meshes(asked):
        for sized in with_microbatch_sizes(asked, mesh):
            true = inf
            for turn in valid_schedules(asked, sized):
                taken = min(
                    step_time(asked.shape, layout, given).seconds
                    for layout, _ in configs_on_mesh(asked, sized, [turn])
                )
                assert ground.schedule_bound_s(sized, *turn[1:]) <= taken
                true = min(true, taken)
            assert ground.mesh_bound_s(mesh) <= true
            assert ground.bound_s(sized) <= true
            close.append(ground.bound_s(sized) / true if true < inf else 1.0)
    assert median(close) > 0.9


def test_a_sample_of_a_large_batch_takes_no_more_than_one_of_a_small():
    given = make_machine("H100", 8)
    for mesh in candidate_meshes(SearchRequest(SMALL, given, 64, SCHEDULES, min_tokens_per_rank=512)):
        row, before = sample_bound(SMALL, mesh, given), inf
        for rows in (1, 16, 256, 1 << 20):
            made = microbatch_time(SMALL, replace(mesh, micro_batch=rows), given)
            each = (made.layer + made.collectives).total / rows
            assert (
                row.layer <= each <= before * 1.25
            )  # tiles that are not full: not every step downwards is one
            before = each
        assert row.layer >= 0.999 * SAFETY_FACTOR * before
