"""Folders of checkpoints: one per step, with names that tell finished checkpoints from partial ones.

    step-00000100/                     a checkpoint
    step-00000200.partial-5f3a9c01/    being written, left behind by a stopped save, or being deleted
    step-00000300.aside-0c77d1e4/      a later checkpoint of a run that went back; kept, never loaded, never
                                       deleted
    best.json                          {..., "step": 100, "folder": "step-00000100", "loss": 1.5}: the best by
                                       its evaluation

A checkpoint appears by one rename and disappears by one: it is renamed to a partial one before it is
deleted, so a crash leaves nothing incomplete under a valid name. Links are neither followed nor removed.
"""

import json
import logging
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from meshwright.plan.job.file_format import BEST_CHECKPOINT
from meshwright.run.checkpoint.manifest import CheckpointError, read_manifest
from meshwright.run.checkpoint.sizes_and_checksums import check_sizes

BEST_FILE = "best.json"
STEP_FOLDER = re.compile(r"step-(\d{8,18})(\.partial-[0-9a-f]+)?")

logger = logging.getLogger(__name__)


def step_folder(folder: Path, step: int) -> Path:
    """Returns the folder of the checkpoint of `step` inside `folder`."""
    return folder / f"step-{step:08d}"


def partial_folder(path: Path, token: str) -> Path:
    """Returns the folder in which the checkpoint at `path` is written; `token` is hexadecimal and differs
    per attempt.
    """
    return path.with_name(f"{path.name}.partial-{token}")


def list_step_folders(folder: Path) -> list[tuple[int, Path]]:
    """Returns step and path of all step folders in `folder`, newest first, partial ones after finished ones;
    [] without a folder.
    """
    if not folder.is_dir():
        return []
    matches = [(STEP_FOLDER.fullmatch(path.name), path) for path in folder.iterdir()]
    found = [(int(match[1]), match[2] is None, path) for match, path in matches if match]
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def publish_checkpoint(partial: Path, path: Path) -> None:
    """Renames `partial` to `path`, durably on disk on return; a checkpoint already at `path` becomes a
    partial one.
    """
    sync_folder(partial)
    if os.path.lexists(path):
        os.rename(path, partial_folder(path, secrets.token_hex(4)))
    os.rename(partial, path)
    sync_folder(path.parent)


def prune_checkpoints(final_path: Path, keep: int) -> None:
    """Removes stopped saves, damaged checkpoints, and all but the newest `keep` valid ones; `final_path` and
    the best one stay.

    The checkpoint at `final_path` is valid by now, so a folder that cannot be removed is a log line and no
    error.
    """
    kept = 0
    best = step_folder(final_path.parent, best_step(final_path.parent))
    try:
        for step, path in list_step_folders(final_path.parent):
            good = path == step_folder(final_path.parent, step) and _fits(path)
            if path == final_path or (good and kept < keep):
                kept += 1
            elif path != best and path.is_dir() and not path.is_symlink():
                remove_checkpoint(path)
    except OSError as error:
        logger.warning("old checkpoints in '%s' stay: %s", final_path.parent, error)


def mark_best(folder: Path, step: int, loss: float | None) -> None:
    """Writes into `folder` that its checkpoint of `step`, with evaluation loss `loss`, is the best.

    A reader sees the old or the new file. If there is no such checkpoint, the file is removed.
    """
    path = folder / BEST_FILE
    try:
        if loss is None or not step_folder(folder, step).is_dir():
            if not step_folder(folder, best_step(folder)).is_dir():
                path.unlink(missing_ok=True)
            return
        part = path.with_suffix(".part")
        with part.open("w", encoding="ascii") as file:
            named = {"step": step, "folder": step_folder(folder, step).name, "loss": loss}
            file.write(json.dumps(BEST_CHECKPOINT.header | named) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(folder)
    except OSError as error:
        logger.warning(
            "the best checkpoint is that of step %d, but '%s' could not be written: %s", step, path, error
        )


def best_step(folder: Path) -> int:
    """Returns the step of the best checkpoint in `folder` as best.json names it; 0 if it names none.

    Raises PlanError for a best.json of another format or version.
    """
    try:
        document = json.loads((folder / BEST_FILE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
    step = BEST_CHECKPOINT.contents(document, str(folder / BEST_FILE)).get("step")
    return step if isinstance(step, int) and step > 0 else 0


def retire_later_checkpoints(folder: Path, step: int) -> list[Path]:
    """Renames the checkpoints in `folder` that are later than `step`, so that no reader uses them; returns
    their new paths.
    """
    later = [
        path
        for found, path in list_step_folders(folder)
        if found > step and path == step_folder(folder, found)
    ]
    return [
        path.rename(path.with_name(f"{path.name}.aside-{secrets.token_hex(4)}")) for path in reversed(later)
    ]


def remove_checkpoint(path: Path) -> None:
    """Deletes the step folder `path`, after renaming it to a partial one; logs what cannot be deleted."""
    try:
        gone = path
        if ".partial-" not in path.name:
            gone = partial_folder(path, secrets.token_hex(4))
            os.rename(path, gone)
        shutil.rmtree(gone)
    except OSError as error:
        logger.warning("'%s' could not be removed: %s", path, error)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` survive a power failure. Windows cannot open folders; its file system
    journals renames.
    """
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fits(path: Path) -> bool:
    """Whether the manifest and all sizes are right; checksums are for the reader, who has to read the files
    anyway.
    """
    with suppress(CheckpointError):
        check_sizes(path, read_manifest(path).files)
        return True
    return False
