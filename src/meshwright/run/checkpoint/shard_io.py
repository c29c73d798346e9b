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
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from meshwright.engine.params.rank_file import load_pages
from meshwright.model.tensors.lazy_mapping import Region, narrow_to
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

    Raises OSError when the file exists, the disk is full, or the folder is missing; PlanError when a tensor
    rests on a disk that fails.
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
        if not data.is_contiguous():  # it is read as a whole, to be copied
            load_pages(data)
        flat = data.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        for chunk in flat.split(CHUNK_NBYTES):
            load_pages(chunk)
            yield chunk.numpy().data
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
            yield name, _read(folder, entry, (), files, stack)


def read_entry(folder: Path, entry: TensorEntry, region: Region = ()) -> torch.Tensor:
    """Returns the tensor of `entry` of the checkpoint in `folder`, or the part `region` of it (nothing else
    is read), likewise.
    """
    with ExitStack() as stack:
        return _read(folder, entry, region, {}, stack)


def _read(
    folder: Path, entry: TensorEntry, region: Region, files: dict[str, safe_open], stack: ExitStack
) -> torch.Tensor:
    region += tuple(map(range, entry.shape[len(region) :]))
    found = torch.empty([len(indices) for indices in region], dtype=DTYPES[entry.dtype])
    for box in entry.slices:
        overlaps = [
            range(max(indices.start, first), min(indices.stop, first + size))
            for indices, first, size in zip(region, box.start, box.shape, strict=True)
        ]
        if not all(overlaps):
            continue
        stored_region = tuple(
            slice(each.start - first, each.stop - first)
            for each, first in zip(overlaps, box.start, strict=True)
        )
        part = _slice(folder, box, found.dtype, stored_region, files, stack)
        places = zip(overlaps, region, strict=True)
        narrow_to(
            found, tuple(range(each.start - to.start, each.stop - to.start) for each, to in places)
        ).copy_(part)
    return found


def _slice(
    folder: Path,
    box: StoredSlice,
    dtype: torch.dtype,
    region: tuple[slice, ...],
    files: dict[str, safe_open],
    stack: ExitStack,
) -> torch.Tensor:
    """The part `region` of the stored tensor of `box`; its file is opened once, kept in `files`, and closed
    by `stack`.
    """
    where = str(folder / box.file)
    try:
        if box.file not in files:
            files[box.file] = stack.enter_context(safe_open(folder / box.file, framework="pt"))
        stored = files[box.file].get_slice(box.key)
        shape, tag = tuple(stored.get_shape()), stored.get_dtype()
        if shape == box.shape and tag == SAFETENSORS_TAGS[dtype]:
            return stored[region]
    except (SafetensorError, OSError) as error:
        text = f"no tensor {box.key!r} in it: {error}"
        raise CheckpointError(text, fix=DAMAGED_FIX, location=where) from error
    known = {name: dtype_name(each) for each, name in SAFETENSORS_TAGS.items()}
    needed = f"the manifest says {box.shape} {dtype_name(dtype)}"
    text = f"{box.key!r} is {shape} {known.get(tag, tag)}; {needed}"
    raise CheckpointError(text, fix=DAMAGED_FIX, location=where)
