"""A small run with evaluations, on threads, for tests that stop, corrupt and repeat it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.comm.collectives.group import World
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import EvalConfig, LossGuard, OptimizerConfig, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.checkpoint.directories import step_folder
from meshwright.run.checkpoint.resume import CHECKPOINTS_FOLDER, resume
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from meshwright.run.data.eval_samples import EvalSamples, split_held_out
from meshwright.run.telemetry.callbacks import Callback
from meshwright.run.telemetry.metrics_log import read_metrics
from meshwright.run.training.evaluations import Evaluations
from meshwright.run.training.train_loop import TrainResult, train_loop
from meshwright.testing.ranks import run_on_threads
from tests.tiny_model import analyzed_model, executor_of, plan_of, tiny_job, token_samples

ANALYZED = analyzed_model(p=0.1)
DATA = ExampleDataset(token_samples(31))


@dataclass(frozen=True)
class SmallRun:
    """A run in `folder`; `change(rank, executor)` may spoil it, `stop(rank, steps_done)` is asked before each
    step.
    """

    folder: Path
    ranks: int = 2
    steps: int = 12
    lr: float = 1e-2
    evaluate: EvalConfig = field(default_factory=lambda: EvalConfig(hold_out=7, every=3))
    guard: LossGuard = field(default_factory=LossGuard)
    run: Mapping[str, Any] = field(default_factory=lambda: {"save_every": 4, "keep": 2})
    stop: Callable[[int, int], bool] = lambda rank, done: False
    change: Callable[[int, Any], None] = lambda rank, executor: None
    callbacks: tuple[Callback, ...] = ()
    run_tasks: Callable[[int], Mapping[str, float]] | None = None  # of a rank
    sample_text: Callable[[], str] | None = None
    noise_scale: bool = False
    strategies: tuple[Strategy, ...] | None = None  # those of the mesh

    @property
    def plan(self) -> Plan:
        parts = {
            "optimizer": OptimizerConfig("adamw", lr=self.lr),
            "precision": PrecisionConfig(),
            "data": DataConfig("example"),
        }
        job = tiny_job(evaluate=self.evaluate, guard=self.guard, **parts)
        spec = replace(job.train, steps=self.steps, noise_scale=self.noise_scale)
        made = plan_of(ANALYZED, self.ranks, self.strategies, job=replace(job, train=spec))
        return replace(made, run=RunConfig(str(self.folder), **self.run))

    def play(self, step: int | None = None) -> list[TrainResult]:
        """Resume and train to the end, as the command does."""
        plan = self.plan

        def rank(world: World) -> TrainResult:
            executor = executor_of(ANALYZED, plan, world)
            self.change(world.rank, executor)
            training, held = split_held_out(DATA, plan.job.evaluate)
            resumed = resume(executor, plan, world, DATA.digest, step)
            evaluating = None if held is None else EvalSamples(held, plan, plan.data_index(world.rank))
            local_batches = open_local_batches(training, plan, world.rank)
            run_tasks = None if self.run_tasks is None else partial(self.run_tasks, world.rank)
            try:
                return train_loop(
                    executor,
                    plan,
                    local_batches,
                    world,
                    lambda: self.stop(world.rank, executor.steps_done),
                    self.callbacks,
                    evaluations=Evaluations(evaluating, run_tasks, self.sample_text),
                    eval_history=resumed.eval_history,
                )
            finally:
                executor.close()

        return run_on_threads(rank, plan.mesh)

    def lines(self, kind: str = "") -> dict[int, dict[str, Any]]:
        lines = read_metrics(self.folder / "metrics.jsonl")
        return {line["step"]: line for line in lines if line.get("kind", "") == kind}

    def losses(self, kind: str = "") -> dict[int, float]:
        return {step: line["loss"] for step, line in self.lines(kind).items()}

    def kept(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.folder / CHECKPOINTS_FOLDER).glob("step-*"))

    def best(self) -> dict[str, Any]:
        return json.loads((self.folder / CHECKPOINTS_FOLDER / "best.json").read_text())

    def at(self, step: int) -> Path:
        return step_folder(self.folder / CHECKPOINTS_FOLDER, step)


def rises(after: int) -> Callable[[int, Any], None]:
    """The loss of evaluations rises from step `after` on; before, it falls. Training sees no difference."""

    def change(rank: int, executor: Any) -> None:
        usual = executor.state.loss

        def total(outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
            found = usual.total(outputs, batch)
            away = abs(executor.steps_done - after)
            return found if torch.is_grad_enabled() else 0 * found + (1 + away) * usual.count(batch)

        executor.state.loss = replace(usual, total=total)

    return change
