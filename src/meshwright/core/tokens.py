"""The tokens of one sample on several ranks: which of them each has, and what the plan needs to know of a model for that.

    length 8, 2 ranks, folded          chunks 0 1 2 3        rank 0: 0 1 | 6 7        rank 1: 2 3 | 4 5
    the same, straight                                       rank 0: 0 1 2 3          rank 1: 4 5 6 7

Under a causal mask token i looks at i others: of straight slices the last costs (2 n - 1) times the first. Folded, each rank has
an early chunk and the late one that makes up for it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

Span = tuple[int, int]  # the first position, and the one behind the last
STAND_IN: Span = (0, 1)  # what a rank runs besides that has too few tokens: the first one, of which nothing counts
LEAST = 2  # tokens that a rank runs: none does not go through a model, and one looks like a step of a generation


@dataclass(frozen=True)
class Deal:
    """How the tokens of a sample are dealt to `ranks`: chunks are `folded` over ranks / inner, and what each gets lies straight
    on `inner` ranks in turn.

    Any length is dealt as evenly as can be; where it is below the number of ranks, some have none. A rank that has fewer than
    two runs stand-ins behind them: nobody attends to those, and what comes out of them is dropped.
    """

    ranks: int
    inner: int = 1
    folded: bool = True

    def spans(self, length: int, index: int) -> tuple[Span, ...]:
        """The positions that the rank at `index` has, in order."""
        outer, place = divmod(index, self.inner)
        around = self.ranks // self.inner
        mine = self._around(length, outer, around)
        return _within(mine, *_piece(count_of(mine), self.inner, place))

    def count(self, length: int, index: int) -> int:
        """How many tokens that are."""
        return self.counts(length)[index]

    def counts(self, length: int) -> tuple[int, ...]:
        """How many each rank has."""
        return _counts(self, length)

    def run(self, length: int, index: int) -> int:
        """How many tokens it runs."""
        return max(LEAST, self.count(length, index))

    def together(self, length: int, index: int) -> tuple[Span, ...]:
        """The positions that the `inner` ranks round the one at `index` have among them, in order."""
        return self._around(length, index // self.inner, self.ranks // self.inner)

    def _around(self, length: int, index: int, ranks: int) -> tuple[Span, ...]:
        if not self.folded or ranks == 1:
            return tuple(span for span in (_piece(length, ranks, index),) if span[0] < span[1])
        counts = [end - begin for begin, end in (_piece(length, ranks, each) for each in range(ranks))]
        first = sum((each + 1) // 2 for each in counts[:index])
        last = length - sum(each // 2 for each in counts[:index])
        early, late = (first, first + (counts[index] + 1) // 2), (last - counts[index] // 2, last)
        if early[1] == late[0]:
            early, late = (early[0], late[1]), (late[1], late[1])
        return tuple(span for span in (early, late) if span[0] < span[1])


def count_of(spans: Iterable[Span]) -> int:
    """How many positions there are in `spans`."""
    return sum(end - begin for begin, end in spans)


def filled(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """`spans`, and the stand-ins that are run behind them."""
    return (*spans, *[STAND_IN] * (LEAST - count_of(spans)))


@lru_cache(maxsize=256)  # attention asks for it in every call
def _counts(deal: Deal, length: int) -> tuple[int, ...]:
    return tuple(count_of(deal.spans(length, index)) for index in range(deal.ranks))


def _piece(length: int, pieces: int, index: int) -> Span:
    return length * index // pieces, length * (index + 1) // pieces


def _within(spans: Sequence[Span], first: int, last: int) -> tuple[Span, ...]:
    """Of the positions in `spans`, counted on, those from `first` up to `last`."""
    found, before = [], 0
    for begin, end in spans:
        low, high = max(begin, begin + first - before), min(end, begin + last - before)
        if low < high:
            found.append((low, high))
        before += end - begin
    return tuple(found)


@dataclass(frozen=True)
class Mask:
    """By what the mask of a call of attention differs, beside keys; it has size 1 along the others.

    It `adds` to scores; otherwise it is one of bools. `needed`: its gradient is.
    """

    by_row: bool = False
    by_head: bool = False
    by_query: bool = True
    adds: bool = False
    needed: bool = False


@dataclass(frozen=True)
class Attend:
    """One call of attention in one forward: its visit, and of one sample the sizes of what it takes in.

    `heads` are those of queries, `groups` those of keys and values; `width` is that of a head of queries and keys, `values` is
    that of one of values. `queries` and `keys` are tokens. `masked`: it takes in a mask, [.., queries, keys]; `mask` tells more.
    `needed`: the gradient of something that it takes in is; `learns` tells whether that of queries, of keys, of values are.
    """

    visit: str
    heads: int
    groups: int
    width: int
    values: int
    queries: int
    keys: int
    causal: bool = False
    masked: bool = False
    needed: bool = True
    mask: Mask | None = None
    learns: tuple[bool, bool, bool] = (True, True, True)


@dataclass(frozen=True)
class Passing:
    """How tokens go through a visit: for each tensor among what it takes in and gives out, in order, which dims are tokens.

    `slots` are where those that it takes in stand among its arguments: others may be there on another batch. `mixes` says what
    keeps it from running on some of the tokens; empty: nothing, but for attention. `whole`: every rank runs it on all of them,
    since it is given nothing but what ranks read, and goes on with its own.
    """

    visit: str
    takes: tuple[tuple[int, ...], ...] = ()
    gives: tuple[tuple[int, ...], ...] = ()
    mixes: str = ""
    slots: tuple[str, ...] = ()
    whole: bool = False


@dataclass(frozen=True)
class Tokens:
    """What a model does with tokens: so many in a sample, which `inputs` and `targets` have them (along dim 1, behind the rows).

    `met` tells what glue needs of all tokens: behind which visit, and how many elements per sample.
    """

    length: int
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    visits: tuple[Passing, ...] = ()
    attends: tuple[Attend, ...] = ()
    met: tuple[tuple[str, int], ...] = ()
