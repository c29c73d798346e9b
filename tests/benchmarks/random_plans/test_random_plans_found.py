"""Faults that random plans have found, each with a small plan of its own."""

from dataclasses import replace

import pytest

from benchmarks.random_plans.random_draws import Draw
from benchmarks.random_plans.random_plans import TOLERANCE, plan_or_refusal, try_plan
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.parallel.memory.tiled_mlp import TiledMLP
from meshwright.parallel.outer.local_sgd import LocalSGD
from meshwright.parallel.outer.streaming_diloco import StreamingDiLoCo
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.cube_3d import TensorParallel3D
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

SPLIT, SQUARE, CUBE = BatchSplit("dp_shard"), Mesh(dp_shard=2, tp=2), Mesh(dp_shard=2, tp=2, tp_depth=2)


def drawn(model: str, mesh: Mesh, *strategies: Strategy) -> Draw:
    return Draw(0, 0, model, mesh, strategies, num_microbatches=2, micro_batch=1, clip=0.5)


def test_a_loss_of_the_whole_batch_leaves_alone_what_its_stage_has_not_received():
    plan = Draw(
        0,
        0,
        "two inputs, contrastive",
        Mesh(pp=3, dp_shard=2),
        (SPLIT, Pipeline(), ZeRO()),
        num_microbatches=1,
        micro_batch=2,
        clip=0.5,
        num_missing_samples=1,
    )
    row = try_plan(plan, 50.0)
    assert row.get("error", 1.0) < TOLERANCE, row


@pytest.mark.parametrize("split_point", ["transformer.h.2", "lm_head"])
def test_glue_of_a_later_stage_that_reads_the_hidden_size_gets_that_of_the_slice(split_point: str):
    pipeline = Pipeline(split_points=(split_point,))
    row = try_plan(
        drawn("gpt2, even", Mesh(pp=2, dp_shard=2, tp=2), SPLIT, TensorParallel2D(), ZeRO(), pipeline), 50.0
    )
    assert row.get("error", 1.0) < TOLERANCE, row


def test_a_tied_head_on_another_rank_than_its_embedding_takes_slices_of_the_hidden_dim():
    pipeline = Pipeline(split_points=("lm_head",))
    row = try_plan(
        drawn("t5, even", Mesh(pp=2, dp_shard=2, tp=2), SPLIT, TensorParallel2D(), ZeRO(), pipeline), 50.0
    )
    assert row.get("error", 1.0) < TOLERANCE, row


@pytest.mark.parametrize(
    ("mesh", "strategies", "problem"),
    [
        (
            SQUARE,
            (TensorParallel2D(), TensorParallel()),
            "another strategy shards 28 weights along tp already",
        ),
        (
            SQUARE,
            (TensorParallel(), TensorParallel2D()),
            "another strategy shards 28 weights along tp already",
        ),
        (
            CUBE,
            (TensorParallel3D(), TensorParallel()),
            "another strategy shards 28 weights along tp already",
        ),
        (
            CUBE,
            (TensorParallel2D(), TensorParallel3D()),
            "another strategy shards 28 weights along tp already",
        ),
        (
            SQUARE,
            (TensorParallel(), TensorParallel(num_overlap_chunks=2)),
            "tensor_parallel is listed twice for tp, with other options",
        ),
        (
            SQUARE,
            (TensorParallel(), SequenceParallel(), SequenceParallel(regather=True)),
            "sequence_parallel is listed twice for tp, with other options",
        ),
    ],
    ids=str,
)
def test_a_matrix_that_two_strategies_shard_is_refused(
    mesh: Mesh, strategies: tuple[Strategy, ...], problem: str
):
    found = plan_or_refusal(drawn("llama, even", mesh, SPLIT, ZeRO(), *strategies))
    assert not isinstance(found, Plan)
    assert problem in found["message"]
    assert found["outcome"] == "refused"


def test_zero_along_two_axes_is_refused_with_replicate_axis_as_the_repair():
    mesh = Mesh(dp_replicate=2, dp_shard=2)
    found = plan_or_refusal(drawn("llama", mesh, SPLIT, BatchSplit(), ZeRO(), ZeRO(axis="dp_replicate")))
    assert not isinstance(found, Plan)
    assert "cut into shards along dp_shard already, and now along dp_replicate too" in found["message"]
    assert 'replicate_axis = "dp_shard"' in found["message"]


def test_mlps_that_view_their_input_run_in_tiles_of_several_samples():
    row = try_plan(replace(drawn("gpt2", Mesh(), ChunkedLoss(), TiledMLP(num_tiles=2)), micro_batch=2), 50.0)
    assert row.get("error", 1.0) < TOLERANCE, row


def test_an_incomplete_last_batch_sends_as_much_although_its_own_plan_would_keep_more():
    strategies = RingAttention(), DDP("cp"), MemoryBudget(budget_mb=0.05)
    row = try_plan(
        replace(drawn("llama", Mesh(cp=2), *strategies), micro_batch=2, num_missing_samples=1), 50.0
    )
    assert row.get("error", 1.0) < TOLERANCE, row


def test_fragments_of_other_sizes_share_two_buffers():
    streaming = StreamingDiLoCo(sync_every=3, fragments=3)
    row = try_plan(drawn("gpt2", Mesh(outer=2), streaming), 50.0)
    assert row.get("error", 1.0) < TOLERANCE, row


def test_a_site_of_one_rank_compares_its_own_samples():
    plan = replace(drawn("two inputs, contrastive", Mesh(outer=2), LocalSGD(sync_every=2)), micro_batch=3)
    row = try_plan(replace(plan, num_microbatches=1), 50.0)
    assert row.get("error", 1.0) < TOLERANCE, row
