"""Checkpoints that are complete or absent: written by all ranks together, published by one rename, verified
before use.

Every rank has the same tensors, or shards of them, and writes its part; no rank gathers anything. After each
phase the ranks exchange whether it succeeded, so that a full disk under one of them is an error on all of
them.

    agree      all ranks have the same names, shapes and dtypes for the same step
    begin      rank 0 makes   step-00000100.partial-5f3a9c01/
    write      each rank      rank-00000.safetensors, rank-00001.safetensors ...; fsync, sha256; the ranks
                              exchange sizes and checksums
    publish    rank 0         manifest.json, fsync; rename to  step-00000100/ ; fsync of the folder above
    prune      rank 0         removes all but the newest `keep` and the best, and what stopped saves left
                              behind

The rename is the only moment at which a checkpoint appears. A crash before it leaves a `.partial-` folder,
which no reader takes for a checkpoint; a crash after it leaves a valid one. Old checkpoints are removed
last, after being renamed to `.partial-` themselves, so a half-deleted checkpoint is not taken for a valid
one either. Memory: at most one tensor is copied at a time.

Reading trusts nothing: it checks names and sizes, then checksums, then the contents of the files against the
manifest. Ranks that read together share the checksums (`distributed_verification`). No file contains a
pickle, and ranks exchange plain numbers.
"""

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import torch

from meshwright.comm.collectives.group import Group
from meshwright.engine.optim.sharded_state_dict import SavedTensor
from meshwright.model.tensors.lazy_mapping import LazyTensors, Region
from meshwright.run.checkpoint.all_ranks_or_none import ConsensusError, RankConsensus
from meshwright.run.checkpoint.directories import (
    list_step_folders,
    partial_folder,
    prune_checkpoints,
    publish_checkpoint,
    remove_checkpoint,
    step_folder,
)
from meshwright.run.checkpoint.manifest import (
    MANIFEST_FILE,
    MAX_NBYTES,
    CheckpointError,
    Json,
    Manifest,
    ShardFile,
    TensorEntry,
    read_manifest,
)
from meshwright.run.checkpoint.shard_io import (
    SAFETENSORS_TAGS,
    dtype_name,
    read_entries,
    read_entry,
    write_all_bytes,
    write_shard,
)
from meshwright.run.checkpoint.sizes_and_checksums import check_checksums, check_sizes
from meshwright.run.checkpoint.write_plan import WritePlan, list_shards

ExpectedTensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
ManifestCheck = Callable[[Manifest, Path], None]  # raises CheckpointError
NewestCheckpoint = tuple[Path | None, Manifest | None, list[tuple[Path, str]]]

MAX_SHOWN_DIFFERENCES = 5  # differences shown in a message

logger = logging.getLogger(__name__)


def save_tensors(
    folder: Path,
    step: int,
    tensors: Mapping[str, SavedTensor],
    meta: Mapping[str, Json],
    group: Group,
    keep: int,
    device: torch.device | None = None,
) -> Path:
    """Writes the checkpoint of `step` and returns its folder; every rank of `group` has all or a shard of
    each tensor.

    Args:
        folder: contains one folder per step; made if missing; the same for all ranks.
        tensors: full name ("model/...", "optimizer/exp_avg/...") -> tensor, any strides, or a shard of it.
        meta: plain JSON; rank 0's is written.
        keep: how many of the newest valid checkpoints stay, at least 1.
        device: the device of the collectives of `group`; the CPU when None.

    A checkpoint of the same step is replaced, unless it is bit-identical; a valid checkpoint of another
    model is not overwritten.

    Raises CheckpointError on every rank when any rank fails; on that rank the error is caused by its own
    OSError. The partial folder is then removed, and earlier checkpoints are untouched.
    """
    ranks = RankConsensus(group, device or torch.device("cpu"), f"step {step} was not saved")
    path = step_folder(folder, step)
    fix = "hold the same tensors on every rank before saving"
    ranks.check_equal("the list of tensors", lambda: _state_digest(step, tensors, meta, keep), fix=fix)
    parts = WritePlan.from_ranks(tensors, ranks.gather("listing shares", lambda: list_shards(tensors)))
    names = [_file_name(index) for index in range(group.size)]

    entries = parts.entries(names) if group.index == 0 else {}

    def manifest(files: Mapping[str, ShardFile]) -> Manifest:
        return Manifest(step, entries, dict(files), dict(meta))

    def begin() -> bytes:
        largest = {names[index]: ShardFile(MAX_NBYTES, "0" * 64) for index in parts.writer_indices()}
        manifest(largest).dump()  # refuses what could not be read back before anything is written
        return _begin(path, step, parts.outline)

    token = ranks.run("making the folder", lambda: begin() if group.index == 0 else b"")[0][:4]
    partial = partial_folder(path, token.hex())
    try:
        records = ranks.run(
            "writing", lambda: _write(partial / names[group.index], parts.local_tensors(tensors, group.index))
        )
        files = {names[index]: _unpack(records[index]) for index in parts.writer_indices()}
        ranks.run(
            "publishing",
            lambda: _publish(partial, path, manifest(files)) if group.index == 0 else b"",
        )
    except CheckpointError:
        if group.index == 0 and partial.exists():
            remove_checkpoint(partial)
        raise
    if group.index == 0:
        prune_checkpoints(path, keep)
    return path


