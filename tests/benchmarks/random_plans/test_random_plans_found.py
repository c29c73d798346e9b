"""What plans by chance have found, each with a small plan of its own."""

from dataclasses import replace

import pytest

from benchmarks.random_plans.random_draws import Draw
from benchmarks.random_plans.random_plans import TOLERANCE, plan_or_refusal, tried
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.memory.tiled_mlp import TiledMLP
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.tensor.cube_3d import TensorParallel3D
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy import Strategy

ROWS, SQUARE, CUBE = BatchSplit("dp_shard"), Mesh(dp_shard=2, tp=2), Mesh(dp_shard=2, tp=2, tp_depth=2)


def drawn(model: str, mesh: Mesh, *strategies: Strategy) -> Draw:
    return Draw(0, 0, model, mesh, strategies, micros=2, micro_batch=1, clip=0.5)


@pytest.mark.parametrize("cut", ["transformer.h.2", "lm_head"])
def test_glue_of_a_later_part_that_asks_for_the_width_of_the_stream_hears_of_the_slice(cut: str):
    pipeline = Pipeline(split_points=(cut,))
    row = tried(
        drawn("gpt2, even", Mesh(pp=2, dp_shard=2, tp=2), ROWS, TensorParallel2D(), ZeRO(), pipeline), 50.0
    )
    assert row.get("error", 1.0) < TOLERANCE, row


def test_a_tied_head_on_another_rank_than_its_table_takes_what_its_width_lies_in():
    pipeline = Pipeline(split_points=("lm_head",))
    row = tried(
        drawn("t5, even", Mesh(pp=2, dp_shard=2, tp=2), ROWS, TensorParallel2D(), ZeRO(), pipeline), 50.0
    )
    assert row.get("error", 1.0) < TOLERANCE, row


@pytest.mark.parametrize(
    ("mesh", "strategies", "said"),
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
def test_what_is_divided_twice_is_refused(mesh: Mesh, strategies: tuple[Strategy, ...], said: str):
    found = plan_or_refusal(drawn("llama, even", mesh, ROWS, ZeRO(), *strategies))
    assert not isinstance(found, Plan)
    assert said in found["said"]
    assert found["outcome"] == "refused"


def test_shards_along_two_axes_by_two_strategies_are_refused_with_the_one_that_does_it():
    mesh = Mesh(dp_replicate=2, dp_shard=2)
    found = plan_or_refusal(drawn("llama", mesh, ROWS, BatchSplit(), ZeRO(), ZeRO(axis="dp_replicate")))
    assert not isinstance(found, Plan)
    assert "cut into shards along dp_shard already, and now along dp_replicate too" in found["said"]
    assert 'replicate_axis = "dp_shard"' in found["said"]


def test_mlps_that_view_what_they_take_in_run_in_tiles_of_several_rows():
    row = tried(replace(drawn("gpt2", Mesh(), ChunkedLoss(), TiledMLP(num_tiles=2)), micro_batch=2), 50.0)
    assert row.get("error", 1.0) < TOLERANCE, row


def test_a_last_batch_with_fewer_rows_sends_as_much_where_its_own_plan_would_keep_more():
    strategies = RingAttention(), DDP("cp"), ActivationCheckpointing(keep_mb=0.01)
    row = tried(replace(drawn("llama", Mesh(cp=2), *strategies), micro_batch=2, missing=1), 50.0)
    assert row.get("error", 1.0) < TOLERANCE, row
