"""Block masks of attention: which stretches of queries and keys a kernel computes, and with which mask.

    interval     every query attends to keys from one position up to another: no mask, causal, a window,
                 packed documents, padding at one end, a prefix. Two numbers per query replace the mask
    otherwise    a bias, a mask per head, holes: the mask itself, in parts; fully masked parts are skipped

Masks are tensors that the model makes. One look at each element tells whether a mask is of the first kind;
layers that share a mask tensor share the result.

Query i of a rank attends to the keys low[i] up to high[i] of a block that it receives. Runs of queries whose
bounds rise alike have known forms:

    low, high        constant            high rises by 1           both rise by 1           low rises by 1
                     # # # #             # # #                     # # # .                  # # # #
                     # # # #             # # # #                   . # # #                  . # # #
    kernels          one, no mask        one for common keys,      tiles of rows, a         tiles of rows, a
                                         one causal                mask each                mask each
    from             documents, prefix   causal masks              windows                  ends of windows

No tile is fully masked. A kernel call costs as much time as `call_cost` pairs of a query and a key, and a
masked pair costs MASKED_PAIR_COST others: neighbours are merged if that is cheaper, so short documents share
a call.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import isqrt

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.model.tensors.select_token_ranges import index_tensor
from meshwright.parallel.context.attention_kernel import NEG_INF
from meshwright.parallel.context.ring_geometry import AttentionRing, BlockMask, MaskKind, QueryKeyBlock
from meshwright.plan.sharding.sequence_sharding import TokenRange

CPU_CALL_COST = 1 << 10  # pairs of a query and a key that take as long as the way into a kernel: of a CPU
DEVICE_CALL_COST = 1 << 16  # the same, of a device that computes a hundred times as fast
MASKED_PAIR_COST = 2  # pairs that cost as much as one under a mask, which is made for it
BOUND_SLOPES = ((0, 0), (0, 1), (1, 1), (1, 0))  # by how much low and high rise from query to query


@dataclass(frozen=True)
class MaskRegion:
    """A range of queries and keys that one kernel call computes."""

    queries: TokenRange
    keys: TokenRange
    kind: MaskKind

    @property
    def num_pairs(self) -> int:
        """Its cost in pairs, without that of the call."""
        rows, keys = self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]
        if self.kind == "causal":
            return rows * (rows + 1) // 2
        return rows * keys * (MASKED_PAIR_COST if self.kind == "some" else 1)


def find_regions(
    low: np.ndarray, high: np.ndarray, call_cost: int = CPU_CALL_COST, split_row: int = 0
) -> list[MaskRegion]:
    """Returns the regions that cover all attended pairs, in order of queries; none crosses the row
    `split_row`.

    Args:
        low, high: [queries], int; query i attends to the keys low[i] up to high[i], none if they are equal.
        call_cost: cost of a kernel call, in pairs of a query and a key.
    """
    found = list[tuple[MaskRegion, ...]]()  # those of the same rows are together
    for begin, end in _query_runs(low, high, split_row):
        for piece in _run_regions(low, high, begin, end, call_cost):
            while found and (joined := _merged_region(found[-1], piece, call_cost)) is not None:
                piece = joined
                found.pop()
            found.append(piece)
    return [region for piece in found for region in piece]


def regions_cost(regions: Sequence[MaskRegion], call_cost: int) -> int:
    """Returns the cost of these regions, in pairs of a query and a key."""
    return sum(region.num_pairs + call_cost for region in regions)


def _query_runs(low: np.ndarray, high: np.ndarray, cut: int) -> Iterator[TokenRange]:
    lows, highs = np.diff(low), np.diff(high)
    ends = (
        np.flatnonzero((np.diff(lows) != 0) | (np.diff(highs) != 0)) + 1
    )  # the last query of a run, counted on
    stops = [*ends.tolist(), len(low) - 1]
    begin, number = 0, 0
    while begin < len(low):
        while stops[number] <= begin and number + 1 < len(stops):
            number += 1
        end = begin + 1
        if begin < len(lows) and (lows[begin], highs[begin]) in BOUND_SLOPES:
            end = stops[number] + 1
        if begin < cut < end:
            end = cut
        seen = np.flatnonzero(high[begin:end] > low[begin:end])
        if len(seen):
            yield begin + int(seen[0]), begin + int(seen[-1]) + 1
        begin = end


def _run_regions(
    low: np.ndarray, high: np.ndarray, begin: int, end: int, call: int
) -> Iterator[tuple[MaskRegion, ...]]:
    rows, first, last = (begin, end), int(low[begin]), int(high[begin])
    rises = (int(low[end - 1]) > first, int(high[end - 1]) > last)
    if rises == (False, False):
        yield (MaskRegion(rows, (first, last), "all"),)
    elif rises == (False, True):
        through = MaskRegion(rows, (last - 1, last - 1 + end - begin), "causal")
        apart = (MaskRegion(rows, (first, last - 1), "all"), through) if last - 1 > first else (through,)
        whole = (MaskRegion(rows, (first, int(high[end - 1])), "some"),)
        yield min(apart, whole, key=lambda some: regions_cost(some, call))
    else:
        step = max(1, isqrt(call))
        for at in range(begin, end, step):
            behind = min(at + step, end)
            yield (MaskRegion((at, behind), (int(low[at]), int(high[behind - 1])), "some"),)


def _merged_region(
    above: tuple[MaskRegion, ...], below: tuple[MaskRegion, ...], call: int
) -> tuple[MaskRegion, ...] | None:
    parts = (*above, *below)
    rows = above[0].queries[0], below[-1].queries[1]
    keys = min(region.keys[0] for region in parts), max(region.keys[1] for region in parts)
    whole = (MaskRegion(rows, keys, "some"),)
    each = regions_cost(above, call) * (rows[1] - rows[0]) / (above[0].queries[1] - above[0].queries[0])
    return whole if regions_cost(whole, call) < min(regions_cost(parts, call), each) else None


MAX_MASK_ELEMENTS = 1 << 21  # elements of a mask that are looked at together
HIDDEN_BELOW = torch.finfo(
    torch.float16
).min  # what is added to hide a key: exp of it is 0, however large scores are
LARGE_OFFSET = 1024.0  # a row of a mask that is further from 0 everywhere leaves lse too few digits
NUM_PARTS = 4  # of a rank's tokens, where they do not come in chunks
CACHE_SIZE = 4  # lengths, and masks, that are remembered


@dataclass(frozen=True)
class KeyIntervals:
    """The interval of key positions, `first` up to `end`, that each query attends to, [samples or 1,
    queries]; empty if equal.
    """

    first: np.ndarray
    end: np.ndarray

    @classmethod
    def without_mask(cls, ring: AttentionRing) -> "KeyIntervals":
        """Returns the intervals of `ring` without a mask tensor: all keys, or the causal ones."""
        count = len(ring.query_positions)
        keys = sum(ring.num_keys)
        last = ring.query_positions + 1 if ring.causal else np.full(count, keys)
        return cls(np.zeros((1, count), np.int64), last.reshape(1, count))

    @classmethod
    def from_mask(cls, mask: torch.Tensor, queries: int) -> "KeyIntervals | None":
        """Returns the intervals of `mask`, [samples or 1, heads or 1, queries or 1, keys]; None if it is not
        made of intervals.
        """
        if mask.requires_grad or isinstance(mask, FakeTensor) or mask.shape[1] != 1 or not mask.numel():
            return None
        each, step = mask.shape[0] * mask.shape[3], mask.shape[2]
        found = [
            _interval_bounds(part)
            for part in mask[:, 0].split(max(1, min(step, MAX_MASK_ELEMENTS // each)), 1)
        ]
        bounds = torch.cat(found, 2).cpu().numpy()
        return (
            cls(*(np.broadcast_to(part, (mask.shape[0], queries)) for part in bounds[:2]))
            if bounds[2].all()
            else None
        )

    def sample_groups(self) -> list[TokenRange | None]:
        """Returns ranges of consecutive samples with equal intervals; None: all samples."""
        gathered = np.concatenate((self.first, self.end), 1)
        starts = [0, *(np.flatnonzero((gathered[1:] != gathered[:-1]).any(1)) + 1).tolist(), len(gathered)]
        return [None] if len(starts) == 2 else list(pairwise(starts))


def _interval_bounds(mask: torch.Tensor) -> torch.Tensor:
    certain = torch.ones((), dtype=torch.bool, device=mask.device)
    if mask.dtype != torch.bool:
        free, deep = mask == 0, mask > NEG_INF
        seen = free.any(-1, keepdim=True)  # of a row without a key that is free, one device makes a mean
        certain = (free | ((mask <= HIDDEN_BELOW) & (seen | ~deep))).all(-1)
        mask = free
    first, behind = (
        each.contiguous().view(torch.uint8).argmax(-1, keepdim=True) for each in (mask, mask.flip(-1))
    )
    last = torch.where(
        mask.gather(-1, first), mask.shape[-1] - behind, 0
    )  # of a query that looks at nothing: 0 and 0
    at = torch.arange(mask.shape[-1], device=mask.device, dtype=torch.int32)
    in_interval = (at >= first.int()) & (at < last.int())
    certain = certain & ~(in_interval ^ mask).any(-1)  # a sum would take five times as long
    return torch.stack((first.squeeze(-1), last.squeeze(-1), certain.long()))


class IntervalMask:
    """The block mask of `ring` given by `intervals`."""

    def __init__(self, ring: AttentionRing, intervals: KeyIntervals, call_cost: int) -> None:
        self._circle, self._bounds, self._call = ring, intervals, call_cost
        self._groups = intervals.sample_groups()
        self._pairs: dict[int, list[QueryKeyBlock]] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def blocks(self, rank: int) -> list[QueryKeyBlock]:
        """Returns the blocks of this rank's queries and the keys of `rank` that are computed."""
        if rank not in self._pairs:
            self._pairs[rank] = self._build_blocks(rank)
        return self._pairs[rank]

    def dense_mask(
        self, rank: int, block: QueryKeyBlock, full_mask: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor | None:
        """[samples or 1, 1, queries, keys]: which keys lie within the intervals."""
        if block.kind != "some":
            return None
        if rank not in self._tensors:
            self._tensors[rank] = index_tensor(np.stack(self._local_bounds(rank)), device)
        low, high = self._tensors[rank][:, slice(*(block.samples or (None,))), slice(*block.queries), None]
        at = torch.arange(*block.keys, device=device)
        return ((at >= low) & (at < high)).unsqueeze(1)

    def row_offset(self, queries: TokenRange) -> torch.Tensor | None:
        """Returns None: nothing is added to scores."""
        return None

    def add_mask_grad(
        self, rank: int, block: QueryKeyBlock, grad: torch.Tensor, mask_grad: torch.Tensor
    ) -> None:
        """Does nothing: intervals have no gradient."""
        raise RuntimeError("a mask given as intervals has no gradient; this is a bug: report it")

    def _local_bounds(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        low, high = (
            np.searchsorted(self._circle.key_positions[rank], each)
            for each in (self._bounds.first, self._bounds.end)
        )
        return low, np.maximum(low, high)

    def _build_blocks(self, rank: int) -> list[QueryKeyBlock]:
        (low, high), call = self._local_bounds(rank), self._call
        half = low.shape[1] // 2 if rank == self._circle.index and len(self._circle.key_spans) > 1 else 0
        if self._groups == [None]:
            found = find_regions(low[0], high[0], call // len(low) or 1, half)
            return [QueryKeyBlock(each.queries, each.keys, each.kind) for each in found]
        apart, spent = list[QueryKeyBlock](), 0
        for begin, end in filter(None, self._groups):
            alike = find_regions(low[begin], high[begin], call // (end - begin) or 1, half)
            apart += [QueryKeyBlock(each.queries, each.keys, each.kind, (begin, end)) for each in alike]
            spent += regions_cost(alike, call // (end - begin) or 1) * (end - begin)
        one = call // len(low) or 1
        joint = [
            QueryKeyBlock(each.queries, each.keys, "some")
            for each in find_regions(low.min(0), high.max(0), one, half)
        ]
        pairs = sum(
            (pair.queries[1] - pair.queries[0]) * (pair.keys[1] - pair.keys[0]) * MASKED_PAIR_COST + one
            for pair in joint
        )
        return apart if spent <= pairs * len(low) else joint


class DenseMask:
    """The block mask of `ring` given by a tensor, [samples or 1, heads or 1, queries or 1, all keys], bool or
    added.

    Queries and keys are taken in parts; neighbouring parts of one kind are merged.
    """

    def __init__(self, ring: AttentionRing, mask: torch.Tensor) -> None:
        self._circle = ring
        self._rows, self._columns = _token_parts(ring.query_spans), tuple(map(_token_parts, ring.key_spans))
        self._above = above = _row_offset(mask)
        deep = [] if above is None else [(self._rows_of(above, rows) != 0).any() for rows in self._rows]
        parts = self._part_flags(mask)
        flags = [*deep, *(flag for each in parts.values() for flag in each)]
        read = torch.stack(flags).tolist() if flags else []  # one wait for the device, not one per part
        self._deep = {rows for rows, found in zip(self._rows, read[: len(deep)], strict=False) if found}
        pairs = zip(read[len(deep) :: 2], read[len(deep) + 1 :: 2], strict=True)
        self._kinds: dict[tuple[int, int, int], MaskKind | None] = {
            part: "all" if free and self._rows[part[0]] not in self._deep else "some" if seen else None
            for part, (seen, free) in zip(parts, pairs, strict=True)
        }

    def blocks(self, rank: int) -> list[QueryKeyBlock]:
        """Returns the blocks of this rank's queries and the keys of `rank` that are computed."""
        runs: dict[tuple[TokenRange, MaskKind], list[QueryKeyBlock]] = {}
        for row, rows in enumerate(self._rows):
            line = list[QueryKeyBlock]()
            for column, keys in enumerate(self._columns[rank]):
                kind = self._kinds.get((row, rank, column), "some")
                if kind is not None and line and line[-1].kind == kind and line[-1].keys[1] == keys[0]:
                    line.append(QueryKeyBlock(rows, (line.pop().keys[0], keys[1]), kind))
                elif kind is not None:
                    line.append(QueryKeyBlock(rows, keys, kind))
            for pair in line:
                above = runs.setdefault((pair.keys, pair.kind), [])
                joins = above and above[-1].queries[1] == rows[0]
                above.append(
                    QueryKeyBlock((above.pop().queries[0], rows[1]), pair.keys, pair.kind) if joins else pair
                )
        return [pair for each in runs.values() for pair in each]

    def dense_mask(
        self, rank: int, block: QueryKeyBlock, full_mask: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor | None:
        """Returns the part of `full_mask` of a partial block."""
        return (
            self._block_of(full_mask, rank, block) if block.kind == "some" and full_mask is not None else None
        )

    def row_offset(self, queries: TokenRange) -> torch.Tensor | None:
        """Returns the largest entry of each row if it is further than LARGE_OFFSET from 0; elsewhere 0."""
        met = any(queries[0] < end and begin < queries[1] for begin, end in self._deep)
        return self._rows_of(self._above, queries) if met and self._above is not None else None

    def add_mask_grad(
        self, rank: int, block: QueryKeyBlock, grad: torch.Tensor, mask_grad: torch.Tensor
    ) -> None:
        """Adds `grad` to the columns of the block in `mask_grad`."""
        self._circle.add_to_keys(self._rows_of(mask_grad, block.queries), rank, block.keys, grad)

    def _block_of(self, mask: torch.Tensor, rank: int, pair: QueryKeyBlock) -> torch.Tensor:
        return self._circle.select_keys(self._rows_of(mask, pair.queries), rank, pair.keys)

    def _rows_of(self, mask: torch.Tensor, rows: TokenRange) -> torch.Tensor:
        return mask[:, :, slice(*rows)] if mask.shape[2] > 1 else mask

    def _part_flags(
        self, mask: torch.Tensor
    ) -> Mapping[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]]:
        """Returns of each part, by its row, rank and column, whether any key is seen, and whether all are
        free; nothing of a mask whose numbers must not or cannot be looked at.
        """
        if mask.requires_grad or isinstance(mask, FakeTensor):
            return {}
        found = {}
        for rank, parts in enumerate(self._columns):
            for (row, rows), (column, keys) in product(enumerate(self._rows), enumerate(parts)):
                part = self._block_of(mask, rank, QueryKeyBlock(rows, keys, "some"))
                seen, free = (part, part) if mask.dtype == torch.bool else (part > NEG_INF, part == 0)
                found[row, rank, column] = seen.any(), free.all()
        return found


def _row_offset(mask: torch.Tensor) -> torch.Tensor | None:
    if not mask.is_floating_point() or isinstance(mask, FakeTensor) or not mask.numel():
        return None
    most = mask.detach().amax(-1, keepdim=True)
    far = (most.abs() > LARGE_OFFSET) & most.isfinite()
    return most.masked_fill(~far, 0.0)


def _token_parts(spans: Sequence[TokenRange]) -> tuple[TokenRange, ...]:
    ends = np.cumsum([0, *(end - begin for begin, end in spans)])
    if len(spans) > NUM_PARTS:
        ends = np.unique(ends[-1] * np.arange(NUM_PARTS + 1) // NUM_PARTS)
    return tuple(pairwise(ends.tolist()))


class MaskCache:
    """Rings and block masks of a rank's attention calls, shared by layers with equal calls."""

    def __init__(self) -> None:
        self._circles: dict[Hashable, AttentionRing] = {}
        self._rules: dict[AttentionRing, IntervalMask] = {}
        self._masks: list[tuple[weakref.ref[torch.Tensor], tuple[Hashable, ...], BlockMask]] = []

    def ring(self, key: Hashable, make: Callable[[], AttentionRing]) -> AttentionRing:
        """Returns the ring of that key; built with `make` if it is new."""
        if key not in self._circles:
            while len(self._circles) >= CACHE_SIZE:
                self._rules.pop(self._circles.pop(next(iter(self._circles))), None)
            self._circles[key] = make()
        return self._circles[key]

    def block_mask(
        self,
        ring: AttentionRing,
        mask: torch.Tensor | None,
        device: torch.device,
        source_mask: torch.Tensor | None = None,
        *,
        cacheable: bool = True,
    ) -> BlockMask:
        """Returns the block mask of `ring` for `mask`, derived from the mask `source_mask` of the call.

        It is cached by `source_mask` if `cacheable`: a tensor that may be overwritten without a version
        change is not.
        """
        call = CPU_CALL_COST if device.type == "cpu" else DEVICE_CALL_COST
        if mask is None:
            if ring not in self._rules:
                self._rules[ring] = IntervalMask(ring, KeyIntervals.without_mask(ring), call)
            return self._rules[ring]
        source_mask = mask if source_mask is None else source_mask
        known = (ring, source_mask._version) if cacheable and not source_mask.is_inference() else None
        for given, key, view in self._masks:
            if given() is source_mask and key == known:
                return view
        bounds = KeyIntervals.from_mask(mask, len(ring.query_positions))
        view = DenseMask(ring, mask) if bounds is None else IntervalMask(ring, bounds, call)
        if known is not None:
            self._masks = [*self._masks[1 - CACHE_SIZE :], (weakref.ref(source_mask), known, view)]
        return view
