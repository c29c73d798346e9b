"""The loop around the step: feed, play, record, save; stop when told to, and go on where another run stopped.

A signal sets a flag on the rank that got it. The flag travels in the header of the next step, so all ranks learn of it
in the same step, save the same checkpoint and end together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Never

import psutil
import torch

from meshwright.comm.group import World
from meshwright.core.errors import PlanError
from meshwright.core.mesh import AXES
from meshwright.core.plan import Plan
from meshwright.engine.player import Player
from meshwright.engine.state import Metrics
from meshwright.run.callbacks import Callback, Line, Moment, call
from meshwright.run.checkpoint import load, newest_good, save
from meshwright.run.feed import Feed
from meshwright.run.folders import listed, set_aside, step_folder
from meshwright.run.guard import Progress
from meshwright.run.journal import Journal, Replay
from meshwright.run.manifest import CheckpointError, Manifest
from meshwright.run.shards import check_sizes, read_manifest

CHECKPOINTS = "checkpoints"


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

    Rank 0 looks and tells the others the step, so that all take the same one. Damaged checkpoints and those of another
    model are passed over. When the run goes back to `step` under a plan or with data that changed since, later checkpoints
    are set aside: they belong to another course of the run.

    Raises PlanError when `step` is asked for and not there, and when there are checkpoints and none can be used: starting
    from nothing would in time replace them.
    """
    folder = Path(plan.run.folder) / CHECKPOINTS
    notes: list[str] = []
    found = torch.zeros(1, dtype=torch.int64, device=world.device)
    if world.rank == 0:
        found[0] = _newest(folder, player, notes) if step is None else _asked_for(folder, player, step)
    world.group(AXES).broadcast(found, source=0, action="resume").wait()
    if found.item() <= 0:
        return Resumed(0, ("starting from step 0", *notes))
    tensors, meta = load(step_folder(folder, int(found.item())))
    changes = _changes(meta, plan, data_digest)
    if world.rank == 0 and changes and step is not None:
        aside = set_aside(folder, step)
        notes += [f"later checkpoints were set aside: {', '.join(path.name for path in aside)}"] if aside else []
    player.restore(tensors, int(found.item()))
    return Resumed(player.steps_done, (f"resumed from step {player.steps_done}", *notes, *changes))


def train(
    player: Player,
    plan: Plan,
    feed: Feed,
    world: World,
    stopping: Callable[[], bool],
    callbacks: Sequence[Callback] = (),
    progress: Progress | None = None,
) -> Ended:
    """Play the steps that are left; `stopping()` is asked before each, `callbacks` are called on rank 0.

    `progress` is kept up to date, so that a failure can say where it happened. A last checkpoint is saved at the end.
    """
    run, first = plan.run, player.steps_done
    steps = plan.job.train.steps if feed.num_steps is None else min(plan.job.train.steps, feed.num_steps)
    journal = Journal(Path(run.folder)) if world.rank == 0 else None
    progress = progress or Progress()
    process, loss, stopped, wish = psutil.Process(), None, False, None
    callbacks = callbacks if world.rank == 0 else ()
    saved = step_folder(Path(run.folder) / CHECKPOINTS, first) if first else None
    try:
        call((callback.on_train_begin for callback in callbacks), Moment(first))
        while player.steps_done < steps and not stopped:
            progress.step, progress.phase = player.steps_done + 1, "training"
            started = perf_counter()
            metrics = player.step(feed.batch(player.steps_done), stop=stopping() or wish is not None)
            line = _line(metrics, perf_counter() - started, _memory(process, world.device))
            loss, stopped = metrics.loss, metrics.stop
            if journal is not None:
                journal.write(asdict(line))
            wish = call((callback.on_step_end for callback in callbacks), Moment(line.step, line)) or wish
            due = run.save_every and player.steps_done % run.save_every == 0
            if stopped or due or player.steps_done == steps:
                progress.phase = "saving"
                saved = save_run(player, plan, world, feed.data.digest)
                wish = call((callback.on_save for callback in callbacks), Moment(line.step, line, checkpoint=saved)) or wish
        call((callback.on_train_end for callback in callbacks), Moment(player.steps_done, checkpoint=saved))
    finally:
        if journal is not None:
            journal.close()
    return Ended(player.steps_done, loss, stopped, journal.replay if journal else Replay(), saved)


