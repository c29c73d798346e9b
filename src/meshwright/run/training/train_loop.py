"""The training loop: read a batch, step, log, evaluate, save; stop when asked to.

A signal sets a flag on the rank that received it. The flag travels with the next step, so all ranks learn of
it in the same step, save the same checkpoint and end together. Every other reason to end early, such as no
improvement in an evaluation or a harmful step, follows from numbers that all ranks share.
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
from meshwright.device.device_memory import peak_memory
from meshwright.engine.runtime.loss_guard import LossSpike, LossSpikeError
from meshwright.engine.runtime.rank_state import Metrics
from meshwright.engine.runtime.step_profiler import StepProfiler
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.loss.loss_definition import empty_loss_error
from meshwright.plan.job.timeouts import RunPhase
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.run.checkpoint.directories import mark_best, step_folder
from meshwright.run.checkpoint.distributed_checkpoint import save_tensors
from meshwright.run.checkpoint.resume import CHECKPOINTS_FOLDER, reduction_transports
from meshwright.run.data.data_loader import LocalBatches, PrefetchedBatches
from meshwright.run.data.eval_samples import EvalHistory, EvalSamples
from meshwright.run.data.streaming import TokenStream
from meshwright.run.launch.failure_record import RankProgress
from meshwright.run.telemetry.callbacks import (
    Callback,
    CallbackEvent,
    CallbackFunction,
    StepRecord,
    StopRequest,
    call_callbacks,
)
from meshwright.run.telemetry.expert_load_lines import ExpertLoadLines, without_expert_load
from meshwright.run.telemetry.metrics_log import (
    EVALUATION,
    METRIC_OF_TASK,
    SAMPLE,
    SPIKE,
    TASKS,
    MetricsLog,
    ReplayCheck,
)
from meshwright.run.telemetry.rank_profile import RankUsage
from meshwright.run.training.evaluations import Evaluations

logger = logging.getLogger(__name__)

PHASE_NAMES: dict[RunPhase, str] = {
    **{"init": "ending", "first_step": "training", "step": "training"},
    **{"evaluate": "evaluating", "save": "saving"},
}


@dataclass(frozen=True)
class TrainResult:
    """The result of a run: the last step, its loss, whether it was stopped, and the check of repeated steps.

    `stop_reason` says why evaluations ended the run early ("": they did not), `num_skipped` counts the
    harmful steps that the loss guard skipped, `num_overflows` the steps whose float16 gradients overflowed;
    `sample` is the last text that the model has written.
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
    sample: str = ""


def train_loop(
    executor: StepExecutor,
    plan: Plan,
    batches: LocalBatches | PrefetchedBatches,
    world: World,
    should_stop: Callable[[], bool],
    callbacks: Sequence[Callback] = (),
    progress: RankProgress | None = None,
    evaluations: Evaluations | None = None,
    eval_history: EvalHistory | None = None,
    *,
    only_evaluate: bool = False,
) -> TrainResult:
    """Runs the remaining steps; calls `should_stop()` before each, and `callbacks` on rank 0. With
    `only_evaluate` it evaluates, and neither steps nor saves.

    `progress` is updated, so that a failure can name the step. A last checkpoint is saved at the end. Raises
    Spiked, without a checkpoint, after a harmful step with guard.action = "stop".
    """
    first = executor.steps_done
    steps = (
        plan.job.train.steps if batches.num_steps is None else min(plan.job.train.steps, batches.num_steps)
    )
    rank_usage = RankUsage(executor, plan, world, steps)
    loop = _TrainLoop(
        executor,
        plan,
        batches,
        world,
        callbacks,
        progress or RankProgress(),
        rank_usage,
        evaluations or Evaluations(),
        eval_history or EvalHistory(),
    )
    process = psutil.Process()
    try:
        if only_evaluate:
            loop.evaluate(last=True)
            return loop.result()
        loop.call_back(lambda callback: callback.on_train_begin, CallbackEvent(first))
        while executor.steps_done < steps and not loop.is_over and not batches.has_ended(executor.steps_done):
            loop.enter_phase(
                "first_step" if executor.steps_done == first else "step", executor.steps_done + 1
            )
            profiler = rank_usage.begin_step(executor.steps_done + 1)
            with rank_usage.timed_phase("data"):
                batch = batches.batch(executor.steps_done)
            with rank_usage.timed_phase("step"), rank_usage.measure_activations():
                metrics = loop.run_step(batch, should_stop, profiler)
            loop.end_step(metrics, _step_usage(metrics, rank_usage, _memory(process, world.device)))
            last = executor.steps_done == steps or batches.has_ended(executor.steps_done)
            improved = loop.evaluate(last=last)
            due = plan.run.save_every and executor.steps_done % plan.run.save_every == 0
            if loop.is_over or due or last or (improved and plan.run.keep_best):
                loop.save(best=improved)
            rank_usage.end_step()
        rank_usage.close()
        loop.enter_phase("init", executor.steps_done)
        loop.call_back(
            lambda callback: callback.on_train_end,
            CallbackEvent(executor.steps_done, checkpoint=loop.checkpoint),
        )
    finally:
        loop.close()
    return loop.result()


