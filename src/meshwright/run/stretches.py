"""A stretch of a flattened tensor as boxes: how a shard that ends in the middle of a row is written into a checkpoint.

    elements 3 to 13 of shape (4, 5)      . . . x x     one box to the end of the row
                                          x x x x x     one of whole rows
                                          x x x . .     one of what begins the next
                                          . . . . .

At most 2 d - 1 boxes for d dims, each of them contiguous in the stretch.
"""

from collections.abc import Iterator
from math import prod

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
