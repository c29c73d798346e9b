"""The manifest of a checkpoint, as JSON: every tensor by its full name, the files of its slices, sizes and
checksums.

    {"format": "meshwright checkpoint", "version": 1, "step": 100,
     "entries": {"model/lm_head.weight": {"shape": [64, 8], "dtype": "float32", "slices": [
         {"file": "rank-00000.safetensors", "key": "model/lm_head.weight", "start": [0, 0], "shape": [64,
             8]}]}},
     "files": {"rank-00000.safetensors": {"nbytes": 2136, "sha256": "..."}},
     "meta": {"seed": 0, ...}, "sha256": "..."}

An *entry* is one logical tensor; its name starts with its kind: "model/..." for parameters,
"optimizer/exp_avg/..." for optimizer states. A *slice* is a box of the entry. The slices of an entry tile it
exactly, so a checkpoint does not depend on the number of ranks that wrote it. The JSON is canonical (sorted
keys, no spaces, ASCII), and the last field is the sha256 of the rest, so one flipped bit is detected.

A manifest is read like untrusted input. Everything in it is checked before use, and file names are plain
names inside the checkpoint's own folder: a path, a link, or a name that differs from another one only in
case is refused.
"""

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from meshwright.plan.job.errors import PlanError, format_nbytes
from meshwright.plan.job.file_format import CHECKPOINT
from meshwright.run.config.toml_validation import SchemaCheck

MANIFEST_FILE = "manifest.json"
ITEMSIZE = {
    **{"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}
MAX_NBYTES = 1 << 50  # of one file or tensor: 1 PiB; larger numbers are damage or malice
MAX_MANIFEST_NBYTES = 1 << 28
MAX_DIMS = 64  # torch's own limit
MAX_SLICES = (
    1 << 16
)  # of one entry; a rank has at most three boxes of a matrix, so this is enough for 20,000 of them
MAX_NAME = 1000
SHARD_FILE_PATTERN = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors"
)  # no separator, drive, "..", or hidden file fits
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")
DAMAGED_FIX = (
    "resume from another checkpoint of the run; this one is damaged, or this version of meshwright did not "
    "write it"
)

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
JsonT = TypeVar("JsonT")


class CheckpointError(PlanError):
    """A checkpoint cannot be written, or must not be read."""


@dataclass(frozen=True)
class StoredSlice:
    """A box of a tensor: from index `start`, of size `shape`; stored in `file` as the tensor `key`."""

    file: str
    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A logical tensor: its shape, its dtype (a key of `ITEMSIZE`), and the slices that tile it."""

    shape: tuple[int, ...]
    dtype: str
    slices: tuple[StoredSlice, ...]


@dataclass(frozen=True)
class ShardFile:
    """The size of a file in bytes, and its sha256 in hexadecimal."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of one checkpoint; an object that exists is consistent.

    Raises CheckpointError for names that are not plain, slices that overlap or leave gaps, sizes beyond
    reason.
    """

    step: int
    entries: dict[str, TensorEntry] = field(hash=False)
    files: dict[str, ShardFile] = field(hash=False)
    meta: dict[str, Any] = field(hash=False)

    def __post_init__(self) -> None:
        whole = 0 <= self.step <= MAX_NBYTES
        _require(whole, "step", f"{self.step} is given; needed is a whole number from 0 to 2^50")
        _check_files(self.files)
        for name, entry in self.entries.items():
            _check_entry(name, entry, self.files)
        stored = [
            (box.file, box.key, _nbytes(box.shape, entry.dtype))
            for entry in self.entries.values()
            for box in entry.slices
        ]
        _require(
            len({(file, key) for file, key, _ in stored}) == len(stored),
            "entries",
            "two slices are the same tensor of the same file",
        )
        kept = dict.fromkeys(self.files, 0)
        for file, _, nbytes in stored:
            kept[file] += nbytes
        for file, shard in self.files.items():
            _require(
                kept[file] <= shard.nbytes,
                f"files.{file}",
                f"{shard.nbytes} bytes cannot hold slices of {kept[file]} bytes",
            )

    def dump(self) -> str:
        """Returns the canonical JSON of this manifest, with its own sha256. Raises CheckpointError when
        `meta` is not plain JSON, and when the text is too long to be read back.
        """
        entries = {  # not asdict, which copies every number: 4 s for the slices of 1,024 ranks
            name: {**vars(entry), "slices": [vars(box) for box in entry.slices]}
            for name, entry in self.entries.items()
        }
        files = {name: vars(shard) for name, shard in self.files.items()}
        body: dict[str, Any] = {"step": self.step, "entries": entries, "files": files, "meta": self.meta}
        try:
            text = seal_json({**CHECKPOINT.header, **body})
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"meta is not plain JSON: {error}",
                fix="pass numbers, strings, lists and dicts",
                location="meta",
            ) from error
        num_slices = sum(len(entry.slices) for entry in self.entries.values())
        check_manifest_size(len(text), num_slices, len(self.entries))
        return text

    @classmethod
    def parse(cls, text: str) -> "Manifest":
        """Returns the manifest in `text`. Raises CheckpointError for anything else."""
        try:
            document = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
            found = checksum(document) if isinstance(document, dict) else ""
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"it is not JSON as meshwright writes it: {error}", fix=DAMAGED_FIX, location=MANIFEST_FILE
            ) from error
        try:
            body = CHECKPOINT.contents(document, MANIFEST_FILE)
        except PlanError as error:
            raise CheckpointError.from_diagnostics(error.diagnostics) from error
        _require(
            body.pop("sha256", "") == found,
            "sha256",
            "the manifest's own checksum differs: bit-flipped or edited",
        )
        return checked_json(body, cls, MANIFEST_FILE)


def checked_json(
    document: Mapping[str, Any], kind: type[JsonT], location: str, path: tuple[str, ...] = ()
) -> JsonT:
    """Returns `document`, found under the keys `path` of the file `location`, as an object of the dataclass
    `kind`, whose fields say which keys and types it has.

    Raises CheckpointError for anything else.
    """
    check = SchemaCheck(location)
    found = check.convert(document, kind, path)
    if check.diagnostics:
        problems = (
            f"{diagnostic.location.removeprefix(f'{location}: ')[:200]}: {diagnostic.problem[:500]}"
            for diagnostic in check.diagnostics[:3]
        )
        raise CheckpointError("; ".join(problems), fix=DAMAGED_FIX, location=location)
    return found


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of the checkpoint in `folder`. Raises CheckpointError when there is none or it is
    damaged.
    """
    if not stat.S_ISDIR(_status(folder).st_mode):
        raise CheckpointError(
            "it is not a folder, or a link to one; links are not followed",
            fix=DAMAGED_FIX,
            location=str(folder),
        )
    path = folder / MANIFEST_FILE
    nbytes = stat_regular_file(path).st_size
    if nbytes > MAX_MANIFEST_NBYTES:
        raise CheckpointError(
            f"{nbytes} bytes are too many for a manifest", fix=DAMAGED_FIX, location=str(path)
        )
    try:
        return Manifest.parse(path.read_bytes().decode())
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"it cannot be read: {error}", fix=DAMAGED_FIX, location=str(path)) from error