def save_run_checkpoint(
    executor: StepExecutor,
    plan: Plan,
    world: World,
    data_digest: str,
    eval_history: EvalHistory | None = None,
) -> Path:
    """Saves the executor's state and the evaluation history as a checkpoint of the run;
    returns its folder.
    """
    meta: dict[str, Any] = {
        "plan": plan.as_dict(),
        "plan_hash": plan.hash,
        "data": data_digest,
        "torch": torch.__version__,
    }
    meta["eval_history"] = (eval_history or EvalHistory()).as_dict()
    meta["reduction_transports"] = reduction_transports(plan, world)
    return save_checkpoint(Path(plan.run.folder) / CHECKPOINTS_FOLDER, executor, meta, world)


def save_checkpoint(folder: Path, executor: StepExecutor, meta: Mapping[str, Any], world: World) -> Path:
    """Saves the executor's state as a checkpoint in `folder` and returns its path; all ranks call it.

    If one rank runs the optimizer for others, it alone has the optimizer state and writes; the others wait.
    """
    plan, everyone = executor.state.plan, world.group(AXES)
    path = step_folder(folder, executor.steps_done)
    if plan.is_primary_rank(world.rank):
        group = world.group(()) if plan.sharding.primary_rank_axes else everyone
        path = save_tensors(
            folder, executor.steps_done, executor.state_dict(), meta, group, plan.run.keep, world.device
        )
    if plan.sharding.primary_rank_axes:
        everyone.barrier(action="save")
    return path


@dataclass(frozen=True)
class _StepUsage:
    seconds: float
    data_s: float
    save_s: float
    memory: int
    flops_per_s: float | None
    mfu: float | None


