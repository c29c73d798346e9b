"""How one dim of a weight is divided among the ranks of an axis: sections one behind the other, each of units that stay whole.

    q, one section of 6 heads, 4 ranks      | h0 h1 | h2 h3 | h4 | h5 |           units are dealt out evenly, larger first
    qkv, three sections, 2 ranks            | q q : k k : v v |  ->  rank 0: q k v, rank 1: q k v
    a packed gate and up, 2 ranks           | gate : up |        ->  rank 0: the first half of either

A plain matrix is one section of single rows. Grouped-query heads are cut by groups: the unit of q is all heads that share one
key, that of k and v is one head. Sections of one weight have as many units each, so a rank gets the same units of all.

Where ranks are more than units, single heads are dealt out, and every rank needs the keys and values of its heads:

    q, 3 heads a unit, 3 ranks              | h0 h1 | h2 : h3 | h4 h5 |         a rank may have heads of two units
    k, one head a unit                      | k0 | k0 k1 | k1 |                  these overlap: k stays whole, rows are picked

A weight has two sides: "out", a row or column per feature that the layer gives out (per entry, of its bias), and "in", one per
feature that it takes in (per word, of an embedding).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

Range = tuple[int, int]  # the first index, and the one behind the last


@dataclass(frozen=True)
class DimRanges:
    """What a rank has of a tensor along `dim`: `ranges` of it, one behind the other."""

    dim: int
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        """How many elements along the dim that is."""
        return sum(end - first for first, end in self.ranges)

    def global_ranges(self, first: int, length: int) -> Iterator[Range]:
        """Where `length` elements of what the rank has, from its `first` on, lie in the whole tensor: in order."""
        for begin, end in self.ranges:
            taken = min(length, end - begin - first)
            if taken > 0:
                yield begin + first, begin + first + taken
                length -= taken
            first = max(0, first - (end - begin))


@dataclass(frozen=True)
class DimSplit:
    """Along `dim`: `sections` of so many elements each, every one of `units` units; `side` is what that dim is to the layer.

    Units are made of `heads` in all (0: of nothing smaller). In each section, so many elements at the front of a unit are its
    heads' `own`, head after head; the others are used by all of them.
    """

    dim: int
    num_units: int
    sections: tuple[int, ...]
    side: str = "out"
    num_heads: int = 0
    per_head_numel: tuple[int, ...] = ()

    @property
    def max_ranks(self) -> int:
        """How many ranks can have something of it."""
        return max(self.num_units, self.num_heads)

    def overlaps(self, num_ranks: int) -> bool:
        """Whether some of `ranks` ranks need the same elements."""
        shared = any(
            own * self.num_units < length
            for own, length in zip(self.per_head_numel, self.sections, strict=False)
        )
        return num_ranks > self.num_units and shared

    @property
    def section_splits(self) -> tuple["DimSplit", ...]:
        """The same of each section alone."""
        own = self.per_head_numel or (0,) * len(self.sections)
        return tuple(
            replace(self, sections=(length,), per_head_numel=(mine,) if self.per_head_numel else ())
            for length, mine in zip(self.sections, own, strict=True)
        )

    def units_of(self, index: int, num_ranks: int) -> Range:
        """The units, or the heads where ranks are more than units, of the rank at `index` among `ranks`."""
        each, more = divmod(
            self.num_units if num_ranks <= self.num_units or not self.num_heads else self.num_heads, num_ranks
        )
        first = index * each + min(index, more)
        return first, first + each + (index < more)

    def ranges(self, index: int, num_ranks: int) -> tuple[Range, ...]:
        """Which elements along the dim that rank has, section after section."""
        first, end = self.units_of(index, num_ranks)
        if num_ranks > self.num_units and self.num_heads:
            return tuple(_joined(self._by_head(first, end)))
        found, start = [], 0
        for length in self.sections:
            unit = length // self.num_units
            found.append((start + first * unit, start + end * unit))
            start += length
        return tuple(found)

    def dim_ranges(self, index: int, num_ranks: int) -> DimRanges:
        """The same, with the dim."""
        return DimRanges(self.dim, self.ranges(index, num_ranks))

    def size(self, index: int, num_ranks: int) -> int:
        """How many elements along the dim that rank has."""
        return self.dim_ranges(index, num_ranks).size

    def local_shape(self, shape: tuple[int, ...], index: int, num_ranks: int) -> tuple[int, ...]:
        """What that rank holds of a tensor of `shape`."""
        return (*shape[: self.dim], self.size(index, num_ranks), *shape[self.dim + 1 :])

    def _by_head(self, first: int, end: int) -> Iterator[Range]:
        """What these heads need: of one unit, what is shared comes once, else with every head."""
        each, start = self.num_heads // self.num_units, 0
        within = end > first and first // each == (end - 1) // each
        for length, own in zip(self.sections, self.per_head_numel, strict=True):
            unit, wide = length // self.num_units, own // each
            for run in [(first, end)] if within else [(head, head + 1) for head in range(first, end)]:
                begin = start + run[0] // each * unit
                yield begin + run[0] % each * wide, begin + (run[0] % each + run[1] - run[0]) * wide
                yield begin + own, begin + unit
            start += length


@dataclass(frozen=True)
class DimShard:
    """A dim that is cut along `axes`, dealt at once to all their `ranks`, the last axis innermost; and the rank at `index`."""

    axes: tuple[str, ...]
    dim_split: DimSplit
    num_ranks: int
    index: int

    @property
    def dim_ranges(self) -> DimRanges:
        """What the rank has along the dim."""
        return self.dim_split.dim_ranges(self.index, self.num_ranks)


def _joined(ranges: Iterator[Range]) -> Iterator[Range]:
    """The same elements in the same order, in as few ranges as can be."""
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
