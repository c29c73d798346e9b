"""The loop around the step: feed, play, record, save; stop when told to, and go on where another run stopped.

A signal sets a flag on the rank that got it. The flag travels in the header of the next step, so all ranks learn of it
in the same step, save the same checkpoint and end together.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import torch

from meshwright.comm.group import World
from meshwright.core.errors import PlanError
from meshwright.core.mesh import AXES
from meshwright.core.plan import Plan
from meshwright.engine.player import Player
from meshwright.run.checkpoint import load, newest_good, save
from meshwright.run.feed import Feed
from meshwright.run.folders import step_folder
from meshwright.run.journal import Journal, Replay

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Line:
    """What is known after a step: the metrics, how fast it went (all ranks), and this rank's memory in bytes."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    tokens_per_s: float
    memory: int
    skipped: bool = False


@dataclass(frozen=True)
class Resumed:
    """Where a run went on: the step (0: from the beginning), and what there is to say about it, in words."""

    step: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """How a run ended: the last step, its loss, whether it was stopped, and what the replayed steps showed."""

    step: int
    loss: float | None
    stopped: bool
    replay: Replay
    checkpoint: Path | None


def resume(player: Player, plan: Plan, world: World, data_digest: str, step: int | None = None) -> Resumed:
    """Take up the newest good checkpoint of the run's folder (or that of `step`) on every rank.

    Rank 0 looks and tells the others the step, so that all take the same one. Raises PlanError when `step` is asked for
    and not there, or when every checkpoint is of another model.
    """
    folder = Path(plan.run.folder) / CHECKPOINTS
    notes: list[str] = []
    found = torch.zeros(1, dtype=torch.int64, device=world.device)
    if world.rank == 0:
        found[0] = _choose(folder, step, notes)
    world.group(AXES).broadcast(found, source=0, action="resume").wait()
    if found.item() <= 0:
        return Resumed(0, tuple(notes))
    tensors, meta = load(step_folder(folder, int(found.item())))
    _check_model(tensors, player)
    notes += _changes(meta, plan, data_digest)
    player.restore(tensors, int(found.item()))
    return Resumed(player.steps_done, (f"resumed from step {player.steps_done}", *notes))


def train(
    player: Player, plan: Plan, feed: Feed, world: World, stopping: Callable[[], bool], watch: Callable[[Line], None]
) -> Ended:
    """Play the steps that are left; `stopping()` is asked before each, `watch` sees each line on rank 0."""
    run, job = plan.run, plan.job
    journal = Journal(Path(run.folder)) if world.rank == 0 else None
    process, saved, loss = psutil.Process(), None, None
    stopped = False
    try:
        while player.steps_done < job.train.steps and not stopped and not feed.exhausted(player.steps_done):
            started = perf_counter()
            metrics = player.step(feed.batch(player.steps_done), stop=stopping())
            seconds = perf_counter() - started
            loss, stopped = metrics.loss, metrics.stop
            if journal is not None:
                speed = metrics.tokens / seconds
                memory = _memory(process, world.device)
                line = Line(
                    metrics.step, loss, metrics.grad_norm, metrics.lr, metrics.tokens, seconds, speed, memory, metrics.skipped
                )
                journal.write(asdict(line))
                watch(line)
            if stopped or (run.save_every and player.steps_done % run.save_every == 0):
                saved = save_run(player, plan, world, feed.data.digest)
        if saved is None or saved != step_folder(saved.parent, player.steps_done):
            saved = save_run(player, plan, world, feed.data.digest)
    finally:
        if journal is not None:
            journal.close()
    return Ended(player.steps_done, loss, stopped, journal.replay if journal else Replay(), saved)


def save_run(player: Player, plan: Plan, world: World, data_digest: str) -> Path:
    """Save the player's state as a checkpoint of the run; returns its folder."""
    meta: dict[str, Any] = {"plan": plan.as_dict(), "plan_hash": plan.hash, "data": data_digest, "torch": torch.__version__}
    folder = Path(plan.run.folder) / CHECKPOINTS
    return save(folder, player.steps_done, player.tensors(), meta, world.group(AXES), plan.run.keep, world.device)


def _choose(folder: Path, step: int | None, notes: list[str]) -> int:
    if step is not None:
        if not step_folder(folder, step).is_dir():
            there = ", ".join(path.name for path in sorted(folder.glob("step-*"))) if folder.is_dir() else "none"
            raise PlanError(f"there is no checkpoint of step {step}", fix=f"choose one of: {there}", where=str(folder))
        return step
    path, manifest, rejected = newest_good(folder)
    notes += [f"passed over {bad.name}: {why}" for bad, why in rejected]
    if manifest is None:
        return 0
    if rejected and path is not None:
        notes.append(f"using the previous good checkpoint, {path.name}")
    return manifest.step


def _check_model(tensors: Mapping[str, torch.Tensor], player: Player) -> None:
    mine = {name: tuple(p.shape) for name, p in player.tensors().items() if not name.startswith("optimizer/")}
    theirs = {name: tuple(tensor.shape) for name, tensor in tensors.items() if not name.startswith("optimizer/")}
    wrong = [
        f"{name}: {theirs.get(name)} saved, {mine.get(name)} here"
        for name in {**mine, **theirs}
        if mine.get(name) != theirs.get(name)
    ]
    if wrong:
        text = f"the checkpoint is of another model: {'; '.join(sorted(wrong)[:5])}" + (
            f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        )
        raise PlanError(text, fix="train into another run.folder, or go back to the model that saved it", where="run.folder")


def _changes(meta: Mapping[str, Any], plan: Plan, data_digest: str) -> list[str]:
    if meta.get("plan_hash") == plan.hash and meta.get("data") == data_digest:
        return []
    changed = sorted(_differing(meta.get("plan", {}), plan.as_dict()))
    words = [f"the plan changed since that checkpoint: {', '.join(changed)}"] if changed else []
    return words + (["the data changed since that checkpoint"] if meta.get("data") != data_digest else [])


def _differing(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return [
            found for key in {**old, **new} for found in _differing(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        ]
    same = old == new or (isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)) and list(old) == list(new))
    return [] if same else [f"{path} was {old}, is {new}" if len(f"{old}{new}") < 60 else path]


def _memory(process: psutil.Process, device: torch.device) -> int:
    """Bytes that this rank has in use: resident on a CPU, allocated at most on a GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process.memory_info().rss
