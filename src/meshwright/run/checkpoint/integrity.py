"""A checkpoint that all ranks look through together: each file is read by one of them, and nobody goes on before all agree.

One process alone reads every byte for the checksums (`checkpoint.load`). Of n ranks that take up the same checkpoint each
reads a share, and believes the others about the rest: S bytes are read, not n S.

    look     every rank   the manifest, whether it fits this run, names and sizes       a few stats
    tell     every rank   what the manifest says, and which files it sees
    sum      each rank    its share of the files: the largest first, each to the rank with the fewest bytes so far
    agree    every rank   the faults of all; with one, all of them raise the same error

Who sees other files, such as a copy on its own host, is not believed about them: files are told apart by inode and time
of change, and dealt out among the ranks that see the same. Where a file system gives every host other inodes, more is read
than needed, and nothing less.

Where the newest checkpoint is damaged all ranks pass it over, and look through the next one.
"""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from meshwright.comm.collectives.group import World
from meshwright.plan.sharding.mesh import AXES
from meshwright.run.checkpoint.consensus import RankConsensus
from meshwright.run.checkpoint.directories import list_step_folders
from meshwright.run.checkpoint.manifest import CheckpointError, Manifest
from meshwright.run.checkpoint.save_load import ManifestCheck, NewestCheckpoint, checked_manifest, first_valid
from meshwright.run.checkpoint.shard_io import check_checksums, check_sizes, stat_regular_file
from meshwright.run.checkpoint.write_plan import balance_by_size

RETRY_FIX = "start again, where every rank can read the checkpoint folder"
DIGEST_NBYTES = 32  # bytes of a sha256


def load_consensus(world: World, purpose: str) -> RankConsensus:
    """All ranks of `world`, about to take up a checkpoint; `what` says in an error what did not happen."""
    return RankConsensus(world.group(AXES), world.device, purpose, action="RESUME", retry_fix=RETRY_FIX)


def verify_checkpoint(
    path: Path, consensus: RankConsensus, check: ManifestCheck | None = None, step: int | None = None
) -> Manifest:
    """The manifest of the checkpoint in `path`, that of `step` if one is named, once all `ranks` have found all of it whole.

    Each checks the sums of its share of the files. `check(manifest, path)` raises CheckpointError for one that does not fit
    this rank. Raises the same CheckpointError on every rank, with the faults that any of them found.
    """
    looked: list[Manifest] = []

    def look() -> bytes:
        manifest = checked_manifest(path, step, check)
        check_sizes(path, manifest.files)
        looked.append(manifest)
        return sha256(manifest.dump().encode()).digest() + _seen(path, manifest)

    told = consensus.gather_or_raise("looking at a checkpoint", look)
    others = [
        rank
        for rank, line in zip(consensus.group.ranks, told, strict=True)
        if line[:DIGEST_NBYTES] != told[0][:DIGEST_NBYTES]
    ]
    if others:
        what = f"ranks {others} find another checkpoint there than rank {consensus.group.ranks[0]}"
        raise CheckpointError(
            what, fix="give every rank the same folder, or a copy of it", location=str(path)
        )
    (manifest,) = looked
    mine = _share(manifest, told, consensus.group.index)

    def add_up() -> bytes:
        check_checksums(path, {name: manifest.files[name] for name in mine})
        return b""

    consensus.gather_or_raise("reading a checkpoint", add_up)
    return manifest


def newest_valid_on_all_ranks(
    folder: Path, consensus: RankConsensus, check: ManifestCheck | None = None
) -> NewestCheckpoint:
    """As `checkpoint.newest_good`, of all `ranks` together: all of them get the same, and all pass over the same."""

    def listing() -> bytes:
        if consensus.group.index:
            return b""
        return json.dumps([(step, path.name) for step, path in list_step_folders(folder)]).encode()

    places = json.loads(consensus.gather_or_raise("listing the checkpoints", listing)[0])
    found = ((step, folder / name) for step, name in places)
    return first_valid(folder, found, lambda path, step: verify_checkpoint(path, consensus, check, step))


def _seen(path: Path, manifest: Manifest) -> bytes:
    """A digest of which files these are: the same on two ranks only if they look at the same ones."""
    found = {name: stat_regular_file(path / name) for name in sorted(manifest.files)}
    return sha256(
        repr([(name, status.st_ino, status.st_ctime_ns) for name, status in found.items()]).encode()
    ).digest()


def _share(manifest: Manifest, run: Sequence[bytes], index: int) -> tuple[str, ...]:
    """The files that the rank at `index` reads, one of those that have told that they see the same."""
    alike = [each for each, line in enumerate(run) if line == run[index]]
    return balance_by_size({name: shard.nbytes for name, shard in manifest.files.items()}, len(alike))[
        alike.index(index)
    ]