def load_tensors(
    path: Path, expected: ExpectedTensors | None = None
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Json]]:
    """Returns the tensors of the checkpoint in folder `path`, on the CPU, and its `meta`.

    Checksums are verified here. Each tensor is read when it is accessed, into memory of its own, so a caller
    that keeps none has one in memory at a time. `expected` names the tensors with the shape and dtype of
    each; None stands for all. Only needed files are read. Raises CheckpointError when a file is damaged, or
    an expected tensor is missing or has another shape or dtype.
    """
    manifest = read_manifest(path)
    chosen = {name: entry for name, entry in manifest.entries.items() if expected is None or name in expected}
    if expected is not None:
        _refuse(tensor_differences(chosen, expected), path)
    needed = {box.file for entry in chosen.values() for box in entry.slices}
    check_checksums(path, {name: shard for name, shard in manifest.files.items() if name in needed})
    return open_tensors(path, chosen), manifest.meta


def open_tensors(path: Path, entries: Mapping[str, TensorEntry]) -> Mapping[str, torch.Tensor]:
    """Returns the tensors `entries` of the checkpoint in folder `path`, read on access; checksums are not
    verified.
    """

    def read(name: str, region: Region = ()) -> torch.Tensor:
        return read_entry(path, entries[name], region)

    return LazyTensors(entries, read, read, lambda name: entries[name].shape)


def newest_valid(folder: Path, check: ManifestCheck | None = None) -> NewestCheckpoint:
    """Returns the newest complete checkpoint in `folder`, its manifest, and the newer ones that were
    skipped, with reasons.

    `check(manifest, path)` raises CheckpointError for a checkpoint to skip, such as one of another model.
    Without a valid one: (None, None, all that were skipped).
    """
    return first_valid(
        folder, list_step_folders(folder), lambda path, step: _verified_manifest(path, step, check)
    )


def newest_whole(folder: Path, check: ManifestCheck | None = None) -> NewestCheckpoint:
    """Returns likewise the newest checkpoint whose manifest is valid and whose files have their sizes; the
    ranks that read them verify checksums.
    """

    def manifest_of(path: Path, step: int) -> Manifest:
        manifest = checked_manifest(path, step, check)
        check_sizes(path, manifest.files)
        return manifest

    return first_valid(folder, list_step_folders(folder), manifest_of)


def first_valid(
    folder: Path, candidates: Iterable[tuple[int, Path]], validate: Callable[[Path, int], Manifest]
) -> NewestCheckpoint:
    """Returns the first valid one of `candidates` (step, path) likewise; `validate(path, step)` returns its
    manifest or raises.
    """
    rejected: list[tuple[Path, str]] = []
    for step, path in candidates:
        try:
            if path != step_folder(folder, step):
                raise CheckpointError(
                    "half-written: the save was stopped", fix="save again", location=str(path)
                )
            return path, validate(path, step), rejected
        except ConsensusError:
            raise
        except CheckpointError as error:
            rejected.append(
                (
                    path,
                    "; ".join(
                        f"{diagnostic.location}: {diagnostic.problem}" for diagnostic in error.diagnostics
                    ),
                )
            )
    return None, None, rejected


def checked_manifest(path: Path, step: int | None = None, check: ManifestCheck | None = None) -> Manifest:
    """Returns the manifest of the checkpoint in `path` (that of `step` if given), without looking at its
    files.

    Raises CheckpointError if it is damaged, of another step, or refused by `check`.
    """
    manifest = read_manifest(path)
    if step is not None and manifest.step != step:
        raise CheckpointError(
            f"its manifest is of step {manifest.step}", fix="rename the folder to match", location=str(path)
        )
    if check is not None:
        check(manifest, path)
    return manifest


def check_state(manifest: Manifest, expected: ExpectedTensors, path: Path) -> None:
    """Raises CheckpointError, with the first differences, unless `manifest` has exactly the tensors of
    `expected`.
    """
    _refuse(tensor_differences(manifest.entries, expected), path)


