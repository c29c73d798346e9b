"""Data that end within a microbatch: stages take the rows that are there, and what they send is what is
stated of so many.
"""

from dataclasses import replace

import pytest
import torch

from meshwright.api import make_plan, parallelize, select_local_batch, verify
from meshwright.comm.backends.threads import single_rank_world
from meshwright.comm.collectives.group import World
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from meshwright.testing.ranks import ProcessPool, run_on_threads
from meshwright.verifier.float64_parity_setup import make_parity_case
from meshwright.verifier.one_device.parity_case import ParityCase
from meshwright.verifier.parity import RankReport, compare_rank, make_verdict
from meshwright.verifier.reference import run_reference
from tests.parallel.pipeline.test_pipeline_strategy import NUM_SAMPLES, llama, planned
from tests.parallel.tensor.odd_llama import batches
from tests.tiny_model import analyzed_model, tiny_job, token_samples

BESIDE: dict[str, tuple[Mesh, tuple[Strategy, ...], int]] = {
    "pieces": (Mesh(pp=2, tp=2), (Pipeline(scatter=True), TensorParallel(), VocabParallel()), 2),
    "slices": (Mesh(pp=2, tp=3), (Pipeline(schedule="zb_h1"), TensorParallel(), SequenceParallel()), 2),
    "shards": (Mesh(pp=2, dp_shard=3), (Pipeline(schedule="zb_v"), BatchSplit("dp_shard"), ZeRO()), 2),
    "chunks": (Mesh(tp=3), (TensorParallel(num_overlap_chunks=2), SequenceParallel(regather=True)), 3),
}


@pytest.mark.parametrize("last", [5, 1])
@pytest.mark.parametrize("name", BESIDE)
def test_a_short_last_batch_is_that_of_one_device_to_the_last_message(name: str, last: int):
    mesh, strategies, micro_batch = BESIDE[name]
    full, short = batches(2, NUM_SAMPLES)
    plan = planned(llama(), mesh, *strategies, micro_batch=micro_batch)
    verdict = verify(llama(), plan, [full, {key: value[:last] for key, value in short.items()}])
    assert verdict.passed, verdict


def case_of(mesh: Mesh) -> ParityCase:
    """Two steps, of which the second has 5 rows: of two ranks with other rows, 2 and 1 for the first, 2 for
    the second.
    """
    shards = (BatchSplit("dp_replicate"), DDP()) if mesh.dp_replicate > 1 else ()
    plan = make_plan(analyzed_model(), tiny_job(12), mesh, (Pipeline(), *shards), 2)
    steps = [token_samples(12), {key: value[:5] for key, value in token_samples(12).items()}]
    return make_parity_case(
        analyzed_model(),
        plan,
        token_cross_entropy(),
        lambda plan, rank: lambda step: select_local_batch(steps[step], plan, rank),
    )


def compared(world: World) -> RankReport:
    case = case_of(world.mesh)
    return compare_rank(case, world, run_reference(case, 2))


def test_processes_send_what_is_stated_of_the_rows_there_and_no_other_number_passes(
    process_pool: ProcessPool,
):
    mesh = Mesh(pp=2, dp_replicate=2)
    reports = process_pool.run(compared, mesh)
    assert make_verdict(case_of(mesh), reports, "processes", {}).passed
    rows_of = [tuple(shape[0] for ((_, shape), *_) in report.microbatch_shapes[1]) for report in reports]
    assert set(rows_of) == {(2, 1, 1)}  # where rows are wanting, one stands in
    full = [replace(report, microbatch_shapes=[report.microbatch_shapes[0]] * 2) for report in reports]
    verdict = make_verdict(case_of(mesh), full, "processes", {})
    assert not verdict.passed
    assert "SEND" in str(verdict.first_difference)


def trained(world: World, plan: Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and parameters of an epoch of 17 samples: a last batch of 5, of microbatches of 2."""
    local_batches = open_local_batches(ExampleDataset(token_samples(17)), plan, world.rank)
    with parallelize(analyzed_model(), plan, world=world) as engine:
        losses = [engine.step(local_batches.batch(step)).loss for step in range(local_batches.num_steps or 0)]
        return losses, {name: value.clone() for name, value in engine.executor.gather_parameters().items()}


def an_epoch(mesh: Mesh) -> Plan:
    job = tiny_job(12)
    shards = (BatchSplit("dp_replicate"), DDP()) if mesh.dp_replicate > 1 else ()
    pipeline = (Pipeline(schedule="zb_h1"),) if mesh.pp > 1 else ()
    return make_plan(
        analyzed_model(), replace(job, data=replace(job.data, epochs=1)), mesh, (*pipeline, *shards), 2
    )


def equal(found: tuple[list[float], dict[str, torch.Tensor]]) -> bool:
    losses, parameters = trained(single_rank_world(torch.device("cpu")), an_epoch(Mesh()))
    assert len(losses) == 2
    near = max(abs(one - other) for one, other in zip(found[0], losses, strict=True)) < 1e-12
    return near and all(torch.allclose(value, found[1][name], 0, 1e-12) for name, value in parameters.items())


@pytest.mark.parametrize("mesh", [Mesh(pp=3), Mesh(pp=2, dp_replicate=3)], ids=str)
def test_an_epoch_that_ends_within_a_micro_batch_is_that_of_one_device(mesh: Mesh):
    assert all(map(equal, run_on_threads(lambda world: trained(world, an_epoch(mesh)), mesh)))


def on_a_process(world: World) -> tuple[list[float], dict[str, torch.Tensor]]:
    return trained(world, an_epoch(world.mesh))


def test_on_processes_too(process_pool: ProcessPool):
    assert all(map(equal, process_pool.run(on_a_process, Mesh(pp=2, dp_replicate=2))))
