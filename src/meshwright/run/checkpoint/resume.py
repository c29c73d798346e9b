"""Resuming a run: chooses the checkpoint, and reports what changed since it was saved.

All ranks verify the folder together (`distributed_verification`), so all load the same checkpoint.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Never

from meshwright.comm.allreduce import BACKEND
from meshwright.comm.collectives.collective_call import REDUCING
from meshwright.comm.collectives.group import World
from meshwright.engine.optim.sharded_state_dict import DEVICE_WEIGHTS, persistent_buffers
from meshwright.engine.step.executor import StepExecutor
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.strategy_state import ANSWER_PREFIX, STATE_PREFIX
from meshwright.run.checkpoint.all_ranks_or_none import RankConsensus
from meshwright.run.checkpoint.directories import (
    BEST_FILE,
    best_step,
    list_step_folders,
    mark_best,
    retire_later_checkpoints,
    step_folder,
)
from meshwright.run.checkpoint.distributed_checkpoint import newest_whole, open_tensors
from meshwright.run.checkpoint.distributed_verification import (
    consensus_for_load,
    newest_valid_on_all_ranks,
    verify_checkpoint,
)
from meshwright.run.checkpoint.manifest import (
    DAMAGED_FIX,
    MANIFEST_FILE,
    CheckpointError,
    Manifest,
    checked_json,
)
from meshwright.run.data.eval_samples import EvalHistory

CHECKPOINTS_FOLDER = "checkpoints"
MODEL_PREFIXES = (
    "model/",
    "buffer/",
)  # these must match the model; the rest depends on the plan


@dataclass(frozen=True)
class SavedRun:
    """What a run saves in a checkpoint besides tensors; checkpoints of `Trainer.save` lack most of it.

    `reduction_transports` are those that the function of this name returned.
    """

    plan: dict[str, Any] = field(default_factory=dict)
    plan_hash: str = ""
    data: str = ""
    torch: str = ""
    eval_history: EvalHistory = field(default_factory=EvalHistory)
    reduction_transports: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tables = self.plan.get("strategies", [])
        if not isinstance(tables, list) or not all(
            isinstance(table, dict) and isinstance(table.get("name"), str) for table in tables
        ):
            raise CheckpointError(
                "needed is a list of tables with a name", fix=DAMAGED_FIX, location="meta.plan.strategies"
            )


@dataclass(frozen=True)
class ResumeResult:
    """The result of a resume: the step (0: from the start), notes for the user, and the evaluation
    history.
    """

    step: int
    notes: tuple[str, ...] = ()
    eval_history: EvalHistory = field(default_factory=EvalHistory)


def resume(
    executor: StepExecutor,
    plan: Plan,
    world: World,
    data_digest: str,
    step: int | None = None,
    *,
    only_read: bool = False,
) -> ResumeResult:
    """Loads the newest valid checkpoint of the run's folder (or that of `step`) on every rank.

    Damaged checkpoints and those of another model are skipped. If the run goes back to `step` under a plan
    or with data that changed since, later checkpoints are retired: they belong to an
    abandoned branch of the run. With `only_read`, no file is changed.

    Raises PlanError on every rank when `step` is given and missing, when there are checkpoints and none can
    be used: starting from step 0 would replace them in time, and when the plan cannot begin there.
    """
    folder = Path(plan.run.folder) / CHECKPOINTS_FOLDER
    notes: list[str] = []
    consensus = consensus_for_load(world, "the run does not resume")
    # all ranks know of a file of another version before a step is trained
    consensus.gather_or_raise(f"reading {BEST_FILE}", lambda: _check_best(folder))
    manifest = (
        _find_newest(folder, executor, consensus, notes)
        if step is None
        else _find_requested(folder, executor, consensus, step)
    )
    plan.check_start(0 if manifest is None else manifest.step)
    if manifest is None:
        return ResumeResult(0, ("starting from step 0", *notes))
    saved = saved_run(manifest, step_folder(folder, manifest.step))
    changes = [
        *_changes(saved, plan, data_digest),
        *state_changes({name: entry.shape for name, entry in manifest.entries.items()}, plan),
        *_transport_changes(saved.reduction_transports, reduction_transports(plan, world)),
    ]
    executor.load_state_dict(  # it may refuse: then nothing has been renamed
        open_tensors(step_folder(folder, manifest.step), manifest.entries), manifest.step
    )
    if world.rank == 0 and not only_read:
        if changes and step is not None:
            retired = retire_later_checkpoints(folder, step)
            notes += (
                [f"later checkpoints were retired: {', '.join(path.name for path in retired)}"]
                if retired
                else []
            )
        mark_best(folder, saved.eval_history.best_step, saved.eval_history.best_loss)
    return ResumeResult(
        executor.steps_done,
        (f"resumed from step {executor.steps_done}", *notes, *changes),
        saved.eval_history,
    )


def _check_best(folder: Path) -> bytes:
    try:
        best_step(folder)
    except PlanError as error:
        raise CheckpointError.from_diagnostics(error.diagnostics) from error
    return b""


def newest_usable_step(plan: Plan) -> int:
    """Returns the step of the newest checkpoint that is complete and of this model, before any rank starts; 0
    if there is no checkpoint. Raises PlanError if there are some, and none is.

    Checks manifests and sizes only; the ranks verify checksums, as they read the files anyway.
    """
    folder = Path(plan.run.folder) / CHECKPOINTS_FOLDER
    shapes = {f"model/{weight.name}": weight.shape for weight in plan.model_spec.params}

    def check_this_model(manifest: Manifest, path: Path) -> None:
        saved_run(manifest, path)
        entries = manifest.entries.items()
        if {name: entry.shape for name, entry in entries if name.startswith("model/")} != shapes:
            fix = "train into another run.folder"
            raise CheckpointError("it is of another model", fix=fix, location=str(path))

    _, manifest, rejected = newest_whole(folder, check_this_model)
    _, finished = _reasons(rejected)
    if manifest is None and finished:
        _refuse_all(folder, finished)
    return 0 if manifest is None else manifest.step


def _find_newest(
    folder: Path, executor: StepExecutor, consensus: RankConsensus, notes: list[str]
) -> Manifest | None:
    path, manifest, rejected = newest_valid_on_all_ranks(
        folder, consensus, lambda manifest, path: _check_resumable(manifest, executor, path)
    )
    reasons, finished = _reasons(rejected)
    notes += [f"skipped {reason}" for reason in reasons]
    if path is not None and finished:
        notes.append(f"{path.name} is the newest valid checkpoint")
    if manifest is None and finished:
        _refuse_all(folder, finished)
    return manifest


def _reasons(rejected: Sequence[tuple[Path, str]]) -> tuple[list[str], list[str]]:
    """Returns name and reason of all checkpoints that were rejected, and of those whose save had finished."""
    found = {
        bad.name: f"{bad.name}: {why.replace(f'{bad}/', '').removeprefix(f'{bad}: ')}"
        for bad, why in rejected
    }
    return list(found.values()), [reason for name, reason in found.items() if ".partial-" not in name]


def _refuse_all(folder: Path, reasons: Sequence[str]) -> Never:
    listing = "".join(f"\n  skipped {reason}" for reason in reasons)
    text = f"none of the {len(reasons)} checkpoints here can be used:{listing}"
    fix = (
        "train into another run.folder, or restore a checkpoint from a copy; to start from step 0 here, "
        "move the folder away"
    )
    raise PlanError(text, fix=fix, location=str(folder))


def _find_requested(folder: Path, executor: StepExecutor, consensus: RankConsensus, step: int) -> Manifest:
    path = step_folder(folder, step)

    def require_folder() -> bytes:
        if not path.is_dir():
            fix = checkpoint_steps_fix(folder)
            raise CheckpointError(f"there is no checkpoint of step {step}", fix=fix, location=str(folder))
        return b""

    consensus.gather_or_raise("looking for a checkpoint", require_folder)
    return verify_checkpoint(
        path, consensus, lambda manifest, path: _check_resumable(manifest, executor, path), step
    )


def checkpoint_steps_fix(folder: Path) -> str:
    """Returns the repair for a step without a checkpoint: the steps of the checkpoints in `folder`."""
    found = [
        str(step) for step, path in reversed(list_step_folders(folder)) if path == step_folder(folder, step)
    ]
    return (
        f"choose one of: {', '.join(found)}" if found else "leave the step out: there is no checkpoint here"
    )


def _check_resumable(manifest: Manifest, executor: StepExecutor, path: Path) -> None:
    saved_run(manifest, path)
    check_model(manifest, executor, path)


def saved_run(manifest: Manifest, path: Path) -> SavedRun:
    """Returns what a run saved in the `manifest` of the checkpoint in `path`; what others saved is left out.

    Raises CheckpointError for values of other types. Checksums do not show these: whoever edits a manifest
    can compute its checksum.
    """
    known = {item.name for item in fields(SavedRun)}
    meta = {key: value for key, value in manifest.meta.items() if key in known}
    return checked_json(meta, SavedRun, f"{path}/{MANIFEST_FILE}", ("meta",))


def check_model(manifest: Manifest, executor: StepExecutor, path: Path) -> None:
    """Raises CheckpointError unless `manifest` of the checkpoint in `path` is of the model of `executor`."""
    mine = {f"model/{weight.name}": weight.shape for weight in executor.state.plan.model_spec.params}
    buffers = persistent_buffers(executor.state.trained_module.module)  # of other stages too
    mine |= {f"buffer/{name}": tuple(buffer.shape) for name, buffer in buffers}
    theirs = {
        name: entry.shape for name, entry in manifest.entries.items() if name.startswith(MODEL_PREFIXES)
    }
    wrong = sorted(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name))
    if wrong:
        shown = "; ".join(f"{name}: {theirs.get(name)} saved, {mine.get(name)} here" for name in wrong[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        fix = "train into another run.folder, or go back to the model that saved it"
        raise CheckpointError(f"it is of another model: {shown}{more}", fix=fix, location=str(path))


def _changes(saved: SavedRun, plan: Plan, data_digest: str) -> list[str]:
    if saved.plan_hash == plan.hash and saved.data == data_digest:
        return []
    changed = sorted(
        _describe_differences(
            _name_strategies(saved.plan), _name_strategies(json.loads(json.dumps(plan.as_dict())))
        )
    )  # as JSON: no tuples
    words = [f"the plan changed since that checkpoint: {', '.join(changed)}"] if changed else []
    return words + (["the data changed since that checkpoint"] if saved.data != data_digest else [])


def state_changes(saved: Mapping[str, Sequence[int]], plan: Plan) -> list[str]:
    """Returns what of the tensors that techniques keep from step to step begins anew under `plan`, and what
    of those in a checkpoint is left out; `saved` are the shapes in it by name.
    """
    states = [each.states.items() for each in plan.role_plans()]
    specs = {
        f"{STATE_PREFIX}{owner}/{spec.key}": spec
        for owners in states
        for owner, owned in owners
        for spec in owned
    }
    reshaped = {
        name: f" ({list(spec.shape_of_one(saved[name]))} there, {list(spec.shape)} here)"
        for name, spec in specs.items()
        if spec.may_begin_anew and name in saved and spec.shape_of_one(saved[name]) != spec.shape
    }
    needed = set(specs)
    others = (DEVICE_WEIGHTS, *([ANSWER_PREFIX] if plan.sharding.has_observers else []))
    found = {name for name in saved if name.startswith(STATE_PREFIX) and not name.startswith(others)}
    texts = (
        (needed - found, "is not in that checkpoint and begins anew"),
        (found - needed, "is in that checkpoint and is left out: the plan does not keep it"),
        (reshaped, "has another shape in that checkpoint and begins anew"),
    )
    lines = list[str]()
    for names, text in texts:
        by_owner = dict[str, list[str]]()
        for name in sorted(names):
            owner, _, key = name.removeprefix(STATE_PREFIX).partition("/")
            by_owner.setdefault(owner, []).append(key + reshaped.get(name, ""))
        for owner, own in by_owner.items():
            more = f" and {len(own) - 1} more" if len(own) > 1 else ""
            lines.append(f"what {owner} keeps from step to step {text}: {own[0]}{more}")
    return lines


def reduction_transports(plan: Plan, world: World) -> dict[str, str]:
    """Returns, by axes, the transport of the plan's sums whose order of addition it decides, and thereby the
    last bits.

    Sums of two ranks have one order and are left out. All ranks call this: it may create groups.
    """
    moves = [move for action in plan.for_rank(0).actions for move in action.transfers]
    sums = {
        (message.axes, among)
        for move in moves
        for message in move.messages
        if message.collective in REDUCING and message.algorithm == BACKEND
        for among in message.member_groups(plan.mesh)
    }
    groups = {" x ".join((*axes, *map(str, among))): world.group(axes, among) for axes, among in sorted(sums)}
    return {name: group.transport for name, group in groups.items() if group.size > 2}


def _transport_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    changed = [
        (axes, before[axes], carrier) for axes, carrier in now.items() if before.get(axes, carrier) != carrier
    ]
    return [
        f"sums over {axes} went through {old} and now go through {new}: from here on the last bits may differ"
        for axes, old, new in changed
    ]


def _name_strategies(plan: Mapping[str, Any]) -> dict[str, Any]:
    tables = plan.get("strategies", [])
    names = [table["name"] for table in tables]
    by = {
        name if names.count(name) == 1 else f"{name} ({table.get('axis')})": table
        for name, table in zip(names, tables, strict=True)
    }
    return {**plan, "strategies": by}


def _describe_differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return [
            found
            for key in {**old, **new}
            for found in _describe_differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        ]
    if isinstance(old, Mapping) or isinstance(new, Mapping):
        return [f"{path} is {'gone' if new is None else 'new'}"]
    return [] if old == new else [f"{path} was {old}, is {new}" if len(f"{old}{new}") < 60 else path]
