"""Boxes of a tensor that hold a shard of it, which is a range of its flattened elements.

A shard that ends in the middle of a row is at most 2 d - 1 boxes for d dims, each contiguous in the shard:

    elements 3 to 13 of shape (4, 5)      . . . x x     one box to the end of the row
                                          x x x x x     one of full rows
                                          x x x . .     one of the begin of the next row
                                          . . . . .

A checkpoint stores a shard as such boxes, and a rank that loads a shard reads such boxes, so it reads exactly
the elements that it holds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from meshwright.plan.model_spec.param_dim_split import DimRanges

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


@dataclass(frozen=True)
class ShardBox:
    """A box of a tensor (`start`, `size`), and its position in the flat values of a shard.

    The values contain it as the window of size `size` at `window`, in the box of size `outer_size` whose
    first element is at `at`.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    at: int
    outer_size: tuple[int, ...]
    window: tuple[int, ...]


def shard_boxes(
    begin: int, end: int, shape: tuple[int, ...], spans: Sequence[DimRanges] = ()
) -> Iterator[ShardBox]:
    """Yields the boxes of a tensor of `shape` that hold elements `begin` to `end` of its slice `spans`."""
    span_of, at = {span.dim: span for span in spans}, 0
    local = tuple(span_of[dim].size if dim in span_of else n for dim, n in enumerate(shape))
    for start, size in range_boxes(begin, end, local):
        sides = [
            _windows(first, length, span_of.get(dim))
            for dim, (first, length) in enumerate(zip(start, size, strict=True))
        ]
        for side in product(*sides):
            window, first, length = (
                (tuple(each) for each in zip(*side, strict=True)) if side else ((), (), ())
            )
            yield ShardBox(first, length, at, size, window)
        at += prod(size)


def _windows(first: int, length: int, span: DimRanges | None) -> list[tuple[int, int, int]]:
    if span is None:
        return [(0, first, length)]
    found, passed = [], 0
    for begin, end in span.global_ranges(first, length):
        found.append((passed, begin, end - begin))
        passed += end - begin
    return found
