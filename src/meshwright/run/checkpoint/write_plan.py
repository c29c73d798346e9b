"""Which rank writes what into a checkpoint: of what all hold alike a fair part, of what is cut its own share.

    held by all      dealt out, the largest first, each to the rank with the fewest bytes so far
    shares           every rank tells the others which stretches it has; the first that has one writes it

A share that ends in the middle of a row is written as a few boxes (run/stretches.py). Replicas of a shard, and numbers that
every piece of a weight carries (an optimizer's count of steps), are written once.

A stretch of a flattened tensor as boxes: how a shard that ends in the middle of a row is written into a checkpoint.

    elements 3 to 13 of shape (4, 5)      . . . x x     one box to the end of the row
                                          x x x x x     one of whole rows
                                          x x x . .     one of what begins the next
                                          . . . . .

At most 2 d - 1 boxes for d dims, each of them contiguous in the stretch.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import chain, product
from math import prod

import torch

from meshwright.engine.optim.state_dict import Saved, Share
from meshwright.plan.model_spec.dim_split import Span
from meshwright.run.checkpoint.manifest import Entry, Slice
from meshwright.run.checkpoint.shard_io import DTYPES, dtype_name

Box = tuple[tuple[int, ...], tuple[int, ...]]  # from which index, and how large


def boxes(begin: int, end: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """The boxes that hold the elements `begin` to `end` of a tensor of `shape`, in the order of the elements."""
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = begin // row, (end - 1) // row
    if row > 1 and (first == last or begin % row) and (begin % row or end % row):
        stop = min(end, (first + 1) * row)
        for start, size in boxes(begin - first * row, stop - first * row, shape[1:]):
            yield (first, *start), (1, *size)
        yield from boxes(stop, end, shape)
        return
    rows = (end - begin) // row
    yield (first, *(0 for _ in shape[1:])), (rows, *shape[1:])
    yield from boxes(begin + rows * row, end, shape)


Outline = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Stretch:
    """One share as its rank tells of it: elements `begin` to `end` of the flattened tensor `name`, or of its slice (`spans`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Parts:
    """What each rank of a group writes, by index: names of whole tensors, and stretches of cut ones."""

    whole: tuple[tuple[str, ...], ...]
    cut: tuple[tuple[Stretch, ...], ...]
    outline: Outline

    @classmethod
    def of(cls, tensors: Mapping[str, Saved], told: Sequence[bytes]) -> "Parts":
        """The parts of ranks that hold `tensors` as this one does and have `told` of their shares (`shares_of`), in order."""
        whole = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
        known: set[Stretch] = set()
        cut: list[tuple[Stretch, ...]] = []
        for line in told:
            rows = json.loads(line or b"[]")
            mine = [Stretch(name, tuple(shape), dtype, a, b, _spans(held)) for name, shape, dtype, held, a, b in rows]
            cut.append(tuple(stretch for stretch in mine if stretch not in known))
            known.update(mine)
        outline: Outline = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in whole.items()}
        outline |= {each.name: (each.shape, DTYPES[each.dtype]) for each in sorted(known, key=lambda each: each.name)}
        shares = dealt({name: tensor.nbytes for name, tensor in whole.items()}, len(told))
        return cls(shares, tuple(cut), outline)

    def mine(self, tensors: Mapping[str, Saved], index: int) -> dict[str, torch.Tensor]:
        """The tensors that the rank at `index` writes, by their key in its file."""
        found = {name: tensor for name in self.whole[index] if isinstance(tensor := tensors[name], torch.Tensor)}
        for stretch in self.cut[index]:
            share = tensors[stretch.name]
            if isinstance(share, Share):
                found |= {part.key: part.of(share.values) for part in _keys(stretch)}
        return found

    def entries(self, files: Sequence[str]) -> dict[str, Entry]:
        """Every entry of the manifest, `files` being those of the ranks."""
        slices: dict[str, list[Slice]] = {name: [] for name in self.outline}
        for file, names, cut in zip(files, self.whole, self.cut, strict=True):
            for name in names:
                shape = self.outline[name][0]
                slices[name].append(Slice(file, name, (0,) * len(shape), shape))
            for stretch in cut:
                slices[stretch.name] += [Slice(file, part.key, part.start, part.size) for part in _keys(stretch)]
        return {name: Entry(shape, dtype_name(dtype), tuple(slices[name])) for name, (shape, dtype) in self.outline.items()}

    def writers(self) -> tuple[int, ...]:
        """The indices of the ranks that write anything."""
        return tuple(index for index, (names, cut) in enumerate(zip(self.whole, self.cut, strict=True)) if names or cut)


