"""How one dim of a weight is divided among the ranks of an axis: sections one behind the other, each of units that stay whole.

    q, one section of 6 heads, 4 ranks      | h0 h1 | h2 h3 | h4 | h5 |           units are dealt out evenly, larger first
    qkv, three sections, 2 ranks            | q q : k k : v v |  ->  rank 0: q k v, rank 1: q k v
    a packed gate and up, 2 ranks           | gate : up |        ->  rank 0: the first half of either

A plain matrix is one section of single rows. Grouped-query heads are cut by groups: the unit of q is all heads that share one
key, that of k and v is one head. Sections of one weight have as many units each, so a rank gets the same units of all.

A weight has two sides: "out", a row or column per feature that the layer gives out (per entry, of its bias), and "in", one per
feature that it takes in (per word, of an embedding).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

Range = tuple[int, int]  # the first index, and the one behind the last
Box = tuple[tuple[int, ...], tuple[int, ...]]  # from which index, and how large


@dataclass(frozen=True)
class Cut:
    """Along `dim`: `sections` of so many elements each, every one of `units` units; `side` is what that dim is to the layer."""

    dim: int
    units: int
    sections: tuple[int, ...]
    side: str = "out"

    def units_of(self, index: int, ranks: int) -> Range:
        """The units of the rank at `index` among `ranks`."""
        each, more = divmod(self.units, ranks)
        first = index * each + min(index, more)
        return first, first + each + (index < more)

    def ranges(self, index: int, ranks: int) -> tuple[Range, ...]:
        """Which elements along the dim that rank has, section after section."""
        first, end = self.units_of(index, ranks)
        found, start = [], 0
        for length in self.sections:
            unit = length // self.units
            found.append((start + first * unit, start + end * unit))
            start += length
        return tuple(found)

    def size(self, index: int, ranks: int) -> int:
        """How many elements along the dim that rank has."""
        return sum(end - first for first, end in self.ranges(index, ranks))

    def local(self, shape: tuple[int, ...], index: int, ranks: int) -> tuple[int, ...]:
        """What that rank holds of a tensor of `shape`."""
        return (*shape[: self.dim], self.size(index, ranks), *shape[self.dim + 1 :])

    def boxes(self, shape: tuple[int, ...], index: int, ranks: int) -> Iterator[Box]:
        """The same as boxes of the tensor of `shape`, in the order in which the rank has them along the dim."""
        for first, end in self.ranges(index, ranks):
            start, size = [0] * len(shape), list(shape)
            start[self.dim], size[self.dim] = first, end - first
            if prod(size):
                yield tuple(start), tuple(size)
