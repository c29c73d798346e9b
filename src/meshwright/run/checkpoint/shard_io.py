"""One file of a checkpoint: tensors in the safetensors format, written in chunks and read slice by slice.

The library's own writer needs the bytes of a whole file at once, refuses views that share memory, and leaves
the checksum to a second pass. Parameters here are often views into one flat parameter, and a state may fill
most of the memory. So this module writes the file itself; the format is small:

    8 bytes: length of the header | header: JSON {name: {dtype, shape, data_offsets}} | the bytes of all
        tensors, no gaps

Tensors are written one at a time, wide dtypes first (so that each starts at a multiple of its item size), in
chunks that are hashed as they are written. Of a view only its own elements are written. Memory: none for a
contiguous tensor on the CPU, one tensor for any other. Reading goes through the library, one slice at a time
into a tensor of its own, so nothing stays mapped to a file that may be pruned later.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from meshwright.run.checkpoint.manifest import (
    DAMAGED_FIX,
    CheckpointError,
    ShardFile,
    StoredSlice,
    TensorEntry,
)

CHUNK_NBYTES = 1 << 22  # bytes hashed and written at a time
SAFETENSORS_TAGS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_TAGS}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the dtype as a manifest writes it, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> ShardFile:
    """Writes `tensors` to the new file `path`, durably on disk on return; returns its size and sha256.

    Raises OSError when the file exists, the disk is full, or the folder is missing.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, dict[str, str] | dict[str, str | list[int]]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": SAFETENSORS_TAGS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, nbytes = sha256(), 0
    with path.open("xb", buffering=0) as file:
        for data in (len(text).to_bytes(8, "little"), text, *(tensors[name] for name in order)):
            for piece in _pieces(data):
                digest.update(piece)
                nbytes += write_all_bytes(file.fileno(), piece)
        os.fsync(file.fileno())
    return ShardFile(nbytes, digest.hexdigest())


def write_all_bytes(descriptor: int, data: memoryview) -> int:
    """Writes all of `data`, however little the system accepts at a time; returns the number of bytes."""
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done:])
    return done


def _pieces(data: bytes | torch.Tensor) -> Iterator[memoryview]:
    if isinstance(data, torch.Tensor):
        flat = data.detach().to("cpu").contiguous().reshape(-1)
        view = flat.view(torch.uint8).numpy().data
    else:
        view = memoryview(data)
    for start in range(0, len(view), CHUNK_NBYTES):
        yield view[start : start + CHUNK_NBYTES]


def read_entries(folder: Path, entries: Mapping[str, TensorEntry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each of `entries` with its tensor, on the CPU and in memory of its own, one at a time;
    checksums are not verified.

    Raises CheckpointError when a file does not match its manifest.
    """
    with ExitStack() as stack:
        files: dict[str, safe_open] = {}
        for name, entry in entries.items():
            whole = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            for box in entry.slices:
                _place(whole, _slice(folder, box, files, stack), box, where=str(folder / box.file))
            yield name, whole


def read_entry(folder: Path, name: str, entry: TensorEntry, rows: range | None = None) -> torch.Tensor:
    """Returns the tensor `name` of the checkpoint in `folder`, or its `rows` along dim 0 (nothing else is
    read), likewise.
    """
    if rows is None:
        return next(tensor for _, tensor in read_entries(folder, {name: entry}))
    some = torch.empty((len(rows), *entry.shape[1:]), dtype=DTYPES[entry.dtype])
    with ExitStack() as stack:
        files: dict[str, safe_open] = {}
        for box in entry.slices:
            low, high = max(rows.start, box.start[0]), min(rows.stop, box.start[0] + box.shape[0])
            if low < high:
                mine = range(low - box.start[0], high - box.start[0])
                found = replace(
                    box, start=(low - rows.start, *box.start[1:]), shape=(high - low, *box.shape[1:])
                )
                _place(some, _slice(folder, box, files, stack, mine), found, where=str(folder / box.file))
    return some


def _slice(
    folder: Path, box: StoredSlice, files: dict[str, safe_open], stack: ExitStack, rows: range | None = None
) -> torch.Tensor:
    """The stored tensor of `box`, or `rows` of it; its file is opened once, kept in `files`, and closed by
    `stack`.
    """
    try:
        if box.file not in files:
            files[box.file] = stack.enter_context(safe_open(folder / box.file, framework="pt"))
        if rows is None:
            return files[box.file].get_tensor(box.key)
        return files[box.file].get_slice(box.key)[rows.start : rows.stop]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"no tensor {box.key!r} in it: {error}", fix=DAMAGED_FIX, location=str(folder / box.file)
        ) from error


def _place(whole: torch.Tensor, part: torch.Tensor, box: StoredSlice, where: str) -> None:
    if tuple(part.shape) != box.shape or part.dtype != whole.dtype:
        needed = f"the manifest says {box.shape} {dtype_name(whole.dtype)}"
        raise CheckpointError(
            f"{box.key!r} is {tuple(part.shape)} {dtype_name(part.dtype)}; {needed}",
            fix=DAMAGED_FIX,
            location=where,
        )
    target = whole
    for dim, (start, size) in enumerate(zip(box.start, box.shape, strict=True)):
        target = target.narrow(dim, start, size)
    target.copy_(part)
