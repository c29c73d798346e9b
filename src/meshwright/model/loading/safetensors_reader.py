"""Reads tensors from safetensors files: finds each tensor from the headers, and reads its bytes by offset.

    8 bytes: length of the header | header: JSON {name: {dtype, shape, data_offsets}} | bytes of all tensors

`list_tensors` reads headers only, so a model of 100 GB takes milliseconds. A header is untrusted input: every
number is checked against the size of its file. `read_tensor` reads chunk by chunk into the result, in its
dtype and on its device; nothing is memory-mapped, and at most one chunk is held besides the result.

A folder is read as transformers reads it: model.safetensors, or the files that model.safetensors.index.json
names. Format: https://github.com/huggingface/safetensors (little-endian, row-major).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics

WEIGHTS_KEY = "model.weights"
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
SHARD_FILE = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
PLAIN_FILE_NAME = re.compile(
    r"[A-Za-z0-9][\w.-]{0,199}"
)  # excludes separators, drives, ".." and hidden files
MAX_HEADER = 100_000_000  # bytes, the format's own limit
READ_NBYTES = 1 << 24  # bytes read at a time
DIGEST_NBYTES = 64  # bytes of each tensor that go into the digest
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
}
DOWNLOAD_FIX = "download or write the file again"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: its dtype, its shape, and the byte at which it begins."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin_byte: int

    @property
    def nbytes(self) -> int:
        """The bytes it takes in the file."""
        return prod(self.shape) * self.dtype.itemsize


def list_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns every tensor in `path` (a safetensors file, or a folder of them), by its stored name.

    Raises PlanError, for all files at once, if one is missing, damaged, or has a name that another has too.
    """
    files, listed = _find_files(path)
    found: dict[str, StoredTensor] = {}
    diagnostics: list[Diagnostic] = []
    for file in files:
        try:
            tensors = read_header(file)
        except PlanError as error:
            diagnostics += error.diagnostics
            continue
        twice = sorted(found.keys() & tensors)
        if twice:
            text = f"{file.name} has {len(twice)} tensors that another file has too: {format_names(twice)}"
            diagnostics.append(Diagnostic(text, "keep one of the files", WEIGHTS_KEY))
        found |= tensors
    absent = sorted(name for name, file in listed.items() if file in files and name not in found)
    if absent and not diagnostics:
        text = f"{INDEX_FILE} names {len(absent)} tensors that its files do not have: {format_names(absent)}"
        diagnostics.append(Diagnostic(text, "download the index and the files of one version", WEIGHTS_KEY))
    raise_diagnostics(diagnostics)
    return found


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Returns the tensors in the header of `file`. Raises PlanError for a file that violates the format."""
    try:
        nbytes = file.stat().st_size
        with file.open("rb") as opened:
            first = opened.read(8)
            length = int.from_bytes(first, "little")
            fits = len(first) == 8 and length <= min(MAX_HEADER, nbytes - 8)
            text = opened.read(length) if fits else b""
        header = json.loads(text) if fits else None
    except (OSError, ValueError) as error:
        raise PlanError(f"{file} cannot be read: {error}", fix=DOWNLOAD_FIX, location=WEIGHTS_KEY) from error
    if first == b"version ":
        fix = "fetch the file itself: git lfs pull"
        raise PlanError(f"{file} is a pointer of git-lfs, not the file", fix=fix, location=WEIGHTS_KEY)
    if not isinstance(header, dict):
        raise PlanError(
            f"{file} is not a safetensors file, or ends early", fix=DOWNLOAD_FIX, location=WEIGHTS_KEY
        )
    begin = 8 + length
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: _parse_entry(file, name, entry, begin, nbytes - begin) for name, entry in entries.items()}


def read_tensor(
    stored: StoredTensor, dtype: torch.dtype, device: torch.device | str = "cpu", rows: range | None = None
) -> torch.Tensor:
    """Returns the tensor of `stored`, or only its `rows` along dim 0, in `dtype` on `device`.

    READ_NBYTES bytes are held besides it. Raises PlanError if the file ends before the tensor does.
    """
    rows = range(stored.shape[0]) if rows is None and stored.shape else rows
    shape = stored.shape if rows is None else (len(rows), *stored.shape[1:])
    result = torch.empty(shape, dtype=dtype, device=device)
    flat, width = result.view(-1), stored.dtype.itemsize
    first = 0 if rows is None else rows.start * prod(stored.shape[1:])
    done = 0
    with stored.file.open("rb", buffering=0) as file:
        for chunk in _read_pieces(file, stored.begin_byte + first * width, flat.numel() * width, stored.file):
            part = torch.frombuffer(chunk, dtype=stored.dtype)
            flat[done : done + len(part)].copy_(part)
            done += len(part)
    return result


def equal_tensors(one: StoredTensor, other: StoredTensor) -> bool:
    """Returns whether two stored tensors are bitwise equal."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb", buffering=0) as a, other.file.open("rb", buffering=0) as b:
        pairs = zip(
            _read_pieces(a, one.begin_byte, one.nbytes, one.file),
            _read_pieces(b, other.begin_byte, other.nbytes, other.file),
            strict=True,
        )
        return all(one_chunk == other_chunk for one_chunk, other_chunk in pairs)


