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
from meshwright.engine.runtime.loss import nothing_counts
from meshwright.engine.runtime.loss_guard import Spike, Spiked
from meshwright.engine.runtime.state import Metrics
from meshwright.engine.runtime.step_profiler import Watch
from meshwright.engine.step.executor import Player
from meshwright.plan.job.run_options import Phase
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.run.checkpoint.directories import set_best, step_folder
from meshwright.run.checkpoint.resume import CHECKPOINTS, summed_by
from meshwright.run.checkpoint.save_load import save
from meshwright.run.data.eval_split import Evaluating, SoFar
from meshwright.run.data.feed import Feed
from meshwright.run.data.prefetch import Ahead
from meshwright.run.data.streaming import Stream
from meshwright.run.launch.failure_record import Progress
from meshwright.run.telemetry.accounting import Account
from meshwright.run.telemetry.callbacks import Callback, Heard, Line, Moment, Wish, call
from meshwright.run.telemetry.metrics_log import EVALUATION, SPIKE, Journal, Replay

logger = logging.getLogger(__name__)

DOING: dict[Phase, str] = {
    **{"init": "ending", "first_step": "training", "step": "training"},
    **{"evaluate": "evaluating", "save": "saving"},
}


@dataclass(frozen=True)
class Ended:
    """How a run ended: the last step, its loss, whether it was stopped, and what the replayed steps showed.

    `so_far` is what evaluations showed, `reason` why they ended the run early ("": they did not), `skipped` the harmful
    steps that the guard left out, `overflows` those whose gradients left the range of float16.
    """

    step: int
    loss: float | None
    stopped: bool
    replay: Replay
    checkpoint: Path | None
    so_far: SoFar = field(default_factory=SoFar)
    reason: str = ""
    skipped: int = 0
    overflows: int = 0


def train(
    player: Player,
    plan: Plan,
    feed: Feed | Ahead,
    world: World,
    stopping: Callable[[], bool],
    callbacks: Sequence[Callback] = (),
    progress: Progress | None = None,
    evaluating: Evaluating | None = None,
    so_far: SoFar | None = None,
) -> Ended:
    """Play the steps that are left; `stopping()` is asked before each, `callbacks` are called on rank 0.

    `progress` is kept up to date, so that a failure can say where it happened. `evaluating` has the samples that are
    evaluated on, `so_far` what earlier evaluations showed. A last checkpoint is saved at the end. Raises Spiked, having
    saved nothing, after a harmful step under guard.action = "stop".
    """
    first = player.steps_done
    steps = plan.job.train.steps if feed.num_steps is None else min(plan.job.train.steps, feed.num_steps)
    account = Account(player, plan, world, steps)
    course = _Course(player, plan, feed, world, callbacks, progress or Progress(), account, evaluating, so_far or SoFar())
    process = psutil.Process()
    try:
        course.tell(lambda callback: callback.on_train_begin, Moment(first))
        while player.steps_done < steps and not course.over and not feed.over(player.steps_done):
            course.enter("first_step" if player.steps_done == first else "step", player.steps_done + 1)
            watch = account.begin(player.steps_done + 1)
            with account.phase("data"):
                batch = feed.batch(player.steps_done)
            with account.phase("step"):
                metrics = course.play(batch, stopping, watch)
            line = _line(metrics, account, _memory(process, world.device))
            course.note(metrics, line)
            last = player.steps_done == steps or feed.over(player.steps_done)
            gained = course.evaluate(line, last=last)
            due = plan.run.save_every and player.steps_done % plan.run.save_every == 0
            if course.over or due or last or (gained and plan.run.keep_best):
                course.save(line, best=gained)
            account.end()
        account.close()
        course.enter("init", player.steps_done)
        course.tell(lambda callback: callback.on_train_end, Moment(player.steps_done, checkpoint=course.saved))
    finally:
        course.close()
    return course.ended()


