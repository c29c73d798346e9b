"""Numbers that arrive late change no result: on a GPU the loss is divided by a count that the host does not
know yet.
"""

from dataclasses import replace

import pytest
import torch

from meshwright.api import make_plan
from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.async_copies import DeviceCopies
from meshwright.engine.runtime.rank_state import Metrics
from meshwright.model.loss.loss_definition import IGNORE_INDEX
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.pipeline.pipedream import PipeDream
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.job import LossGuard, OptimizerConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from meshwright.testing.ranks import run_on_threads
from tests.engine.late_copies import LateCopies
from tests.tiny_model import analyzed_model, executor_of, tiny_job, token_samples

ANALYZED = analyzed_model()
STEPS = 4
PLANS = {
    "one rank, chunked loss": (Mesh(), (ChunkedLoss(2),)),
    "ddp": (Mesh(dp_replicate=3), (BatchSplit(), DDP())),
    "zero 3, chunked loss": (Mesh(dp_shard=3), (BatchSplit("dp_shard"), ChunkedLoss(2), ZeRO())),
    "stages": (Mesh(pp=2, dp_replicate=2), (Pipeline(), BatchSplit(), DDP())),
    "an update per microbatch": (Mesh(pp=2, dp_replicate=2), (PipeDream(), BatchSplit(), DDP())),
    "one rank reads": (Mesh(dp_replicate=3), (BatchSplit(), DataParallelMaster())),
}


def plan_named(name: str) -> Plan:
    mesh, strategies = PLANS[name]
    job = tiny_job(optimizer=OptimizerConfig("adamw", lr=0.01))
    if name == "an update per microbatch":
        job = replace(job, train=replace(job.train, clip=0.0))
    return make_plan(ANALYZED, job, mesh, strategies, 2 if mesh.pp > 1 else 0)


def trained(plan: Plan) -> list[tuple[list[Metrics], dict[str, torch.Tensor]]]:
    """Each rank's metrics and parameters; nothing counts in the second step, and the last one is short."""
    samples = token_samples(12 * (STEPS - 1) + 5)
    samples["labels"][12:24] = IGNORE_INDEX
    dataset = ExampleDataset(samples)

    def rank(world: World) -> tuple[list[Metrics], dict[str, torch.Tensor]]:
        executor = executor_of(ANALYZED, plan, world)
        order = replace(open_local_batches(dataset, plan, world.rank), order=InOrder())
        metrics = [executor.step(order.batch(step)) for step in range(STEPS)]
        executor.close()
        return metrics, executor.gather_parameters()

    return run_on_threads(rank, plan.mesh)


class InOrder:
    num_total = None

    def ids(self, step: int, batch: int) -> list[int]:
        total = 12 * (STEPS - 1) + 5
        return [row if row < total else -1 for row in range(step * batch, (step + 1) * batch)]


@pytest.mark.parametrize("name", PLANS)
def test_numbers_that_arrive_late_change_no_bit(name, monkeypatch):
    plan = plan_named(name)
    expected = trained(plan)
    monkeypatch.setattr("meshwright.engine.runtime.rank_state.DeviceCopies", LateCopies)
    for (metrics, parameters), (late, found) in zip(expected, trained(plan), strict=True):
        assert [each.is_skipped for each in late] == [False, True, False, False]
        assert all(each.numbers.is_late for each in late)
        assert late == metrics
        assert all(torch.equal(found[key], parameters[key]) for key in parameters)


def test_the_loss_guard_reads_the_numbers_before_the_step_as_ever(monkeypatch):
    monkeypatch.setattr("meshwright.engine.runtime.rank_state.DeviceCopies", LateCopies)
    plan = make_plan(ANALYZED, tiny_job(guard=LossGuard("skip")), Mesh(dp_replicate=2))
    for metrics, _ in trained(plan):
        assert not any(each.numbers.is_late for each in metrics)


def test_on_the_cpu_numbers_are_read_at_once_and_tensors_stay_where_they_are():
    copies, number, tensor = DeviceCopies(torch.device("cpu")), torch.tensor(3.0), torch.ones(2)
    read = copies.read((number,))
    number.zero_()
    assert read() == [3.0]
    assert copies.to_device([tensor])[0] is tensor