def tensor_differences(entries: Mapping[str, TensorEntry], expected: ExpectedTensors) -> list[str]:
    """Returns one line per tensor that is missing in `entries`, unexpected, or of another shape or dtype;
    sorted by name.
    """
    have = {name: f"{list(entry.shape)} {entry.dtype}" for name, entry in entries.items()}
    need = {name: f"{list(shape)} {dtype_name(dtype)}" for name, (shape, dtype) in expected.items()}
    return [
        f"{name}: {have.get(name, 'nothing')} in the checkpoint, {need.get(name, 'nothing')} in this run"
        for name in sorted({*have, *need})
        if have.get(name) != need.get(name)
    ]


def compare_checkpoints(a: Path, b: Path) -> list[str]:
    """Returns the sorted names of the tensors whose presence, shape, dtype or bits differ between two
    checkpoints.

    Raises CheckpointError when one of them is damaged.
    """
    left, right = _verified_manifest(a), _verified_manifest(b)
    both = sorted(set(left.entries) & set(right.entries))
    alike = [
        n
        for n in both
        if (left.entries[n].shape, left.entries[n].dtype) == (right.entries[n].shape, right.entries[n].dtype)
    ]
    ours = read_entries(a, {name: left.entries[name] for name in alike})
    theirs = read_entries(b, {name: right.entries[name] for name in alike})
    same = {name for (name, x), (_, y) in zip(ours, theirs, strict=True) if torch.equal(_bits(x), _bits(y))}
    return sorted({*left.entries, *right.entries} - same)


def _state_digest(
    step: int, tensors: Mapping[str, SavedTensor], meta: Mapping[str, Json], keep: int
) -> bytes:
    if not 0 <= step <= MAX_NBYTES or keep < 1:
        raise CheckpointError(
            f"step {step}, keep = {keep}",
            fix="count steps from 0, and keep at least 1 checkpoint",
            location="checkpoint",
        )
    strange = [
        f"{name} is {dtype_name(tensor.dtype)}"
        for name, tensor in tensors.items()
        if tensor.dtype not in SAFETENSORS_TAGS
    ]
    if strange:
        known = ", ".join(map(dtype_name, SAFETENSORS_TAGS))
        raise CheckpointError(
            f"{'; '.join(strange[:MAX_SHOWN_DIFFERENCES])}: no such dtype in a checkpoint",
            fix=f"convert to one of {known}",
            location="checkpoint",
        )
    Manifest(step, {}, {}, dict(meta)).dump()  # refuses a meta that is not JSON before anything is written
    alike = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    state = [f"{name} {list(alike[name].shape)} {dtype_name(alike[name].dtype)}" for name in sorted(alike)]
    return sha256(repr((step, state)).encode()).digest()


def _begin(place: Path, step: int, outline: ExpectedTensors) -> bytes:
    place.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(place):
        try:
            manifest = _verified_manifest(place, step)
        except CheckpointError as error:
            logger.warning("a damaged checkpoint is replaced: %s", error)
        else:
            check_state(manifest, outline, place)
    token = secrets.token_bytes(4)
    os.mkdir(partial_folder(place, token.hex()))
    return token


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> bytes:
    if not tensors:
        return b""
    shard = write_shard(path, tensors)
    return shard.nbytes.to_bytes(8, "little") + bytes.fromhex(shard.sha256)


def _unpack(record: bytes) -> ShardFile:
    return ShardFile(int.from_bytes(record[:8], "little"), record[8:40].hex())


def _publish(partial: Path, place: Path, manifest: Manifest) -> bytes:
    if os.path.lexists(place) and _equals_saved(place, manifest):
        logger.info(
            "step %d is saved already in '%s', equal to the last bit: left as it is", manifest.step, place
        )
        remove_checkpoint(partial)
        return b""
    with (partial / MANIFEST_FILE).open("xb", buffering=0) as file:
        write_all_bytes(file.fileno(), memoryview(manifest.dump().encode()))
        os.fsync(file.fileno())
    publish_checkpoint(partial, place)
    return b""


def _equals_saved(place: Path, manifest: Manifest) -> bool:
    with suppress(CheckpointError):
        return _verified_manifest(place).dump() == manifest.dump()
    return False


def _verified_manifest(path: Path, step: int | None = None, check: ManifestCheck | None = None) -> Manifest:
    manifest = checked_manifest(path, step, check)
    check_checksums(path, manifest.files)
    return manifest


def _refuse(lines: list[str], path: Path) -> None:
    if lines:
        more = f" and {len(lines) - MAX_SHOWN_DIFFERENCES} more" if len(lines) > MAX_SHOWN_DIFFERENCES else ""
        what = f"it holds another model or optimizer: {'; '.join(lines[:MAX_SHOWN_DIFFERENCES])}{more}"
        raise CheckpointError(
            what,
            fix="resume with the model and optimizer that wrote it, or start in an empty folder",
            location=str(path),
        )


def _file_name(index: int) -> str:
    return f"rank-{index:05d}.safetensors"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
