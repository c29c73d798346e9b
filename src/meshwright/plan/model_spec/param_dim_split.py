"""Splits one dim of a parameter among the ranks of an axis: consecutive sections of indivisible units.

    q, one section of 6 heads, 4 ranks     | h0 h1 | h2 h3 | h4 | h5 |          the first ranks get one more
    qkv, three sections, 2 ranks           | q q : k k : v v |  ->  rank 0: q k v, rank 1: q k v
    a packed gate and up, 2 ranks          | gate : up |        ->  rank 0: the first half of each

A plain matrix is one section whose units are single rows. Grouped-query heads are split by group: a unit of q
is all heads that share one key, a unit of k or v is one head. All sections of a parameter have the same
number of units, so a rank gets the same units of each.

With more ranks than units, single heads are distributed, and every rank needs the keys and values of its
heads:

    q, 3 heads a unit, 3 ranks             | h0 h1 | h2 : h3 | h4 h5 |       a rank may have two units
    k, one head a unit                     | k0 | k0 k1 | k1 |               overlap: k stays replicated

A parameter has two sides: "out", one index per feature that the layer returns (also of its bias), and "in",
one index per feature that it takes (per vocabulary entry, for an embedding).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

Range = tuple[int, int]  # the first index, and the end


@dataclass(frozen=True)
class DimRanges:
    """The index ranges of a tensor along `dim` that one rank holds, in order."""

    dim: int
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        """The number of elements along the dim."""
        return sum(end - first for first, end in self.ranges)

    def global_ranges(self, first: int, length: int) -> Iterator[Range]:
        """Yields the ranges in the full tensor of `length` local elements from local index `first` on, in
        order.
        """
        for begin, end in self.ranges:
            taken = min(length, end - begin - first)
            if taken > 0:
                yield begin + first, begin + first + taken
                length -= taken
            first = max(0, first - (end - begin))


@dataclass(frozen=True)
class DimSplit:
    """A dim of `sections` (their lengths), each of `num_units` units; `side` is the role of the dim in the
    layer.

    Units consist of `num_heads` heads in all (0: units are not made of heads). In each section, the first
    `per_head_numel` elements of a unit belong to its heads, one after the other; all heads of the unit use
    the rest.
    """

    dim: int
    num_units: int
    sections: tuple[int, ...]
    side: str = "out"
    num_heads: int = 0
    per_head_numel: tuple[int, ...] = ()

    @property
    def max_ranks(self) -> int:
        """The largest number of ranks of which each gets a part."""
        return max(self.num_units, self.num_heads)

    def overlaps(self, num_ranks: int) -> bool:
        """Returns whether some of `num_ranks` ranks need the same elements."""
        shared = any(
            head_numel * self.num_units < length
            for head_numel, length in zip(self.per_head_numel, self.sections, strict=False)
        )
        return num_ranks > self.num_units and shared

    @property
    def section_splits(self) -> tuple["DimSplit", ...]:
        """The split of each section alone."""
        head_numel = self.per_head_numel or (0,) * len(self.sections)
        return tuple(
            replace(self, sections=(length,), per_head_numel=(numel,) if self.per_head_numel else ())
            for length, numel in zip(self.sections, head_numel, strict=True)
        )

    def units_of(self, index: int, num_ranks: int) -> Range:
        """Returns the range of units of rank `index`, or of heads if there are more ranks than units."""
        each, more = divmod(
            self.num_units if num_ranks <= self.num_units or not self.num_heads else self.num_heads, num_ranks
        )
        first = index * each + min(index, more)
        return first, first + each + (index < more)

    def ranges(self, index: int, num_ranks: int) -> tuple[Range, ...]:
        """Returns the index ranges along the dim of rank `index`, section by section."""
        first, end = self.units_of(index, num_ranks)
        if num_ranks > self.num_units and self.num_heads:
            return tuple(_merge_adjacent(self._by_head(first, end)))
        found, start = [], 0
        for length in self.sections:
            unit = length // self.num_units
            found.append((start + first * unit, start + end * unit))
            start += length
        return tuple(found)

    def dim_ranges(self, index: int, num_ranks: int) -> DimRanges:
        """Returns the index ranges of rank `index`, with the dim."""
        return DimRanges(self.dim, self.ranges(index, num_ranks))

    def size(self, index: int, num_ranks: int) -> int:
        """Returns the number of elements along the dim on rank `index`."""
        return self.dim_ranges(index, num_ranks).size

    def local_shape(self, shape: tuple[int, ...], index: int, num_ranks: int) -> tuple[int, ...]:
        """Returns the shape of the slice of a tensor of `shape` on rank `index`."""
        return (*shape[: self.dim], self.size(index, num_ranks), *shape[self.dim + 1 :])

    def _by_head(self, first: int, end: int) -> Iterator[Range]:
        """The ranges that heads `first` to `end` need: shared elements of a unit once if all heads lie in one
        unit.
        """
        each, start = self.num_heads // self.num_units, 0
        in_one_unit = end > first and first // each == (end - 1) // each
        for length, head_numel in zip(self.sections, self.per_head_numel, strict=True):
            unit, per_head = length // self.num_units, head_numel // each
            for span in [(first, end)] if in_one_unit else [(head, head + 1) for head in range(first, end)]:
                begin = start + span[0] // each * unit
                yield (
                    begin + span[0] % each * per_head,
                    begin + (span[0] % each + span[1] - span[0]) * per_head,
                )
                yield begin + head_numel, begin + unit
            start += length


@dataclass(frozen=True)
class DimShard:
    """The shard of rank `index` of a dim that is split over all `num_ranks` ranks of `axes`, the last axis
    innermost.
    """

    axes: tuple[str, ...]
    dim_split: DimSplit
    num_ranks: int
    index: int

    @property
    def dim_ranges(self) -> DimRanges:
        """The index ranges of this rank along the dim."""
        return self.dim_split.dim_ranges(self.index, self.num_ranks)


def _merge_adjacent(ranges: Iterator[Range]) -> Iterator[Range]:
    last: Range | None = None
    for first, end in ranges:
        if last is not None and last[1] == first:
            last = last[0], end
        elif end > first:
            if last is not None:
                yield last
            last = first, end
    if last is not None:
        yield last
