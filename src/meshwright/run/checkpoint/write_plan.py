"""The write plan of a checkpoint: which rank writes which part of which tensor.

    replicated tensors    distributed, the largest first, each to the rank with the fewest bytes so far
    shards                every rank lists the ranges that it has; the first rank that has one writes it

A shard that ends in the middle of a row is written as boxes, at most 2 d - 1 of them for d dims, each
contiguous in the shard:

    elements 3 to 13 of shape (4, 5)      . . . x x     one box to the end of the row
                                          x x x x x     one of full rows
                                          x x x . .     one of the begin of the next row
                                          . . . . .

Replicas of a shard are written once, and so are values that every piece of a parameter has, such as an
optimizer's step count.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import chain, product
from math import prod

import torch

from meshwright.engine.optim.sharded_state_dict import SavedTensor, TensorShard
from meshwright.plan.model_spec.param_dim_split import DimRanges
from meshwright.run.checkpoint.manifest import StoredSlice, TensorEntry
from meshwright.run.checkpoint.shard_io import DTYPES, dtype_name

Box = tuple[tuple[int, ...], tuple[int, ...]]  # from which index, and how large


def range_boxes(begin: int, end: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Yields (start, size) of the boxes that hold elements `begin` to `end` of a tensor of `shape`, in
    element order.
    """
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = begin // row, (end - 1) // row
    if row > 1 and (first == last or begin % row) and (begin % row or end % row):
        stop = min(end, (first + 1) * row)
        for start, size in range_boxes(begin - first * row, stop - first * row, shape[1:]):
            yield (first, *start), (1, *size)
        yield from range_boxes(stop, end, shape)
        return
    rows = (end - begin) // row
    yield (first, *(0 for _ in shape[1:])), (rows, *shape[1:])
    yield from range_boxes(begin + rows * row, end, shape)


TensorOutline = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class ShardRange:
    """A shard as its rank lists it: elements `begin` to `end` of the flattened tensor `name`, or of its
    slice (`spans`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int
    spans: tuple[DimRanges, ...] = ()


@dataclass(frozen=True)
class WritePlan:
    """The data that each rank of a group writes, by index: names of replicated tensors, and ranges of sharded
    ones.
    """

    full_tensors: tuple[tuple[str, ...], ...]
    shard_ranges: tuple[tuple[ShardRange, ...], ...]
    outline: TensorOutline

    @classmethod
    def from_ranks(cls, tensors: Mapping[str, SavedTensor], listings: Sequence[bytes]) -> "WritePlan":
        """Returns the plan of ranks that have `tensors` like this one and whose shards are `listings`
        (`list_shards`), in rank order.
        """
        whole = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
        all_ranges: set[ShardRange] = set()
        cut: list[tuple[ShardRange, ...]] = []
        for line in listings:
            rows = json.loads(line or b"[]")
            mine = [
                ShardRange(name, tuple(shape), dtype, a, b, _parse_spans(spans))
                for name, shape, dtype, spans, a, b in rows
            ]
            cut.append(tuple(stretch for stretch in mine if stretch not in all_ranges))
            all_ranges.update(mine)
        outline: TensorOutline = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in whole.items()}
        outline |= {
            each.name: (each.shape, DTYPES[each.dtype])
            for each in sorted(all_ranges, key=lambda each: each.name)
        }
        shares = balance_by_size({name: tensor.nbytes for name, tensor in whole.items()}, len(listings))
        return cls(shares, tuple(cut), outline)

    def local_tensors(self, tensors: Mapping[str, SavedTensor], index: int) -> dict[str, torch.Tensor]:
        """Returns the tensors that the rank at `index` writes, by their key in its file."""
        found = {
            name: tensor
            for name in self.full_tensors[index]
            if isinstance(tensor := tensors[name], torch.Tensor)
        }
        for stretch in self.shard_ranges[index]:
            share = tensors[stretch.name]
            if isinstance(share, TensorShard):
                found |= {part.key: part.slice_values(share.values) for part in _keys(stretch)}
        return found

    def entries(self, files: Sequence[str]) -> dict[str, TensorEntry]:
        """Returns every entry of the manifest; `files` are the files of the ranks."""
        slices: dict[str, list[StoredSlice]] = {name: [] for name in self.outline}
        for file, names, cut in zip(files, self.full_tensors, self.shard_ranges, strict=True):
            for name in names:
                shape = self.outline[name][0]
                slices[name].append(StoredSlice(file, name, (0,) * len(shape), shape))
            for stretch in cut:
                slices[stretch.name] += [
                    StoredSlice(file, part.key, part.start, part.size) for part in _keys(stretch)
                ]
        return {
            name: TensorEntry(shape, dtype_name(dtype), tuple(slices[name]))
            for name, (shape, dtype) in self.outline.items()
        }

    def writer_indices(self) -> tuple[int, ...]:
        """Returns the indices of the ranks that write anything."""
        return tuple(
            index
            for index, (names, cut) in enumerate(zip(self.full_tensors, self.shard_ranges, strict=True))
            if names or cut
        )


def list_shards(tensors: Mapping[str, SavedTensor]) -> bytes:
    """Returns the list of this rank's shards, as JSON, for the other ranks."""
    rows = [
        [
            name,
            list(share.shape),
            dtype_name(share.dtype),
            _span_lists(share.spans),
            share.start,
            share.start + share.values.numel(),
        ]
        for name, share in tensors.items()
        if isinstance(share, TensorShard)
    ]
    return json.dumps(rows, separators=(",", ":")).encode() if rows else b""


