"""The loop around the step: feed, play, record, evaluate, save; stop when told to.

A signal sets a flag on the rank that got it. The flag travels in the header of the next step, so all ranks learn of it
in the same step, save the same checkpoint and end together. Whatever else ends a run early, an evaluation without gain or
a harmful step, follows from numbers that all ranks share.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import psutil
import torch

from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.loss import empty_loss_error
from meshwright.engine.runtime.loss_guard import LossSpike, LossSpikeError
from meshwright.engine.runtime.state import Metrics
from meshwright.engine.runtime.step_profiler import StepProfiler
from meshwright.engine.step.executor import Executor
from meshwright.plan.job.run_options import RunPhase
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.run.checkpoint.directories import mark_best, step_folder
from meshwright.run.checkpoint.resume import CHECKPOINTS_FOLDER, reduction_transports
from meshwright.run.checkpoint.save_load import save_tensors
from meshwright.run.data.eval_split import EvalHistory, EvalSamples
from meshwright.run.data.feed import Feed
from meshwright.run.data.prefetch import PrefetchedFeed
from meshwright.run.data.streaming import TokenStream
from meshwright.run.launch.failure_record import RankProgress
from meshwright.run.telemetry.accounting import RankAccounting
from meshwright.run.telemetry.callbacks import (
    Callback,
    CallbackEvent,
    CallbackFunction,
    StepRecord,
    StopRequest,
    call_callbacks,
)
from meshwright.run.telemetry.metrics_log import EVALUATION, SPIKE, MetricsLog, ReplayCheck

logger = logging.getLogger(__name__)

PHASE_NAMES: dict[RunPhase, str] = {
    **{"init": "ending", "first_step": "training", "step": "training"},
    **{"evaluate": "evaluating", "save": "saving"},
}


@dataclass(frozen=True)
class TrainResult:
    """How a run ended: the last step, its loss, whether it was stopped, and what the replayed steps showed.

    `so_far` is what evaluations showed, `reason` why they ended the run early ("": they did not), `skipped` the harmful
    steps that the guard left out, `overflows` those whose gradients left the range of float16.
    """

    step: int
    loss: float | None
    stopped: bool
    replay: ReplayCheck
    checkpoint: Path | None
    eval_history: EvalHistory = field(default_factory=EvalHistory)
    stop_reason: str = ""
    num_skipped: int = 0
    num_overflows: int = 0


def train_loop(
    executor: Executor,
    plan: Plan,
    feed: Feed | PrefetchedFeed,
    world: World,
    should_stop: Callable[[], bool],
    callbacks: Sequence[Callback] = (),
    progress: RankProgress | None = None,
    eval_samples: EvalSamples | None = None,
    eval_history: EvalHistory | None = None,
) -> TrainResult:
    """Play the steps that are left; `stopping()` is asked before each, `callbacks` are called on rank 0.

    `progress` is kept up to date, so that a failure can say where it happened. `evaluating` has the samples that are
    evaluated on, `so_far` what earlier evaluations showed. A last checkpoint is saved at the end. Raises Spiked, having
    saved nothing, after a harmful step under guard.action = "stop".
    """
    first = executor.steps_done
    steps = plan.job.train.steps if feed.num_steps is None else min(plan.job.train.steps, feed.num_steps)
    account = RankAccounting(executor, plan, world, steps)
    course = _TrainLoop(
        executor,
        plan,
        feed,
        world,
        callbacks,
        progress or RankProgress(),
        account,
        eval_samples,
        eval_history or EvalHistory(),
    )
    process = psutil.Process()
    try:
        course.call_back(lambda callback: callback.on_train_begin, CallbackEvent(first))
        while executor.steps_done < steps and not course.is_over and not feed.has_ended(executor.steps_done):
            course.enter_phase(
                "first_step" if executor.steps_done == first else "step", executor.steps_done + 1
            )
            watch = account.begin_step(executor.steps_done + 1)
            with account.timed_phase("data"):
                batch = feed.batch(executor.steps_done)
            with account.timed_phase("step"):
                metrics = course.run_step(batch, should_stop, watch)
            line = _line(metrics, account, _memory(process, world.device))
            course.record_step(metrics, line)
            last = executor.steps_done == steps or feed.has_ended(executor.steps_done)
            gained = course.evaluate(line, last=last)
            due = plan.run.save_every and executor.steps_done % plan.run.save_every == 0
            if course.is_over or due or last or (gained and plan.run.keep_best):
                course.save(line, best=gained)
            account.end_step()
        account.close()
        course.enter_phase("init", executor.steps_done)
        course.call_back(
            lambda callback: callback.on_train_end,
            CallbackEvent(executor.steps_done, checkpoint=course.checkpoint),
        )
    finally:
        course.close()
    return course.result()


def save_run_checkpoint(
    executor: Executor, plan: Plan, world: World, data_digest: str, eval_history: EvalHistory | None = None
) -> Path:
    """Save the player's state, and what evaluations showed, as a checkpoint of the run; returns its folder."""
    meta: dict[str, Any] = {
        "plan": plan.as_dict(),
        "plan_hash": plan.hash,
        "data": data_digest,
        "torch": torch.__version__,
    }
    meta["eval_history"] = (eval_history or EvalHistory()).as_dict()
    meta["reduction_transports"] = reduction_transports(plan, world)
    return save_checkpoint(Path(plan.run.folder) / CHECKPOINTS_FOLDER, executor, meta, world)


