"""Verifies a checkpoint on all ranks: each file is read by one of them, and no rank continues before all
agree.

A single process reads every byte for the checksums (`save_load.load_tensors`). Of n ranks that load the same
checkpoint each reads a share of the files and relies on the others for the rest: S bytes are read, not n S.

    read     every rank   the manifest, whether it fits this run, names and sizes       a few stats
    gather   every rank   a digest of the manifest, and the identity of its folder
    check    each rank    checksums of its share: the largest file first, each to the rank with the fewest
                          bytes so far
    agree    every rank   the diagnostics of all; if there is one, all ranks raise the same error

Ranks that read other files, such as a copy on their own host, do not rely on each other: the folder and its
manifest are identified by inode and time of change, and files are shared among the ranks that read the same
ones. Where a file system gives every host other inodes, more than needed is read, never less.

If the newest checkpoint is damaged, all ranks skip it and verify the next one.
"""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from meshwright.comm.collectives.group import World
from meshwright.plan.sharding.mesh import AXES
from meshwright.run.checkpoint.all_ranks_or_none import RankConsensus
from meshwright.run.checkpoint.directories import list_step_folders
from meshwright.run.checkpoint.distributed_checkpoint import (
    ManifestCheck,
    NewestCheckpoint,
    checked_manifest,
    first_valid,
)
from meshwright.run.checkpoint.manifest import MANIFEST_FILE, CheckpointError, Manifest, stat_regular_file
from meshwright.run.checkpoint.sizes_and_checksums import check_checksums, check_sizes
from meshwright.run.checkpoint.write_plan import balance_by_size

RETRY_FIX = "start again, where every rank can read the checkpoint folder"
DIGEST_NBYTES = 32  # bytes of a sha256


def consensus_for_load(world: World, purpose: str) -> RankConsensus:
    """Returns all ranks of `world`, about to load a checkpoint; `purpose` is named in errors."""
    return RankConsensus(world.group(AXES), world.device, purpose, action="RESUME", retry_fix=RETRY_FIX)


def verify_checkpoint(
    path: Path, consensus: RankConsensus, check: ManifestCheck | None = None, step: int | None = None
) -> Manifest:
    """Returns the manifest of the checkpoint in `path` (that of `step` if given) after all ranks together
    verified all of it.

    Each rank checks the checksums of its share of the files. `check(manifest, path)` raises CheckpointError
    for a checkpoint that does not fit this rank. Raises the same CheckpointError on every rank, with the
    diagnostics of all ranks.
    """
    manifests: list[Manifest] = []

    def read() -> bytes:
        manifest = checked_manifest(path, step, check)
        check_sizes(path, manifest.files)
        manifests.append(manifest)
        return sha256((path / MANIFEST_FILE).read_bytes()).digest() + _folder_identity(path)

    records = consensus.gather_or_raise("reading the manifest of a checkpoint", read)
    others = [
        rank
        for rank, line in zip(consensus.group.ranks, records, strict=True)
        if line[:DIGEST_NBYTES] != records[0][:DIGEST_NBYTES]
    ]
    if others:
        what = f"ranks {others} read another manifest than rank {consensus.group.ranks[0]}"
        raise CheckpointError(
            what, fix="give every rank the same folder, or a copy of it", location=str(path)
        )
    (manifest,) = manifests
    mine = _share(manifest, records, consensus.group.index)

    def check_share() -> bytes:
        check_checksums(path, {name: manifest.files[name] for name in mine})
        return b""

    consensus.gather_or_raise("checking a checkpoint", check_share)
    return manifest


def newest_valid_on_all_ranks(
    folder: Path, consensus: RankConsensus, check: ManifestCheck | None = None
) -> NewestCheckpoint:
    """Returns what `save_load.newest_valid` returns, for all ranks together: all use, and skip, the same
    checkpoints.
    """

    def listing() -> bytes:
        if consensus.group.index:
            return b""
        return json.dumps([(step, path.name) for step, path in list_step_folders(folder)]).encode()

    places = json.loads(consensus.gather_or_raise("listing the checkpoints", listing)[0])
    found = ((step, folder / name) for step, name in places)
    return first_valid(folder, found, lambda path, step: verify_checkpoint(path, consensus, check, step))


def _folder_identity(path: Path) -> bytes:
    """Equal for two ranks that see one folder: of its files, only the manifest is looked at."""
    found = (path.stat(), stat_regular_file(path / MANIFEST_FILE))
    return sha256(repr([(status.st_ino, status.st_ctime_ns) for status in found]).encode()).digest()


def _share(manifest: Manifest, run: Sequence[bytes], index: int) -> tuple[str, ...]:
    alike = [each for each, line in enumerate(run) if line == run[index]]
    return balance_by_size({name: shard.nbytes for name, shard in manifest.files.items()}, len(alike))[
        alike.index(index)
    ]
