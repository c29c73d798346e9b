"""Which stretches of queries and keys kernels go through, where each query looks at some keys that are neighbours.

Query i of a rank looks at the keys low[i] up to high[i] of a block that comes by, as they lie there. Runs of queries whose bounds
rise alike are known forms:

    low, high        stand still         high rises by 1           both rise by 1           low rises by 1
                     # # # #             # # #                     # # # .                  # # # #
                     # # # #             # # # #                   . # # #                  . # # #
    kernels          one, no mask        one for what all see,     tiles of rows, with      tiles of rows, with
                                         one causal                a mask each              a mask each
    from             documents, prefix   causal masks              windows                  ends of windows

What is masked whole is in no tile. A call of a kernel costs time of its own, as much as `call` pairs of a query and a key, and a
pair under a mask MASKED others: neighbours go together where that is less, so short documents share a call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np

from meshwright.core.tokens import Span
from meshwright.strategies.sequence.circle import Kind

CALL = 1 << 10  # pairs of a query and a key that take as long as the way into a kernel: of a CPU
FAR = 1 << 16  # the same, of a device that computes a hundred times as fast
MASKED = 2  # pairs that cost as much as one under a mask, which is made for it
FORMS = ((0, 0), (0, 1), (1, 1), (1, 0))  # by how much low and high rise from query to query


@dataclass(frozen=True)
class Region:
    """Rows and keys that a kernel goes through; `some`: with a mask."""

    rows: Span
    keys: Span
    kind: Kind

    @property
    def pairs(self) -> int:
        """What it costs in pairs, but for the call."""
        rows, keys = self.rows[1] - self.rows[0], self.keys[1] - self.keys[0]
        if self.kind == "causal":
            return rows * (rows + 1) // 2
        return rows * keys * (MASKED if self.kind == "some" else 1)


def regions(low: np.ndarray, high: np.ndarray, call: int = CALL, cut: int = 0) -> list[Region]:
    """The regions that hold all that queries look at, in order of rows; what begins at row `cut` is apart from what ends there.

    `low` and `high` are [queries], int; low is at most high, and where they are equal a query looks at nothing.
    """
    found = list[tuple[Region, ...]]()  # those of the same rows are together
    for begin, end in _runs(low, high, cut):
        for piece in _pieces(low, high, begin, end, call):
            while found and (joined := _joined(found[-1], piece, call)) is not None:
                piece = joined
                found.pop()
            found.append(piece)
    return [region for piece in found for region in piece]


def cost(some: Sequence[Region], call: int) -> int:
    """What they cost, in pairs."""
    return sum(region.pairs + call for region in some)


def _runs(low: np.ndarray, high: np.ndarray, cut: int) -> Iterator[Span]:
    """Stretches of queries that look at something, along which bounds rise by one of FORMS."""
    lows, highs = np.diff(low), np.diff(high)
    ends = np.flatnonzero((np.diff(lows) != 0) | (np.diff(highs) != 0)) + 1  # the last query of a run, counted on
    stops = [*ends.tolist(), len(low) - 1]
    begin, number = 0, 0
    while begin < len(low):
        while stops[number] <= begin and number + 1 < len(stops):
            number += 1
        end = begin + 1
        if begin < len(lows) and (lows[begin], highs[begin]) in FORMS:
            end = stops[number] + 1
        if begin < cut < end:
            end = cut
        seen = np.flatnonzero(high[begin:end] > low[begin:end])
        if len(seen):
            yield begin + int(seen[0]), begin + int(seen[-1]) + 1
        begin = end


def _pieces(low: np.ndarray, high: np.ndarray, begin: int, end: int, call: int) -> Iterator[tuple[Region, ...]]:
    """What kernels go through for the queries of a run, in parts that have rows of their own."""
    rows, first, last = (begin, end), int(low[begin]), int(high[begin])
    rises = (int(low[end - 1]) > first, int(high[end - 1]) > last)
    if rises == (False, False):
        yield (Region(rows, (first, last), "all"),)
    elif rises == (False, True):
        through = Region(rows, (last - 1, last - 1 + end - begin), "causal")
        apart = (Region(rows, (first, last - 1), "all"), through) if last - 1 > first else (through,)
        whole = (Region(rows, (first, int(high[end - 1])), "some"),)
        yield min(apart, whole, key=lambda some: cost(some, call))
    else:
        step = max(1, isqrt(call))
        for at in range(begin, end, step):
            behind = min(at + step, end)
            yield (Region((at, behind), (int(low[at]), int(high[behind - 1])), "some"),)


def _joined(above: tuple[Region, ...], below: tuple[Region, ...], call: int) -> tuple[Region, ...] | None:
    """One region for the rows of both, where that costs less than both, and no more for each row than `above`."""
    parts = (*above, *below)
    rows = above[0].rows[0], below[-1].rows[1]
    keys = min(region.keys[0] for region in parts), max(region.keys[1] for region in parts)
    whole = (Region(rows, keys, "some"),)
    each = cost(above, call) * (rows[1] - rows[0]) / (above[0].rows[1] - above[0].rows[0])
    return whole if cost(whole, call) < min(cost(parts, call), each) else None