class _TrainLoop:
    def __init__(
        self,
        executor: StepExecutor,
        plan: Plan,
        batches: LocalBatches | PrefetchedBatches,
        world: World,
        callbacks: Sequence[Callback],
        progress: RankProgress,
        rank_usage: RankUsage,
        evaluations: Evaluations,
        eval_history: EvalHistory,
    ) -> None:
        self.executor, self.plan, self.batches, self.world = executor, plan, batches, world
        self.progress, self.rank_usage, self.evaluations = progress, rank_usage, evaluations
        samples = evaluations.samples
        self.eval_history = eval_history if samples is None else eval_history.for_samples(samples)
        self.stop_reason = "" if samples is None else self.eval_history.stop_reason(plan.job.evaluate)
        self.sample = ""
        self.stop_request: StopRequest = None
        self.loss: float | None = None
        self.record: StepRecord | None = None  # of the last step that was recorded
        self.stopped, self.num_skipped, self.num_overflows, self._warned = False, 0, 0, False
        self._unrecorded: tuple[Metrics, _StepUsage] | None = None  # the last step, if its numbers are late
        self._idle = 0  # consecutive steps in which no token counted
        self._num_samples = None if isinstance(batches.dataset, TokenStream) else len(batches.dataset)
        self.checkpoint = (
            step_folder(Path(plan.run.folder) / CHECKPOINTS_FOLDER, executor.steps_done)
            if executor.steps_done
            else None
        )
        self._callbacks = callbacks if world.rank == 0 else ()
        self._expert_load_lines = ExpertLoadLines(plan)
        self._metrics_log = MetricsLog(Path(plan.run.folder)) if world.rank == 0 else None

    @property
    def is_over(self) -> bool:
        """Whether the loop ends before the last step."""
        return self.stopped or bool(self.stop_reason)

    def enter_phase(self, phase: RunPhase, step: int) -> None:
        """Records the phase of this rank: failures name it, and it decides how long a wait may last."""
        self.progress.step, self.progress.phase = step, PHASE_NAMES[phase]
        self.world.ledger.step, self.world.ledger.phase = step, phase

    def call_back(self, which: Callable[[Callback], CallbackFunction | None], event: CallbackEvent) -> None:
        """Calls one function of every callback; remembers a request to stop."""
        self.stop_request = call_callbacks(map(which, self._callbacks), event) or self.stop_request

    def run_step(
        self,
        batch: Mapping[str, torch.Tensor] | None,
        should_stop: Callable[[], bool],
        profiler: StepProfiler | None,
    ) -> Metrics:
        """Runs one step. Raises LossSpikeError, with the ids of the samples, for a harmful step that ends the
        run.
        """
        try:
            return self.executor.step(
                batch, stop=should_stop() or self.stop_request is not None, profiler=profiler
            )
        except LossSpikeError as error:
            raise LossSpikeError(error.spike, error.stop_reason, self._note_spike(error.spike)) from None

    def end_step(self, metrics: Metrics, usage: _StepUsage) -> None:
        """Records a step. Late numbers, as on a GPU, are recorded by the next step, or what needs them."""
        self.record_last_step()
        self.stopped, self._unrecorded = metrics.stop_requested, (metrics, usage)
        if not metrics.numbers.is_late:
            self.record_last_step()

    def record_last_step(self) -> None:
        """Logs the last step, if that was not done, and calls the callbacks.

        Raises PlanError if no token of a whole epoch counted.
        """
        if self._unrecorded is None:
            return
        (metrics, usage), self._unrecorded = self._unrecorded, None
        expert_load = self._expert_load_lines.worst(metrics.expert_loads)
        record = self.record = _step_record(metrics, usage, expert_load)
        self.loss = metrics.loss
        self._write(without_expert_load(asdict(record)))
        line = self._expert_load_lines.add(record.step, metrics.expert_loads)
        if line is not None:
            self._write(line)
        self.num_overflows += metrics.overflow
        self._idle = (
            self._idle + 1 if metrics.is_skipped and metrics.spike is None and not metrics.overflow else 0
        )
        batch, num = self.plan.job.train.batch, self._num_samples
        first = (record.step - self._idle) * batch  # the position from which on no token counted
        if (
            num is not None
            and not self.plan.sharding.varying_axes  # of all sites, not of this one
            and self._idle
            and (-(-first // num) + 1) * num <= record.step * batch
        ):  # a whole epoch has passed
            raise empty_loss_error(f"of the {num} samples, all trained on up to step {record.step}")
        if metrics.spike is not None:
            self.num_skipped += 1
            self._note_spike(metrics.spike)
        elif self._metrics_log is not None and not (_finite(record) or metrics.overflow or self._warned):
            self._warned = True
            logger.warning(
                "step %d: the loss is %s and the gradient norm %s; the parameters are unusable "
                "from here on. Resume from an earlier "
                'checkpoint with guard.action = "stop" or "skip", which names the rank, the '
                "block and the samples",
                *(record.step, record.loss, record.grad_norm),
            )
        spike = "" if metrics.spike is None else str(metrics.spike)
        self.call_back(lambda callback: callback.on_step_end, CallbackEvent(record.step, record, spike=spike))

    def evaluate(self, *, last: bool) -> bool:
        """Evaluates if it is due; returns whether the result is the best so far."""
        every, step, given = self.plan.job.evaluate.every, self.executor.steps_done, self.evaluations
        due = (last and given.sample_text is not None) or (
            given.have_metrics and (last or (every and step % every == 0))
        )
        if self.stopped or not due:
            return False
        if self.executor.is_in_round:  # a stream that has ended: each site has another model
            if given.have_metrics:
                logger.warning("the data ended in the middle of a round: the sites are not evaluated")
            return False
        self.record_last_step()
        self.enter_phase("evaluate", step)
        values: dict[str, Any] = {}
        if given.samples is not None:
            values |= self._evaluate_loss(given.samples)
        improved = given.samples is not None and self.eval_history.best_step == step
        if given.run_tasks is not None:
            values |= self._evaluate_tasks(given.run_tasks)
        if given.sample_text is not None:
            self._write_sample(given.sample_text)
        if values:
            self.call_back(
                lambda callback: callback.on_evaluate,
                CallbackEvent(step, self.record, values, is_best=improved),
            )
        return improved

    def _evaluate_loss(self, samples: EvalSamples) -> dict[str, Any]:
        spec, step = self.plan.job.evaluate, self.executor.steps_done
        with self.rank_usage.timed_phase("evaluate"):
            result = self.executor.evaluate(samples.batches())
        self.executor.lr_schedule.report_metric(result.loss)
        self.eval_history = self.eval_history.with_evaluation(result.loss, step, spec.min_delta)
        self.stop_reason = self.eval_history.stop_reason(spec)
        values = result.as_dict()
        seconds = self.rank_usage.pop_phase_seconds("evaluate")
        self._write({"kind": EVALUATION, "step": step, **values, "seconds": seconds})
        return values

    def _write_sample(self, sample_text: Callable[[], str]) -> None:
        with self.rank_usage.timed_phase("evaluate"):
            self.sample = sample_text()
        seconds = self.rank_usage.pop_phase_seconds("evaluate")
        text = {"text": self.sample, "prompt": self.plan.run.sample_prompt}
        self._write({"kind": SAMPLE, "step": self.executor.steps_done, **text, "seconds": seconds})

    def _evaluate_tasks(self, run_tasks: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        with self.rank_usage.timed_phase("evaluate"):
            metrics = run_tasks()
        seconds = self.rank_usage.pop_phase_seconds("evaluate")
        named = {f"{METRIC_OF_TASK}{name}": value for name, value in metrics.items()}
        self._write({"kind": TASKS, "step": self.executor.steps_done, **named, "seconds": seconds})
        return metrics

    def save(self, *, best: bool) -> None:
        """Saves a checkpoint of this step; with `best`, it is kept until a better one exists."""
        self.record_last_step()
        step = self.executor.steps_done
        self.enter_phase("save", step)
        with self.rank_usage.timed_phase("save"):
            self.checkpoint = save_run_checkpoint(
                self.executor, self.plan, self.world, self.batches.dataset.digest, self.eval_history
            )
        if best and self.plan.run.keep_best and self.world.rank == 0:
            mark_best(self.checkpoint.parent, self.eval_history.best_step, self.eval_history.best_loss)
        self.call_back(
            lambda callback: callback.on_save, CallbackEvent(step, self.record, checkpoint=self.checkpoint)
        )

    def result(self) -> TrainResult:
        """Returns how the run ended."""
        replay = self._metrics_log.replay if self._metrics_log else ReplayCheck()
        step = self.executor.steps_done
        values = (self.loss, self.stopped, replay, self.checkpoint, self.eval_history, self.stop_reason)
        return TrainResult(step, *values, self.num_skipped, self.num_overflows, self.sample)

    def close(self) -> None:
        """Closes the metrics log."""
        if self._metrics_log is not None:
            self._metrics_log.close()

    def _write(self, record: dict[str, Any]) -> None:
        if self._metrics_log is not None:
            self._metrics_log.write(record)

    def _note_spike(self, spike: LossSpike) -> dict[int, list[int]]:
        """Logs a harmful step; returns the ids of its samples by rank."""
        sample_ids = self.batches.sample_ids(spike.step - 1)
        ids = {
            rank_report.rank: sample_ids[self.plan.data_index(rank_report.rank)]
            for rank_report in spike.rank_reports
            if not self.plan.is_server(rank_report.rank)
        }
        ranks = [
            {**asdict(rank_report), "samples": ids.get(rank_report.rank, [])}
            for rank_report in spike.rank_reports
        ]
        values = {"loss": spike.loss, "grad_norm": spike.grad_norm, "reasons": spike.reasons, "ranks": ranks}
        self._write({"kind": SPIKE, "step": spike.step, "action": self.plan.job.guard.action, **values})
        return ids


def _finite(record: StepRecord) -> bool:
    return isfinite(record.loss) and isfinite(record.grad_norm)


def _step_usage(metrics: Metrics, rank_usage: RankUsage, memory: int) -> _StepUsage:
    data_s, save_s = rank_usage.pop_phase_seconds("data"), rank_usage.pop_phase_seconds("save")
    seconds = data_s + rank_usage.pop_phase_seconds("step")
    return _StepUsage(seconds, data_s, save_s, memory, *rank_usage.throughput(metrics.samples, seconds))


def _step_record(
    metrics: Metrics, usage: _StepUsage, expert_load: tuple[float | None, float | None, float | None]
) -> StepRecord:
    m, u = metrics, usage
    values = (m.step, m.loss, m.grad_norm, m.lr, m.tokens, u.seconds, m.tokens / u.seconds, u.memory)
    return StepRecord(
        *(*values, m.is_skipped, u.data_s, u.save_s, u.flops_per_s, u.mfu),
        *(m.noise_scale, m.overflow, m.loss_scale),
        *expert_load,
        *((None, None) if m.round is None else (m.round.loss, m.round.tokens)),
    )


def _memory(process: psutil.Process, device: torch.device) -> int:
    return process.memory_info().rss if device.type == "cpu" else peak_memory(device)
