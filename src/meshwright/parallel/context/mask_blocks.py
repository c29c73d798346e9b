"""What the queries of a rank look at: some keys that are neighbours, by a rule or as a mask says; or whatever a mask says.

    neighbours    every query looks at keys from one position up to another: no mask, causal, a window, packed documents, padding
                  at one end, a prefix. Two numbers per query; whoever has those needs no mask, and computes little that is masked
    otherwise     a bias, a mask by head, holes: the mask itself, in parts of which those are left out that it leaves nothing of

Masks come as tensors, made by the model. Whether one is of the first kind, a look at each of its elements tells, once for all
layers that are handed the same.

Which stretches of queries and keys kernels go through, where each query looks at some keys that are neighbours.

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

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.model.tensors.token_slices import cut
from meshwright.parallel.context.attention_inputs import Circle, Kind, Pair, View
from meshwright.parallel.context.attention_kernel import NEVER
from meshwright.plan.model_spec.sequence_info import Span, within

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


AT_ONCE = 1 << 21  # elements of a mask that are looked at together
FAR_BELOW = torch.finfo(torch.float16).min  # what is added to hide a key: exp of it is 0, however large scores are
DEEP = 1024.0  # a row of a mask that is further from 0 everywhere leaves lse too few digits
PARTS = 4  # of a rank's tokens, where they do not come in chunks
KEPT = 4  # lengths, and masks, that are remembered


@dataclass(frozen=True)
class Bounds:
    """The positions of keys from `first` up to `last` that each query looks at, [samples or 1, queries]; alike: none."""

    first: np.ndarray
    last: np.ndarray

    @classmethod
    def by_rule(cls, circle: Circle) -> "Bounds":
        """Without a mask."""
        count = len(circle.asked)
        keys = sum(circle.counts)
        last = circle.asked + 1 if circle.causal else np.full(count, keys)
        return cls(np.zeros((1, count), np.int64), last.reshape(1, count))

    @classmethod
    def of(cls, mask: torch.Tensor, queries: int) -> "Bounds | None":
        """Those that `mask`, [samples or 1, heads or 1, queries or 1, keys], leaves; None where that is not all it says."""
        if mask.requires_grad or isinstance(mask, FakeTensor) or mask.shape[1] != 1 or not mask.numel():
            return None
        each, step = mask.shape[0] * mask.shape[3], mask.shape[2]
        found = [_bounds(part) for part in mask[:, 0].split(max(1, min(step, AT_ONCE // each)), 1)]
        told = torch.cat(found, 2).cpu().numpy()
        return cls(*(np.broadcast_to(part, (mask.shape[0], queries)) for part in told[:2])) if told[2].all() else None

    def groups(self) -> list[Span | None]:
        """Samples that are neighbours and alike; None: all are."""
        told = np.concatenate((self.first, self.last), 1)
        starts = [0, *(np.flatnonzero((told[1:] != told[:-1]).any(1)) + 1).tolist(), len(told)]
        return [None] if len(starts) == 2 else list(pairwise(starts))


def _bounds(mask: torch.Tensor) -> torch.Tensor:
    """Of a mask [samples, queries, keys] the first and the last bound of each query, and whether they say all: int64."""
    certain = torch.ones((), dtype=torch.bool, device=mask.device)
    if mask.dtype != torch.bool:
        free, deep = mask == 0, mask > NEVER
        seen = free.any(-1, keepdim=True)  # of a row without a key that is free, one device makes a mean
        certain = (free | ((mask <= FAR_BELOW) & (seen | ~deep))).all(-1)
        mask = free
    first, behind = (each.contiguous().view(torch.uint8).argmax(-1, keepdim=True) for each in (mask, mask.flip(-1)))
    last = torch.where(mask.gather(-1, first), mask.shape[-1] - behind, 0)  # of a query that looks at nothing: 0 and 0
    at = torch.arange(mask.shape[-1], device=mask.device, dtype=torch.int32)
    said = (at >= first.int()) & (at < last.int())
    certain = certain & ~(said ^ mask).any(-1)  # a sum would take five times as long
    return torch.stack((first.squeeze(-1), last.squeeze(-1), certain.long()))


class Neighbours:
    """A view of `circle` within `bounds`."""

    def __init__(self, circle: Circle, bounds: Bounds, call: int) -> None:
        self._circle, self._bounds, self._call = circle, bounds, call
        self._groups = bounds.groups()
        self._pairs: dict[int, list[Pair]] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def pairs(self, rank: int) -> list[Pair]:
        """What is computed of this rank's queries and the keys of `rank`."""
        if rank not in self._pairs:
            self._pairs[rank] = self._made(rank)
        return self._pairs[rank]

    def mask(self, rank: int, pair: Pair, whole: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        """[samples or 1, 1, rows, keys]: which keys lie within the bounds."""
        if pair.kind != "some":
            return None
        if rank not in self._tensors:
            self._tensors[rank] = torch.tensor(np.stack(self._here(rank)), device=device)
        low, high = self._tensors[rank][:, slice(*(pair.samples or (None,))), slice(*pair.rows), None]
        at = torch.arange(*pair.keys, device=device)
        return ((at >= low) & (at < high)).unsqueeze(1)

    def above(self, rows: Span) -> torch.Tensor | None:
        """Nothing is added to what a query looks at."""
        return None

    def put(self, rank: int, pair: Pair, part: torch.Tensor, into: torch.Tensor) -> None:
        """Bounds have no gradient."""
        raise RuntimeError("the gradient of a mask that was taken as a rule")

    def _here(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """The bounds among the keys of `rank`, counted there."""
        low, high = (np.searchsorted(self._circle.places[rank], each) for each in (self._bounds.first, self._bounds.last))
        return low, np.maximum(low, high)

    def _made(self, rank: int) -> list[Pair]:
        (low, high), call = self._here(rank), self._call
        half = low.shape[1] // 2 if rank == self._circle.index and len(self._circle.keys) > 1 else 0
        if self._groups == [None]:
            found = regions(low[0], high[0], call // len(low) or 1, half)
            return [Pair(each.rows, each.keys, each.kind) for each in found]
        apart, spent = list[Pair](), 0
        for begin, end in filter(None, self._groups):
            alike = regions(low[begin], high[begin], call // (end - begin) or 1, half)
            apart += [Pair(each.rows, each.keys, each.kind, (begin, end)) for each in alike]
            spent += cost(alike, call // (end - begin) or 1) * (end - begin)
        one = call // len(low) or 1
        joint = [Pair(each.rows, each.keys, "some") for each in regions(low.min(0), high.max(0), one, half)]
        pairs = sum((pair.rows[1] - pair.rows[0]) * (pair.keys[1] - pair.keys[0]) * MASKED + one for pair in joint)
        return apart if spent <= pairs * len(low) else joint


class Masked:
    """A view of `circle` through a mask of any kind, [samples or 1, heads or 1, queries or 1, all keys]: of bools, or to add.

    Rows and keys are taken in parts, and parts of one kind that are neighbours together.
    """

    def __init__(self, circle: Circle, mask: torch.Tensor) -> None:
        self._circle = circle
        self._rows, self._columns = _parts(circle.queries), tuple(map(_parts, circle.keys))
        self._above = _above(mask)
        deep = () if self._above is None else ((self._line(self._above, rows) != 0).any() for rows in self._rows)
        self._deep = {rows for rows, found in zip(self._rows, deep, strict=False) if found}
        self._kinds = self._told(mask)

    def pairs(self, rank: int) -> list[Pair]:
        """What is computed of this rank's queries and the keys of `rank`."""
        runs: dict[tuple[Span, Kind], list[Pair]] = {}
        for row, rows in enumerate(self._rows):
            line = list[Pair]()
            for column, keys in enumerate(self._columns[rank]):
                kind = self._kinds(row, rank, column)
                if kind is not None and line and line[-1].kind == kind and line[-1].keys[1] == keys[0]:
                    line.append(Pair(rows, (line.pop().keys[0], keys[1]), kind))
                elif kind is not None:
                    line.append(Pair(rows, keys, kind))
            for pair in line:
                above = runs.setdefault((pair.keys, pair.kind), [])
                joins = above and above[-1].rows[1] == rows[0]
                above.append(Pair((above.pop().rows[0], rows[1]), pair.keys, pair.kind) if joins else pair)
        return [pair for each in runs.values() for pair in each]

    def mask(self, rank: int, pair: Pair, whole: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        """The part of the mask."""
        return self._cut(whole, rank, pair) if pair.kind == "some" and whole is not None else None

    def above(self, rows: Span) -> torch.Tensor | None:
        """The largest entry of each row, where it is further than DEEP from 0; elsewhere 0."""
        met = any(rows[0] < end and begin < rows[1] for begin, end in self._deep)
        return self._line(self._above, rows) if met and self._above is not None else None

    def put(self, rank: int, pair: Pair, part: torch.Tensor, into: torch.Tensor) -> None:
        """Add `part`, a gradient of the mask of a pair, to where that comes from in `into`."""
        places = torch.tensor(self._circle.places[rank][slice(*pair.keys)], device=into.device)
        self._line(into, pair.rows).index_add_(-1, places, part)

    def _cut(self, mask: torch.Tensor, rank: int, pair: Pair) -> torch.Tensor:
        return columns(self._line(mask, pair.rows), self._circle.keys[rank], pair.keys)

    def _line(self, mask: torch.Tensor, rows: Span) -> torch.Tensor:
        return mask[:, :, slice(*rows)] if mask.shape[2] > 1 else mask

    def _told(self, mask: torch.Tensor) -> Callable[[int, int, int], Kind | None]:
        """What is left of each pair of parts; None: nothing."""
        if mask.requires_grad or isinstance(mask, FakeTensor):
            return lambda row, rank, column: "some"
        flags, named = list[torch.Tensor](), list[tuple[int, int, int]]()
        for rank, parts in enumerate(self._columns):
            for row, rows in enumerate(self._rows):
                for column, keys in enumerate(parts):
                    part = self._cut(mask, rank, Pair(rows, keys, "some"))
                    flags += [part.any(), part.all()] if mask.dtype == torch.bool else [(part > NEVER).any(), (part == 0).all()]
                    named.append((row, rank, column))
        told = torch.stack(flags).view(-1, 2).tolist() if flags else []  # one wait for the device, not one per part
        known: dict[tuple[int, int, int], Kind | None] = {
            name: "all" if free and self._rows[name[0]] not in self._deep else "some" if seen else None
            for name, (seen, free) in zip(named, told, strict=True)
        }
        return lambda row, rank, column: known[row, rank, column]


def _above(mask: torch.Tensor) -> torch.Tensor | None:
    """From where scores are counted of rows that `mask` takes far from 0, with all keys; None: it has none.

    What is added hides a row whole then: on one device it is larger than scores have digits, so all keys that it treats alike
    weigh the same. Rounded to its digits, lse would not tell how many those are.
    """
    if not mask.is_floating_point() or isinstance(mask, FakeTensor) or not mask.numel():
        return None
    most = mask.detach().amax(-1, keepdim=True)
    far = (most.abs() > DEEP) & most.isfinite()
    return most.masked_fill(~far, 0.0) if far.any() else None


def columns(rows: torch.Tensor, spans: Sequence[Span], keys: Span) -> torch.Tensor:
    """Of `rows`, [.., all keys], those columns that a rank with the keys in `spans` has at `keys`."""
    return cut(rows, -1, within(spans, *keys))


def _parts(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Stretches of the tokens in `spans`, as they lie on their rank: one for each; where there are many, PARTS alike."""
    ends = np.cumsum([0, *(end - begin for begin, end in spans)])
    if len(spans) > PARTS:
        ends = np.unique(ends[-1] * np.arange(PARTS + 1) // PARTS)
    return tuple(pairwise(ends.tolist()))


class Recent:
    """What a rank has found out about calls of attention, kept for the layers that ask the same."""

    def __init__(self) -> None:
        self._circles: dict[Hashable, Circle] = {}
        self._rules: dict[Circle, Neighbours] = {}
        self._masks: list[tuple[weakref.ref[torch.Tensor], tuple[Hashable, ...], Neighbours]] = []

    def circle(self, key: Hashable, make: Callable[[], Circle]) -> Circle:
        """The circle of that key; what `make` gives where that is new."""
        if key not in self._circles:
            while len(self._circles) >= KEPT:
                self._rules.pop(self._circles.pop(next(iter(self._circles))), None)
            self._circles[key] = make()
        return self._circles[key]

    def view(
        self,
        circle: Circle,
        mask: torch.Tensor | None,
        device: torch.device,
        asked: torch.Tensor | None = None,
        *,
        keeps: bool = True,
    ) -> View:
        """What `circle` looks at through `mask`, which was made of the one that was `asked` with, on `device`.

        It `keeps` that for who asks with the same, unless that may be written with nobody told.
        """
        call = CALL if device.type == "cpu" else FAR
        if mask is None:
            if circle not in self._rules:
                self._rules[circle] = Neighbours(circle, Bounds.by_rule(circle), call)
            return self._rules[circle]
        asked = mask if asked is None else asked
        known = (circle, asked._version) if keeps and not asked.is_inference() else None
        for given, said, view in self._masks:
            if given() is asked and said == known:
                return view
        bounds = Bounds.of(mask, len(circle.asked))
        if bounds is None:
            return Masked(circle, mask)
        view = Neighbours(circle, bounds, call)
        if known is not None:
            self._masks = [*self._masks[1 - KEPT :], (weakref.ref(asked), known, view)]
        return view