def save_run(player: Player, plan: Plan, world: World, data_digest: str, so_far: SoFar | None = None) -> Path:
    """Save the player's state, and what evaluations showed, as a checkpoint of the run; returns its folder."""
    meta: dict[str, Any] = {"plan": plan.as_dict(), "plan_hash": plan.hash, "data": data_digest, "torch": torch.__version__}
    meta["so_far"] = (so_far or SoFar()).as_dict()
    meta["summed_by"] = summed_by(plan, world)
    return save_held(Path(plan.run.folder) / CHECKPOINTS, player, meta, world)


def save_held(folder: Path, player: Player, meta: Mapping[str, Any], world: World) -> Path:
    """Save what `player` holds as a checkpoint in `folder`, with all ranks that hold all of it; returns its own folder.

    Where one rank steps for others it alone has the optimizer's state, writes alone, and the others wait.
    """
    plan, everyone = player.plan, world.group(AXES)
    path = step_folder(folder, player.steps_done)
    if plan.leads(world.rank):
        group = world.group(()) if plan.space.led else everyone
        path = save(folder, player.steps_done, player.tensors(), meta, group, plan.run.keep, world.device)
    if plan.space.led:
        everyone.barrier(action="save")
    return path


class _Course:
    """One rank's way through the steps: what it writes and tells, what evaluations showed, and whether it is over."""

    def __init__(
        self,
        player: Player,
        plan: Plan,
        feed: Feed | Ahead,
        world: World,
        callbacks: Sequence[Callback],
        progress: Progress,
        account: Account,
        evaluating: Evaluating | None,
        so_far: SoFar,
    ) -> None:
        self.player, self.plan, self.feed, self.world = player, plan, feed, world
        self.progress, self.account, self.evaluating = progress, account, evaluating
        self.so_far = so_far if evaluating is None else so_far.comparable(evaluating)
        self.reason = "" if evaluating is None else self.so_far.ended(plan.job.evaluate)
        self.wish: Wish = None
        self.loss: float | None = None
        self.stopped, self.skipped, self.overflows, self._warned = False, 0, 0, False
        self._idle = 0  # steps in a row in which nothing counted
        self._num_samples = None if isinstance(feed.data, Stream) else len(feed.data)
        self.saved = step_folder(Path(plan.run.folder) / CHECKPOINTS, player.steps_done) if player.steps_done else None
        self._callbacks = callbacks if world.rank == 0 else ()
        self._journal = Journal(Path(plan.run.folder)) if world.rank == 0 else None

    @property
    def over(self) -> bool:
        """Whether no step follows, though some are left."""
        return self.stopped or bool(self.reason)

    def enter(self, phase: Phase, step: int) -> None:
        """Note what this rank does from here on: it is told when something fails, and says how long a wait may last."""
        self.progress.step, self.progress.phase = step, DOING[phase]
        self.world.ledger.step, self.world.ledger.phase = step, phase

    def tell(self, which: Callable[[Callback], Heard | None], moment: Moment) -> None:
        """Call one function of every callback; one that asks for the end is remembered."""
        self.wish = call(map(which, self._callbacks), moment) or self.wish

    def play(self, batch: Mapping[str, torch.Tensor] | None, stopping: Callable[[], bool], watch: Watch | None) -> Metrics:
        """Play one step. Raises Spiked, with the ids of the samples, for a harmful step that ends the run."""
        try:
            return self.player.step(batch, stop=stopping() or self.wish is not None, watch=watch)
        except Spiked as error:
            raise Spiked(error.spike, error.more, self._note_spike(error.spike)) from None

    def note(self, metrics: Metrics, line: Line) -> None:
        """Write and tell what a step did. Raises PlanError when nothing has counted in a whole epoch."""
        self.loss, self.stopped = metrics.loss, metrics.stop
        self._write(asdict(line))
        self.overflows += metrics.overflow
        self._idle = self._idle + 1 if metrics.skipped and metrics.spike is None and not metrics.overflow else 0
        batch, num = self.plan.job.train.batch, self._num_samples
        first = (line.step - self._idle) * batch  # the place in the data from which on nothing counted
        if num is not None and self._idle and (-(-first // num) + 1) * num <= line.step * batch:  # a whole epoch lies behind it
            raise nothing_counts(f"of the {num} samples, all played up to step {line.step}")
        if metrics.spike is not None:
            self.skipped += 1
            self._note_spike(metrics.spike)
        elif self._journal is not None and not (_finite(line) or metrics.overflow or self._warned):
            self._warned = True
            logger.warning(
                "step %d: the loss is %s and the gradient norm %s; the parameters are lost from here on. Go on from an earlier "
                'checkpoint with guard.action = "stop" or "skip", which names the rank, the block and the samples',
                *(line.step, line.loss, line.grad_norm),
            )
        spike = "" if metrics.spike is None else str(metrics.spike)
        self.tell(lambda callback: callback.on_step_end, Moment(line.step, line, spike=spike))

    def evaluate(self, line: Line, *, last: bool) -> bool:
        """Evaluate, when it is time; returns whether the result is the best so far."""
        spec = self.plan.job.evaluate
        due = last or (spec.every and line.step % spec.every == 0)
        if self.evaluating is None or self.stopped or not due:
            return False
        self.enter("evaluate", line.step)
        with self.account.phase("evaluate"):
            result = self.player.evaluate(self.evaluating.batches())
        self.so_far = self.so_far.after(result.loss, line.step, spec.min_delta)
        self.reason = self.so_far.ended(spec)
        told = result.as_dict()
        self._write({"kind": EVALUATION, "step": line.step, **told})
        gained = self.so_far.best_step == line.step
        self.tell(lambda callback: callback.on_evaluate, Moment(line.step, line, told, best=gained))
        return gained

    def save(self, line: Line, *, best: bool) -> None:
        """Save a checkpoint of this step; with `best`, it is kept until a better one comes."""
        self.enter("save", line.step)
        with self.account.phase("save"):
            self.saved = save_run(self.player, self.plan, self.world, self.feed.data.digest, self.so_far)
        if best and self.plan.run.keep_best and self.world.rank == 0:
            set_best(self.saved.parent, self.so_far.best_step, self.so_far.best)
        self.tell(lambda callback: callback.on_save, Moment(line.step, line, checkpoint=self.saved))

    def ended(self) -> Ended:
        """How it ended."""
        replay = self._journal.replay if self._journal else Replay()
        step = self.player.steps_done
        said = (self.loss, self.stopped, replay, self.saved, self.so_far, self.reason)
        return Ended(step, *said, self.skipped, self.overflows)

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._journal is not None:
            self._journal.write(line)

    def _note_spike(self, spike: Spike) -> dict[int, list[int]]:
        """Write down a harmful step; returns the ids of its samples by rank."""
        shares = self.feed.samples(spike.step - 1)
        ids = {suspect.rank: shares[self.plan.data_index(suspect.rank)] for suspect in spike.suspects}
        ranks = [{**asdict(suspect), "samples": ids[suspect.rank]} for suspect in spike.suspects]
        said = {"loss": spike.loss, "grad_norm": spike.grad_norm, "reasons": spike.reasons, "ranks": ranks}
        self._write({"kind": SPIKE, "step": spike.step, "action": self.plan.job.guard.action, **said})
        return ids


def _finite(line: Line) -> bool:
    return isfinite(line.loss) and isfinite(line.grad_norm)


def _line(metrics: Metrics, account: Account, memory: int) -> Line:
    m, data_s, save_s = metrics, account.spent("data"), account.spent("save")
    seconds = data_s + account.spent("step")
    flops_per_s, mfu = account.speed(m.samples, seconds)
    speed = m.tokens / seconds
    told = (m.step, m.loss, m.grad_norm, m.lr, m.tokens, seconds, speed, memory, m.skipped, data_s, save_s)
    return Line(*told, flops_per_s, mfu, m.noise_scale, m.overflow, m.loss_scale)


def _memory(process: psutil.Process, device: torch.device) -> int:
    """Bytes that this rank has in use: resident on a CPU, allocated at most on a GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process.memory_info().rss
