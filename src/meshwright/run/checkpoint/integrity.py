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
from meshwright.run.checkpoint.consensus import Vote
from meshwright.run.checkpoint.directories import listed
from meshwright.run.checkpoint.manifest import CheckpointError, Manifest
from meshwright.run.checkpoint.save_load import Check, Newest, believed, first_good
from meshwright.run.checkpoint.shard_io import check_sizes, check_sums, regular_status
from meshwright.run.checkpoint.write_plan import dealt

AGAIN = "start again, where every rank can read the checkpoint folder"
DIGEST = 32  # bytes of a sha256


def readers(world: World, what: str) -> Vote:
    """All ranks of `world`, about to take up a checkpoint; `what` says in an error what did not happen."""
    return Vote(world.group(AXES), world.device, what, action="RESUME", again=AGAIN)


def checked(path: Path, ranks: Vote, check: Check | None = None, step: int | None = None) -> Manifest:
    """The manifest of the checkpoint in `path`, that of `step` if one is named, once all `ranks` have found all of it whole.

    Each checks the sums of its share of the files. `check(manifest, path)` raises CheckpointError for one that does not fit
    this rank. Raises the same CheckpointError on every rank, with the faults that any of them found.
    """
    looked: list[Manifest] = []

    def look() -> bytes:
        manifest = believed(path, step, check)
        check_sizes(path, manifest.files)
        looked.append(manifest)
        return sha256(manifest.dump().encode()).digest() + _seen(path, manifest)

    told = ranks.judge("looking at a checkpoint", look)
    others = [rank for rank, line in zip(ranks.group.ranks, told, strict=True) if line[:DIGEST] != told[0][:DIGEST]]
    if others:
        what = f"ranks {others} find another checkpoint there than rank {ranks.group.ranks[0]}"
        raise CheckpointError(what, fix="give every rank the same folder, or a copy of it", where=str(path))
    (manifest,) = looked
    mine = _share(manifest, told, ranks.group.index)

    def add_up() -> bytes:
        check_sums(path, {name: manifest.files[name] for name in mine})
        return b""

    ranks.judge("reading a checkpoint", add_up)
    return manifest


def newest(folder: Path, ranks: Vote, check: Check | None = None) -> Newest:
    """As `checkpoint.newest_good`, of all `ranks` together: all of them get the same, and all pass over the same."""

    def listing() -> bytes:
        if ranks.group.index:
            return b""
        return json.dumps([(step, path.name) for step, path in listed(folder)]).encode()

    places = json.loads(ranks.judge("listing the checkpoints", listing)[0])
    found = ((step, folder / name) for step, name in places)
    return first_good(folder, found, lambda path, step: checked(path, ranks, check, step))


def _seen(path: Path, manifest: Manifest) -> bytes:
    """A digest of which files these are: the same on two ranks only if they look at the same ones."""
    found = {name: regular_status(path / name) for name in sorted(manifest.files)}
    return sha256(repr([(name, status.st_ino, status.st_ctime_ns) for name, status in found.items()]).encode()).digest()


def _share(manifest: Manifest, told: Sequence[bytes], index: int) -> tuple[str, ...]:
    """The files that the rank at `index` reads, one of those that have told that they see the same."""
    alike = [each for each, line in enumerate(told) if line == told[index]]
    return dealt({name: shard.nbytes for name, shard in manifest.files.items()}, len(alike))[alike.index(index)]
