"""Planned state bytes equal the bytes of an executor, and the formulas of the paper."""

from dataclasses import replace

import pytest

from meshwright.api import make_plan
from meshwright.comm.collectives.group import World
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.job import Job, OptimizerConfig, ParamGroupConfig, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import StateBytes, state_bytes, transient_nbytes
from meshwright.testing.ranks import run_on_threads
from tests.paper_model import SyntheticModel
from tests.tiny_model import analyzed_model, executor_of, tiny_job, token_samples

SHARD = BatchSplit(axis="dp_shard")
FLOAT = PrecisionConfig()
MIXED = PrecisionConfig(
    "bfloat16", "bfloat16", "bfloat16", master="float32", gradients="bfloat16", optimizer_states="float32"
)
PRECISIONS = [FLOAT, PrecisionConfig(reduce="bfloat16"), MIXED]
OPTIMIZERS = [
    OptimizerConfig(),
    OptimizerConfig("sgd"),
    OptimizerConfig("sgd", momentum=0.9),
    OptimizerConfig(groups=(ParamGroupConfig("head.*", name="sgd", momentum=0.5),)),
]


def assert_holds_planned_bytes(
    options: dict[str, bool], strategies: tuple[Strategy, ...], mesh: Mesh, job: Job, micro_batch: int = 0
) -> None:
    """Play two steps on threads, and compare what each rank holds with its plan."""
    analyzed = analyzed_model(**options)
    plan = make_plan(analyzed, job, mesh, strategies, micro_batch)

    def on_rank(world: World) -> dict[str, int]:
        executor = executor_of(analyzed, plan, world)
        batch = (
            {key: value[plan.samples_read(world.rank)] for key, value in token_samples().items()}
            if plan.is_primary_rank(world.rank)
            else None
        )
        executor.step(batch)
        executor.step(batch)
        sizes = executor.memory_by_category()
        executor.close()
        return sizes

    for rank, sizes in enumerate(run_on_threads(on_rank, mesh)):
        said = state_bytes(plan, rank)
        assert sum(sizes.values()) == said.total, (rank, sizes, said)
        assert (sizes["parameters"], sizes["optimizer_states"]) == (said.parameters, said.optimizer_states)


def job_of(precision: PrecisionConfig = FLOAT, optimizer: OptimizerConfig = OPTIMIZERS[0]) -> Job:
    return tiny_job(precision=precision, optimizer=optimizer)


@pytest.mark.parametrize("precision", PRECISIONS, ids=["float32", "bfloat16 sums", "mixed"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_zero_rank_holds_the_planned_bytes(stage: int, precision: PrecisionConfig):
    assert_holds_planned_bytes({}, (SHARD, ZeRO(stage=stage)), Mesh(dp_shard=3), job_of(precision), 2)


@pytest.mark.parametrize("options", [{"tied": True}, {"frozen": True}, {"spare": True}], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ties_frozen_and_unused_weights_are_counted_once(stage: int, options: dict[str, bool]):
    assert_holds_planned_bytes(options, (SHARD, ZeRO(stage=stage)), Mesh(dp_shard=2), job_of())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adamw", "sgd", "momentum", "two rules"])
def test_optimizer_states_are_those_of_the_optimizer_of_the_weight(optimizer: OptimizerConfig):
    assert_holds_planned_bytes({}, (SHARD, ZeRO(stage=2)), Mesh(dp_shard=3), job_of(optimizer=optimizer))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_over_replicas(stage: int):
    assert_holds_planned_bytes(
        {"tied": True},
        (BatchSplit(), SHARD, ZeRO(stage=stage, replicate_axis="dp_replicate")),
        Mesh(dp_replicate=2, dp_shard=3),
        job_of(),
    )


@pytest.mark.parametrize("precision", PRECISIONS, ids=["float32", "bfloat16 sums", "mixed"])
def test_ddp(precision: PrecisionConfig):
    assert_holds_planned_bytes({}, (BatchSplit(), DDP()), Mesh(dp_replicate=2), job_of(precision))
    assert_holds_planned_bytes({}, (), Mesh(), job_of(precision))


def test_ranks_without_the_master_keep_no_optimizer_states():
    plan = Plan.make(
        job_of(), Mesh(dp_replicate=3), SyntheticModel().model_spec, (BatchSplit(), DataParallelMaster())
    )
    first, second = state_bytes(plan, 0), state_bytes(plan, 1)
    assert (second.optimizer_states, second.master) == (0, 0)
    assert first.optimizer_states > 0
    assert first.parameters == second.parameters


def synthetic_plan(
    stage: int, ranks: int, precision: PrecisionConfig = MIXED, numel: int = 1200
) -> StateBytes:
    job = replace(job_of(precision), train=replace(job_of().train, batch=ranks))
    plan = Plan.make(
        job,
        Mesh(dp_shard=ranks),
        SyntheticModel(layers=5, numel=numel).model_spec,
        (SHARD, ZeRO(stage=stage)),
    )
    return state_bytes(plan, 0)


@pytest.mark.parametrize("ranks", [1, 2, 4, 100])
def test_two_two_and_twelve_bytes_per_parameter(ranks: int):
    numel, counters = 5 * 1200, 5 * 4
    assert synthetic_plan(1, ranks).model_states == 4 * numel + 12 * numel // ranks + counters
    assert synthetic_plan(2, ranks).model_states == 2 * numel + 14 * numel // ranks + counters
    assert synthetic_plan(3, ranks).model_states == 16 * numel // ranks + counters


def test_mixed_precision_leaves_states_at_sixteen_bytes():
    assert synthetic_plan(3, 4, MIXED).model_states == synthetic_plan(3, 4, FLOAT).model_states


def test_buffers_do_not_grow_with_the_model():
    few, many = (state_bytes_of_layers(layers) for layers in (5, 50))
    assert few.buffers == many.buffers == 4 * 1200 * 4
    assert many.model_states == 10 * few.model_states


def state_bytes_of_layers(layers: int) -> StateBytes:
    plan = Plan.make(
        job_of(), Mesh(dp_shard=3), SyntheticModel(layers=layers, numel=1200).model_spec, (SHARD, ZeRO()), 1
    )
    return state_bytes(plan, 0)


def test_temporary_memory_is_the_gradients_of_one_block_and_activations():
    plan = Plan.make(
        job_of(), Mesh(dp_shard=3), SyntheticModel(layers=5, numel=1200).model_spec, (SHARD, ZeRO()), 1
    )
    activations = 5 * 4  # one element per block and sample, in float32
    assert transient_nbytes(plan) == activations + 1200 * 4
    whole = Plan.make(job_of(), Mesh(), SyntheticModel(layers=5, numel=1200).model_spec)
    assert transient_nbytes(whole) == activations * whole.job.train.batch
    later = Plan.make(job_of(), Mesh(), SyntheticModel(layers=5, numel=1200).model_spec, (), 1)
    assert (
        transient_nbytes(later) == activations + 1200 * 4
    )  # a second microbatch's gradient, until it is added


def test_the_last_ranks_hold_padding_and_fewer_optimizer_states():
    plan = Plan.make(
        job_of(), Mesh(dp_shard=12), SyntheticModel(layers=1, numel=5).model_spec, (SHARD, ZeRO())
    )
    first, last = state_bytes(plan, 0), state_bytes(plan, 11)
    assert first.parameters == last.parameters == 4
    assert (first.optimizer_states, last.optimizer_states) == (2 * 4 + 4, 0)