def weights_digest(tensors: Mapping[str, StoredTensor]) -> str:
    """Returns 64 hex digits that identify the contents: names, dtypes, shapes, and a sample of each tensor.

    The sample is DIGEST_NBYTES bytes from its middle. Two models of one architecture differ there; hashing
    all bytes would take as long as loading.
    """
    hasher = sha256()
    for name in sorted(tensors, key=lambda name: (str(tensors[name].file), tensors[name].begin_byte, name)):
        stored = tensors[name]
        hasher.update(f"{name} {stored.dtype} {stored.shape}\n".encode())
        middle = stored.nbytes // 2
        with stored.file.open("rb", buffering=0) as file:
            file.seek(stored.begin_byte + middle)
            hasher.update(file.read(min(DIGEST_NBYTES, stored.nbytes - middle)))
    return hasher.hexdigest()


def format_names(names: Iterable[str], max_names: int = 8) -> str:
    """Returns `names` as text, cut after `max_names`."""
    names = list(names)
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more


def _read_pieces(file: BinaryIO, start: int, nbytes: int, path: Path) -> Iterator[bytearray]:
    file.seek(start)
    chunk = bytearray(min(READ_NBYTES, nbytes))
    for begin in range(0, nbytes, READ_NBYTES):
        if nbytes - begin < len(chunk):
            chunk = bytearray(nbytes - begin)
        done, view = 0, memoryview(chunk)
        while done < len(chunk):
            count = file.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise PlanError(f"{path} ends early", fix=DOWNLOAD_FIX, location=WEIGHTS_KEY)
            done += count
        yield chunk


def _parse_entry(file: Path, name: str, entry: Any, begin: int, available: int) -> StoredTensor:
    def refuse(what: str) -> PlanError:
        return PlanError(f"{file}: the tensor {name[:200]!r} {what}", fix=DOWNLOAD_FIX, location=WEIGHTS_KEY)

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise refuse("has no dtype, shape and offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _is_size_list(shape) or not _is_size_list(offsets) or len(offsets) != 2:
        raise refuse("has a shape or offsets that are not integers")
    if entry["dtype"] not in DTYPES:
        fix = f"store it as one of {', '.join(DTYPES)}; packed and quantized weights must be unpacked first"
        raise PlanError(
            f"{file}: the tensor {name[:200]!r} is of dtype {str(entry['dtype'])[:50]}",
            fix=fix,
            location=WEIGHTS_KEY,
        )
    dtype = DTYPES[entry["dtype"]]
    if offsets[1] - offsets[0] != prod(shape) * dtype.itemsize or offsets[1] > available:
        raise refuse(f"of shape {shape} does not fit into the bytes {offsets} of {available}")
    return StoredTensor(file, dtype, tuple(shape), begin + offsets[0])


def _is_size_list(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 60 for size in value)


def _find_files(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files to read, and, with an index, the file in which the index says each tensor is."""
    if path.is_file():
        if path.suffix == ".safetensors":
            return [path], {}
        raise _no_weights_error(path, [path.name] if path.suffix in (".bin", ".pt", ".pth") else [])
    if not path.is_dir():
        fix = "give a folder with safetensors, a .safetensors file, or a hub id (ORG/NAME)"
        raise PlanError(f"there is no folder {path}", fix=fix, location=WEIGHTS_KEY)
    if (path / INDEX_FILE).is_file():
        return _files_of_index(path)
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE], {}
    numbered = {
        found.name: match
        for found in sorted(path.glob("*.safetensors"))
        if (match := SHARD_FILE.fullmatch(found.name))
    }
    if numbered:
        total = int(next(iter(numbered.values()))[2])
        wanted = [f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
        _refuse_absent([name for name in wanted if name not in numbered], path)
        return [path / name for name in wanted], {}
    others = sorted(found.name for found in path.glob("*.safetensors"))
    if len(others) == 1:
        return [path / others[0]], {}
    raise _no_weights_error(
        path, sorted(found.name for kind in ("*.bin", "*.pt", "*.pth") for found in path.glob(kind))
    )


def _files_of_index(path: Path) -> tuple[list[Path], dict[str, Path]]:
    try:
        index = json.loads((path / INDEX_FILE).read_text(encoding="utf-8"))
        listed = index["weight_map"].items() if isinstance(index, dict) else ()
        names = {
            name: file for name, file in listed if isinstance(file, str) and PLAIN_FILE_NAME.fullmatch(file)
        }
        if len(names) < len(listed) or not names:
            raise ValueError("its weight_map must give a plain file name for each tensor")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise PlanError(
            f"{path / INDEX_FILE} cannot be read: {error}", fix=DOWNLOAD_FIX, location=WEIGHTS_KEY
        ) from error
    files = sorted(set(names.values()))
    _refuse_absent([name for name in files if not (path / name).is_file()], path)
    return [path / name for name in files], {name: path / file for name, file in names.items()}


def _refuse_absent(absent: list[str], path: Path) -> None:
    if absent:
        text = f"{len(absent)} files of the weights are not in {path}: {format_names(absent)}"
        raise PlanError(text, fix="download them too, into the same folder", location=WEIGHTS_KEY)


def _no_weights_error(path: Path, pickles: list[str]) -> PlanError:
    if pickles:
        text = (
            f"{path} holds no safetensors, but {format_names(pickles)}: a pickle, which can run code when it "
            "is read"
        )
        return PlanError(
            text,
            fix=f"convert it first: meshwright convert {pickles[0]} model.safetensors",
            location=WEIGHTS_KEY,
        )
    return PlanError(
        f"{path} holds no {SINGLE_FILE} and no {INDEX_FILE}",
        fix="give the folder that holds the weights",
        location=WEIGHTS_KEY,
    )