def shares_of(tensors: Mapping[str, Saved]) -> bytes:
    """What this rank tells the others of its shares."""
    rows = [
        [name, list(share.shape), dtype_name(share.dtype), _told(share.spans), share.begin, share.begin + share.values.numel()]
        for name, share in tensors.items()
        if isinstance(share, Share)
    ]
    return json.dumps(rows, separators=(",", ":")).encode() if rows else b""


@dataclass(frozen=True)
class _Part:
    """A box of a tensor that lies in a share: its key in the file, its start and size, and where it is in the values.

    There it is a window of the box of size `box` whose first element is `at`.
    """

    key: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    at: int
    box: tuple[int, ...]
    window: tuple[int, ...]

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The part, of the share's flat `values`."""
        found = values[self.at : self.at + prod(self.box)].view(self.box)
        for dim, (first, length) in enumerate(zip(self.window, self.size, strict=True)):
            found = found.narrow(dim, first, length)
        return found.contiguous()


def _keys(stretch: Stretch) -> Iterator[_Part]:
    """The boxes of a stretch."""
    spans, at = {span.dim: span for span in stretch.spans}, 0
    local = tuple(spans[dim].size if dim in spans else n for dim, n in enumerate(stretch.shape))
    for start, size in boxes(stretch.begin, stretch.end, local):
        sides = [_windows(first, length, spans.get(dim)) for dim, (first, length) in enumerate(zip(start, size, strict=True))]
        for side in product(*sides):
            window, begin, length = (tuple(each) for each in zip(*side, strict=True)) if side else ((), (), ())
            where = "-".join(map(str, begin)) if spans else stretch.begin + at
            yield _Part(f"{stretch.name}@{where}", begin, length, at, size, window)
        at += prod(size)


def _windows(first: int, length: int, span: Span | None) -> list[tuple[int, int, int]]:
    """A stretch along one dim: of each part of it where it is in the stretch, where in the whole tensor, and its length."""
    if span is None:
        return [(0, first, length)]
    found, passed = [], 0
    for begin, end in span.parts(first, length):
        found.append((passed, begin, end - begin))
        passed += end - begin
    return found


def _told(spans: Sequence[Span]) -> list[list[int]]:
    """Each span as numbers: its dim, then where its ranges begin and end."""
    return [[span.dim, *chain.from_iterable(span.ranges)] for span in spans]


def _spans(told: Sequence[Sequence[int]]) -> tuple[Span, ...]:
    return tuple(Span(dim, tuple(zip(ends[::2], ends[1::2], strict=True))) for dim, *ends in told)


def dealt(nbytes: Mapping[str, int], size: int) -> tuple[tuple[str, ...], ...]:
    """The names that each of `size` ranks gets, of things of `nbytes`: largest first, each to the rank with the fewest so far."""
    loads = [(0, index) for index in range(size)]
    heapify(loads)
    shares: list[list[str]] = [[] for _ in range(size)]
    for name in sorted(nbytes, key=lambda name: (-nbytes[name], name)):
        load, index = loads[0]
        shares[index].append(name)
        heapreplace(loads, (load + nbytes[name], index))
    return tuple(map(tuple, shares))
