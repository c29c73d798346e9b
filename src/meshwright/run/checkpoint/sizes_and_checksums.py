"""Checks the files of a checkpoint against its manifest: sizes, and the sha256 of every file."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from meshwright.run.checkpoint.manifest import DAMAGED_FIX, CheckpointError, ShardFile, stat_regular_file
from meshwright.run.checkpoint.shard_io import CHUNK_NBYTES


def check_sizes(folder: Path, files: Mapping[str, ShardFile]) -> None:
    """Raises CheckpointError unless every one of `files` is in `folder`, a regular file, and of the right
    size.
    """
    for name, shard in files.items():
        nbytes = stat_regular_file(folder / name).st_size
        if nbytes != shard.nbytes:
            word = "truncated" if nbytes < shard.nbytes else "too long"
            raise CheckpointError(
                f"{word}: {nbytes} bytes of {shard.nbytes}", fix=DAMAGED_FIX, location=str(folder / name)
            )


def check_checksums(folder: Path, files: Mapping[str, ShardFile]) -> None:
    """Raises CheckpointError unless every one of `files` has the right size and sha256; reads the whole
    files.
    """
    check_sizes(folder, files)
    for name, shard in files.items():
        digest = sha256()
        try:
            with (folder / name).open("rb") as file:
                while piece := file.read(CHUNK_NBYTES):
                    digest.update(piece)
        except OSError as error:
            raise CheckpointError(
                f"it cannot be read: {error}", fix=DAMAGED_FIX, location=str(folder / name)
            ) from error
        if digest.hexdigest() != shard.sha256:
            raise CheckpointError(
                "bit-flipped: its checksum differs from the manifest's",
                fix=DAMAGED_FIX,
                location=str(folder / name),
            )