def save_checkpoint(folder: Path, executor: Executor, meta: Mapping[str, Any], world: World) -> Path:
    """Save what `player` holds as a checkpoint in `folder`, with all ranks that hold all of it; returns its own folder.

    Where one rank steps for others it alone has the optimizer's state, writes alone, and the others wait.
    """
    plan, everyone = executor.plan, world.group(AXES)
    path = step_folder(folder, executor.steps_done)
    if plan.is_primary_rank(world.rank):
        group = world.group(()) if plan.sharding.primary_rank_axes else everyone
        path = save_tensors(
            folder, executor.steps_done, executor.state_dict(), meta, group, plan.run.keep, world.device
        )
    if plan.sharding.primary_rank_axes:
        everyone.barrier(action="save")
    return path


class _TrainLoop:
    """One rank's way through the steps: what it writes and tells, what evaluations showed, and whether it is over."""

    def __init__(
        self,
        executor: Executor,
        plan: Plan,
        feed: Feed | PrefetchedFeed,
        world: World,
        callbacks: Sequence[Callback],
        progress: RankProgress,
        account: RankAccounting,
        eval_samples: EvalSamples | None,
        eval_history: EvalHistory,
    ) -> None:
        self.executor, self.plan, self.feed, self.world = executor, plan, feed, world
        self.progress, self.account, self.eval_samples = progress, account, eval_samples
        self.eval_history = eval_history if eval_samples is None else eval_history.for_samples(eval_samples)
        self.stop_reason = "" if eval_samples is None else self.eval_history.stop_reason(plan.job.evaluate)
        self.stop_request: StopRequest = None
        self.loss: float | None = None
        self.stopped, self.num_skipped, self.num_overflows, self._warned = False, 0, 0, False
        self._idle = 0  # steps in a row in which nothing counted
        self._num_samples = None if isinstance(feed.dataset, TokenStream) else len(feed.dataset)
        self.checkpoint = (
            step_folder(Path(plan.run.folder) / CHECKPOINTS_FOLDER, executor.steps_done)
            if executor.steps_done
            else None
        )
        self._callbacks = callbacks if world.rank == 0 else ()
        self._journal = MetricsLog(Path(plan.run.folder)) if world.rank == 0 else None

    @property
    def is_over(self) -> bool:
        """Whether no step follows, though some are left."""
        return self.stopped or bool(self.stop_reason)

    def enter_phase(self, phase: RunPhase, step: int) -> None:
        """Note what this rank does from here on: it is told when something fails, and says how long a wait may last."""
        self.progress.step, self.progress.phase = step, PHASE_NAMES[phase]
        self.world.ledger.step, self.world.ledger.phase = step, phase

    def call_back(self, which: Callable[[Callback], CallbackFunction | None], event: CallbackEvent) -> None:
        """Call one function of every callback; one that asks for the end is remembered."""
        self.stop_request = call_callbacks(map(which, self._callbacks), event) or self.stop_request

    def run_step(
        self,
        batch: Mapping[str, torch.Tensor] | None,
        should_stop: Callable[[], bool],
        watch: StepProfiler | None,
    ) -> Metrics:
        """Play one step. Raises Spiked, with the ids of the samples, for a harmful step that ends the run."""
        try:
            return self.executor.step(
                batch, stop=should_stop() or self.stop_request is not None, profiler=watch
            )
        except LossSpikeError as error:
            raise LossSpikeError(error.spike, error.stop_reason, self._note_spike(error.spike)) from None

    def record_step(self, metrics: Metrics, line: StepRecord) -> None:
        """Write and tell what a step did. Raises PlanError when nothing has counted in a whole epoch."""
        self.loss, self.stopped = metrics.loss, metrics.stop_requested
        self._write(asdict(line))
        self.num_overflows += metrics.overflow
        self._idle = (
            self._idle + 1 if metrics.is_skipped and metrics.spike is None and not metrics.overflow else 0
        )
        batch, num = self.plan.job.train.batch, self._num_samples
        first = (line.step - self._idle) * batch  # the place in the data from which on nothing counted
        if (
            num is not None and self._idle and (-(-first // num) + 1) * num <= line.step * batch
        ):  # a whole epoch lies behind it
            raise empty_loss_error(f"of the {num} samples, all played up to step {line.step}")
        if metrics.spike is not None:
            self.num_skipped += 1
            self._note_spike(metrics.spike)
        elif self._journal is not None and not (_finite(line) or metrics.overflow or self._warned):
            self._warned = True
            logger.warning(
                "step %d: the loss is %s and the gradient norm %s; the parameters are lost from here on. Go on from an earlier "
                'checkpoint with guard.action = "stop" or "skip", which names the rank, the block and the samples',
                *(line.step, line.loss, line.grad_norm),
            )
        spike = "" if metrics.spike is None else str(metrics.spike)
        self.call_back(lambda callback: callback.on_step_end, CallbackEvent(line.step, line, spike=spike))

    def evaluate(self, line: StepRecord, *, last: bool) -> bool:
        """Evaluate, when it is time; returns whether the result is the best so far."""
        spec = self.plan.job.evaluate
        due = last or (spec.every and line.step % spec.every == 0)
        if self.eval_samples is None or self.stopped or not due:
            return False
        self.enter_phase("evaluate", line.step)
        with self.account.timed_phase("evaluate"):
            result = self.executor.evaluate(self.eval_samples.batches())
        self.eval_history = self.eval_history.with_evaluation(result.loss, line.step, spec.min_delta)
        self.stop_reason = self.eval_history.stop_reason(spec)
        told = result.as_dict()
        self._write({"kind": EVALUATION, "step": line.step, **told})
        gained = self.eval_history.best_step == line.step
        self.call_back(
            lambda callback: callback.on_evaluate, CallbackEvent(line.step, line, told, is_best=gained)
        )
        return gained

    def save(self, line: StepRecord, *, best: bool) -> None:
        """Save a checkpoint of this step; with `best`, it is kept until a better one comes."""
        self.enter_phase("save", line.step)
        with self.account.timed_phase("save"):
            self.checkpoint = save_run_checkpoint(
                self.executor, self.plan, self.world, self.feed.dataset.digest, self.eval_history
            )
        if best and self.plan.run.keep_best and self.world.rank == 0:
            mark_best(self.checkpoint.parent, self.eval_history.best_step, self.eval_history.best_loss)
        self.call_back(
            lambda callback: callback.on_save, CallbackEvent(line.step, line, checkpoint=self.checkpoint)
        )

    def result(self) -> TrainResult:
        """How it ended."""
        replay = self._journal.replay if self._journal else ReplayCheck()
        step = self.executor.steps_done
        said = (self.loss, self.stopped, replay, self.checkpoint, self.eval_history, self.stop_reason)
        return TrainResult(step, *said, self.num_skipped, self.num_overflows)

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._journal is not None:
            self._journal.write(line)

    def _note_spike(self, spike: LossSpike) -> dict[int, list[int]]:
        """Write down a harmful step; returns the ids of its samples by rank."""
        shares = self.feed.sample_ids(spike.step - 1)
        ids = {suspect.rank: shares[self.plan.data_index(suspect.rank)] for suspect in spike.rank_reports}
        ranks = [{**asdict(suspect), "samples": ids[suspect.rank]} for suspect in spike.rank_reports]
        said = {"loss": spike.loss, "grad_norm": spike.grad_norm, "reasons": spike.reasons, "ranks": ranks}
        self._write({"kind": SPIKE, "step": spike.step, "action": self.plan.job.guard.action, **said})
        return ids


def _finite(line: StepRecord) -> bool:
    return isfinite(line.loss) and isfinite(line.grad_norm)


def _line(metrics: Metrics, account: RankAccounting, memory: int) -> StepRecord:
    m, data_s, save_s = metrics, account.pop_phase_seconds("data"), account.pop_phase_seconds("save")
    seconds = data_s + account.pop_phase_seconds("step")
    flops_per_s, mfu = account.throughput(m.samples, seconds)
    speed = m.tokens / seconds
    told = (m.step, m.loss, m.grad_norm, m.lr, m.tokens, seconds, speed, memory, m.is_skipped, data_s, save_s)
    return StepRecord(*told, flops_per_s, mfu, m.noise_scale, m.overflow, m.loss_scale)


def _memory(process: psutil.Process, device: torch.device) -> int:
    """Bytes that this rank has in use: resident on a CPU, allocated at most on a GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process.memory_info().rss