def stat_regular_file(path: Path) -> os.stat_result:
    """Returns the `stat` of the regular file `path`. Raises CheckpointError when it is missing, a link, or
    anything else.
    """
    status = _status(path)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(
            "it is a link or no regular file; neither is followed", fix=DAMAGED_FIX, location=str(path)
        )
    return status


def _status(path: Path) -> os.stat_result:
    try:
        return os.lstat(path)
    except OSError as error:
        raise CheckpointError(
            f"missing or unreachable: {error.strerror}", fix=DAMAGED_FIX, location=str(path)
        ) from error


def seal_json(body: Mapping[str, Json]) -> str:
    """Returns the canonical JSON of `body` with the field "sha256" set to the checksum of
    all other fields.
    """
    return canonical_json({**body, "sha256": checksum(body)})


def checksum(body: Mapping[str, Json]) -> str:
    """Returns the sha256 of the canonical JSON of all fields of `body` but "sha256"."""
    return sha256(
        canonical_json({key: value for key, value in body.items() if key != "sha256"}).encode()
    ).hexdigest()


def canonical_json(value: Mapping[str, Json]) -> str:
    """Returns the one JSON text of `value`. Raises TypeError or ValueError when it is not plain JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def check_manifest_size(nbytes: int, num_slices: int, num_tensors: int) -> None:
    """Raises CheckpointError if a manifest of `nbytes` is too long to be read back."""
    if nbytes > MAX_MANIFEST_NBYTES:
        what = f"a manifest of {format_nbytes(nbytes)}, of {num_slices:,} slices of {num_tensors:,}"
        what += f" tensors; {format_nbytes(MAX_MANIFEST_NBYTES)} can be read back"
        fix = "shard over fewer ranks, with copies on the others (mesh.dp_replicate)"
        raise CheckpointError(what, fix=fix, location=MANIFEST_FILE)


def check_num_slices(name: str, number: int) -> None:
    """Raises CheckpointError if the tensor `name` has too many slices."""
    text = f"{number} slices; at most {MAX_SLICES} are accepted"
    _require(number <= MAX_SLICES, f"entries.{name}", text)


def _check_files(files: Mapping[str, ShardFile]) -> None:
    seen: dict[str, str] = {}
    for name, shard in files.items():
        plain = SHARD_FILE_PATTERN.fullmatch(name) is not None
        _require(
            plain, "files", f"{name!r} is not a plain file name (letters, digits, - and _, then .safetensors)"
        )
        first_spelling = seen.setdefault(name.casefold(), name)
        _require(first_spelling == name, "files", f"{name!r} and {first_spelling!r} differ only in case")
        _require(
            0 <= shard.nbytes <= MAX_NBYTES, f"files.{name}", f"{shard.nbytes} bytes; needed are 0 to 2^50"
        )
        _require(
            SHA256_PATTERN.fullmatch(shard.sha256) is not None,
            f"files.{name}",
            f"{shard.sha256!r} is not a sha256",
        )


def _check_entry(name: str, entry: TensorEntry, files: Mapping[str, ShardFile]) -> None:
    where = f"entries.{name}"
    for text in (name, *(box.key for box in entry.slices)):
        fit = 0 < len(text) <= MAX_NAME and text.isprintable() and text != "__metadata__"
        _require(fit, where, f"{text[:80]!r} cannot name a tensor")
    _require(entry.dtype in ITEMSIZE, where, f"the dtype {entry.dtype!r} is unknown")
    _require(len(entry.shape) <= MAX_DIMS, where, f"{len(entry.shape)} dims; at most {MAX_DIMS} are possible")
    _require(
        all(0 <= size <= MAX_NBYTES for size in entry.shape), where, f"the shape {entry.shape} is impossible"
    )
    nbytes = _nbytes(entry.shape, entry.dtype)
    _require(
        nbytes <= MAX_NBYTES,
        where,
        f"the shape {entry.shape} takes {nbytes} bytes; at most 2^50 are accepted",
    )
    check_num_slices(name, len(entry.slices))
    for box in entry.slices:
        _require(box.file in files, where, f"the file {box.file!r} is not listed")
        ranks = len(box.start) == len(box.shape) == len(entry.shape)
        _require(
            ranks and all(map(_fits_inside, box.start, box.shape, entry.shape)),
            where,
            f"a slice at {box.start} of {box.shape} leaves {entry.shape}",
        )
    _require(_disjoint(entry.slices), where, "slices overlap")
    missing = prod(entry.shape) - sum(prod(box.shape) for box in entry.slices)
    _require(missing == 0, where, f"slices are missing: {missing} elements are in no file")


def _fits_inside(start: int, size: int, whole: int) -> bool:
    return start >= 0 and size >= 0 and start + size <= whole


def _disjoint(boxes: Iterable[StoredSlice]) -> bool:
    full = [box for box in boxes if prod(box.shape)]
    if len(full) < 2 or not full[0].shape:
        return len(full) < 2
    dim = max(range(len(full[0].shape)), key=lambda d: len({box.start[d] for box in full}))
    open_boxes: list[StoredSlice] = []
    for box in sorted(full, key=lambda box: box.start[dim]):
        open_boxes = [other for other in open_boxes if other.start[dim] + other.shape[dim] > box.start[dim]]
        if any(_overlap(box, other) for other in open_boxes):
            return False
        open_boxes.append(box)
    return True


def _overlap(a: StoredSlice, b: StoredSlice) -> bool:
    sides = zip(a.start, a.shape, b.start, b.shape, strict=True)
    return all(a0 < b0 + bn and b0 < a0 + an for a0, an, b0, bn in sides)


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return prod(shape) * ITEMSIZE[dtype]


def _require(true: bool, where: str, otherwise: str) -> None:
    if not true:
        raise _refusal(where, otherwise)


def _refusal(where: str, what: str) -> CheckpointError:
    return CheckpointError(what[:500], fix=DAMAGED_FIX, location=f"{MANIFEST_FILE}: {where[:200]}")


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    body = dict(pairs)
    if len(body) < len(pairs):
        raise ValueError("a key is written twice")
    return body


def _refuse_constant(word: str) -> Json:
    raise ValueError(f"{word} is not a JSON number")
