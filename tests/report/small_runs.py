"""Small runs to report on, trained by threads, with all files that a command leaves in a run's folder."""

from dataclasses import replace
from pathlib import Path

import torch

from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.sharding.mesh import AXES
from meshwright.report.terminal.action_table import plan_summary
from meshwright.report.terminal.memory_and_sent_bytes import state_nbytes_by_role
from meshwright.run.config.config_and_plan_files import PlanRequest
from meshwright.run.config.plan_file import write_request
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from meshwright.run.telemetry.run_info import write_run_info
from meshwright.run.training.train_loop import train_loop
from meshwright.testing.ranks import run_on_threads
from tests.tiny_model import analyzed_model, executor_of, plan_of, tiny_job, token_samples

ANALYZED = analyzed_model()


def train_small_run(
    folder: Path,
    ranks: int = 3,
    steps: int = 6,
    lr: float = 0.01,
    trace_steps: int = 2,
    algorithm: str = "backend",
) -> Path:
    """A run in `folder` of `steps` steps on `ranks` threads; returns the folder."""
    job = tiny_job()
    job = replace(job, train=replace(job.train, steps=steps), optimizer=replace(job.optimizer, lr=lr))
    run = RunConfig(str(folder), save_every=3, trace_steps=trace_steps)
    strategies = (BatchSplit(), DDP(algorithm=algorithm)) if ranks > 1 else ()
    plan = replace(plan_of(ANALYZED, ranks, strategies, micro_batch=2, job=job), run=run)
    mesh = {axis: plan.mesh.size(axis) for axis in AXES}
    request = PlanRequest(plan.job, run, mesh, plan.micro_batch, strategies=plan.strategies)
    write_request(request, folder / "plan.toml")
    write_run_info(plan, plan_summary(plan), state_nbytes_by_role(plan), torch.device("cpu"))

    def rank(world):
        executor, local_batches = (
            executor_of(ANALYZED, plan, world),
            open_local_batches(ExampleDataset(token_samples()), plan, world.rank),
        )
        train_loop(executor, plan, local_batches, world, lambda: False)
        executor.close()

    run_on_threads(rank, plan.mesh)
    return folder