@dataclass(frozen=True)
class _StoredBox:
    """A box of a tensor inside a shard: its key in the file, its start and size, and its position in the
    shard's values.

    The values contain it as a window of the box of size `box` whose first element is at `at`.
    """

    key: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    at: int
    box: tuple[int, ...]
    window: tuple[int, ...]

    def slice_values(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the box, cut out of the shard's flat `values`."""
        found = values[self.at : self.at + prod(self.box)].view(self.box)
        for dim, (first, length) in enumerate(zip(self.window, self.size, strict=True)):
            found = found.narrow(dim, first, length)
        return found.contiguous()


def _keys(stretch: ShardRange) -> Iterator[_StoredBox]:
    spans, at = {span.dim: span for span in stretch.spans}, 0
    local = tuple(spans[dim].size if dim in spans else n for dim, n in enumerate(stretch.shape))
    for start, size in range_boxes(stretch.begin, stretch.end, local):
        sides = [
            _windows(first, length, spans.get(dim))
            for dim, (first, length) in enumerate(zip(start, size, strict=True))
        ]
        for side in product(*sides):
            window, begin, length = (
                (tuple(each) for each in zip(*side, strict=True)) if side else ((), (), ())
            )
            where = "-".join(map(str, begin)) if spans else stretch.begin + at
            yield _StoredBox(f"{stretch.name}@{where}", begin, length, at, size, window)
        at += prod(size)


def _windows(first: int, length: int, span: DimRanges | None) -> list[tuple[int, int, int]]:
    if span is None:
        return [(0, first, length)]
    found, passed = [], 0
    for begin, end in span.global_ranges(first, length):
        found.append((passed, begin, end - begin))
        passed += end - begin
    return found


def _span_lists(spans: Sequence[DimRanges]) -> list[list[int]]:
    return [[span.dim, *chain.from_iterable(span.ranges)] for span in spans]


def _parse_spans(lists: Sequence[Sequence[int]]) -> tuple[DimRanges, ...]:
    return tuple(DimRanges(dim, tuple(zip(ends[::2], ends[1::2], strict=True))) for dim, *ends in lists)


def balance_by_size(nbytes: Mapping[str, int], size: int) -> tuple[tuple[str, ...], ...]:
    """Distributes named things of `nbytes` over `size` ranks: the largest first, each to the rank with the
    fewest bytes so far.
    """
    loads = [(0, index) for index in range(size)]
    heapify(loads)
    shares: list[list[str]] = [[] for _ in range(size)]
    for name in sorted(nbytes, key=lambda name: (-nbytes[name], name)):
        load, index = loads[0]
        shares[index].append(name)
        heapreplace(loads, (load + nbytes[name], index))
    return tuple(map(tuple, shares))