def refuse_unusable(plan: Plan) -> None:
    """Raise PlanError, before any rank starts, when the run has checkpoints and none is whole and of this model.

    Looks at manifests and sizes only; checksums are for the ranks, which read the files anyway.
    """
    folder = Path(plan.run.folder) / CHECKPOINTS
    shapes = {f"model/{weight.name}": weight.shape for weight in plan.anatomy.weights}
    finished = [path for step, path in listed(folder) if path == step_folder(folder, step)]
    reasons = []
    for path in finished:
        try:
            manifest = read_manifest(path)
            check_sizes(path, manifest.files)
            theirs = {name: entry.shape for name, entry in manifest.entries.items() if name.startswith("model/")}
            if theirs == shapes:
                return
            reasons.append(f"{path.name}: it is of another model")
        except CheckpointError as error:
            reasons.append(f"{path.name}: {error.faults[0].what}")
    if finished:
        _refuse_all(folder, reasons)


def save_run(player: Player, plan: Plan, world: World, data_digest: str) -> Path:
    """Save the player's state as a checkpoint of the run; returns its folder."""
    meta: dict[str, Any] = {"plan": plan.as_dict(), "plan_hash": plan.hash, "data": data_digest, "torch": torch.__version__}
    folder = Path(plan.run.folder) / CHECKPOINTS
    return save(folder, player.steps_done, player.tensors(), meta, world.group(AXES), plan.run.keep, world.device)


def _line(metrics: Metrics, seconds: float, memory: int) -> Line:
    m, speed = metrics, metrics.tokens / seconds
    return Line(m.step, m.loss, m.grad_norm, m.lr, m.tokens, seconds, speed, memory, m.skipped)


def _newest(folder: Path, player: Player, notes: list[str]) -> int:
    """The step of the newest checkpoint that can be used, 0 when none was ever finished."""
    path, manifest, rejected = newest_good(folder, lambda manifest, place: check_model(manifest, player, place))
    notes += [f"passed over {bad.name}: {why.replace(f'{bad}/', '').removeprefix(f'{bad}: ')}" for bad, why in rejected]
    finished = [bad for bad, _ in rejected if ".partial-" not in bad.name]
    if manifest is not None and path is not None:
        notes += [f"{path.name} is the newest good checkpoint"] if finished else []
        return manifest.step
    if finished:
        _refuse_all(folder, [f"{bad.name}: {why}" for bad, why in rejected if bad in finished])
    return 0


def _refuse_all(folder: Path, reasons: Sequence[str]) -> Never:
    listing = "".join(f"\n  passed over {reason}" for reason in reasons)
    text = f"none of the {len(reasons)} checkpoints here can be used:{listing}"
    fix = "train into another run.folder, or restore a checkpoint from a copy; to start from step 0 here, move the folder away"
    raise PlanError(text, fix=fix, where=str(folder))


def _asked_for(folder: Path, player: Player, step: int) -> int:
    path = step_folder(folder, step)
    if not path.is_dir():
        raise PlanError(f"there is no checkpoint of step {step}", fix=f"choose one of: {names_in(folder)}", where=str(folder))
    check_model(read_manifest(path), player, path)
    return step


def names_in(folder: Path) -> str:
    """The checkpoints in `folder` in words, oldest first."""
    return ", ".join(path.name for step, path in reversed(listed(folder)) if path == step_folder(folder, step)) or "none"


def check_model(manifest: Manifest, player: Player, path: Path) -> None:
    """Raise CheckpointError unless `manifest`, that of the checkpoint in `path`, is of the model that `player` plays."""
    mine = {name: tuple(tensor.shape) for name, tensor in player.tensors().items() if not name.startswith("optimizer/")}
    theirs = {name: entry.shape for name, entry in manifest.entries.items() if not name.startswith("optimizer/")}
    wrong = sorted(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name))
    if wrong:
        shown = "; ".join(f"{name}: {theirs.get(name)} saved, {mine.get(name)} here" for name in wrong[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        fix = "train into another run.folder, or go back to the model that saved it"
        raise CheckpointError(f"it is of another model: {shown}{more}", fix=fix, where=str(path))


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
