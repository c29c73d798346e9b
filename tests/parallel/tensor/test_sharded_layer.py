"""The messages of one redistribution: its collective and bytes, and those of its gradient."""

from dataclasses import replace

import pytest

from meshwright.parallel.tensor.sharded_layer import Redistribution
from meshwright.plan.job.job import PrecisionConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import I, P, Placement, R, S
from tests.paper_model import SyntheticModel
from tests.tiny_model import tiny_job

SHARDING = ShardingPlan.one_device(Mesh(dp_shard=3, tp_depth=2, tp=4), SyntheticModel().model_spec)
NUMEL = 3 * 2 * 4 * 5


def messages(redistribution: Redistribution, **precision: str) -> list[tuple[str, int]]:
    job = replace(tiny_job(), precision=PrecisionConfig(**precision))
    found = list(redistribution.transfers(NUMEL, SHARDING, job))
    assert all(transfer.axes == (redistribution.axis,) for transfer in found)
    return [(transfer.collective, transfer.nbytes) for transfer in found]


@pytest.mark.parametrize(
    ("src", "dst", "collective", "numel"),
    [
        (P, R, "all_reduce", NUMEL),
        (P, S(0), "reduce_scatter", NUMEL),
        (S(0), R, "all_gather", NUMEL // 4),
        (S(0), S(1), "all_to_all", NUMEL // 4),
    ],
)
def test_a_partial_sum_goes_in_whole_and_everything_else_as_a_shard(
    src: Placement, dst: Placement, collective: str, numel: int
):
    assert messages(Redistribution("tp", src, dst)) == [(collective, 4 * numel)]
    # along other axes the tensor is sharded meanwhile: 3-D tensor parallelism
    sharded = Redistribution("tp", src, dst, sharded_axes=("dp_shard", "tp_depth"))
    assert messages(sharded) == [(collective, 4 * numel // 6)]


@pytest.mark.parametrize(("src", "dst"), [(R, R), (I, R), (R, S(0)), (R, I)])
def test_what_needs_no_communication_has_no_message(src: Placement, dst: Placement):
    assert messages(Redistribution("tp", src, dst)) == []


def test_the_gradient_takes_the_adjoint_way_over_the_same_shards():
    there = Redistribution("tp", S(0), R, ("tp_depth",), in_param_dtype=True)
    assert there.adjoint == Redistribution("tp", P, S(0), ("tp_depth",), in_param_dtype=True)
    assert there.adjoint.adjoint == there


def test_a_message_has_the_dtype_that_is_asked_for():
    there = Redistribution("tp", P, R)
    assert messages(there, compute="bfloat16") == [("all_reduce", 2 * NUMEL)]
    assert messages(replace(there, in_param_dtype=True), compute="bfloat16") == [("all_reduce", 4 * NUMEL)]
    assert messages(replace(there, at_least_float32=True), compute="bfloat16") == [("all_reduce", 4 * NUMEL)]
