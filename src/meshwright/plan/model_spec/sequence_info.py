"""The tokens of one sample on several ranks: which of them each has, and what the plan needs to know of a model for that.

    length 8, 2 ranks, folded          chunks 0 1 2 3        rank 0: 0 1 | 6 7        rank 1: 2 3 | 4 5
    the same, straight                                       rank 0: 0 1 2 3          rank 1: 4 5 6 7
    the same, striped                                        rank 0: 0 2 4 6          rank 1: 1 3 5 7

Under a causal mask token i looks at i others: of straight slices the last costs (2 n - 1) times the first. Folded, each rank has
an early chunk and the late one that makes up for it. Striped, each has its share of every stretch of neighbouring tokens: of a
window, of a document, wherever those begin.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

Span = tuple[int, int]  # the first position, and the one behind the last
STAND_IN: Span = (0, 1)  # what a rank runs besides that has too few tokens: the first one, of which nothing counts
LEAST = 2  # tokens that a rank runs: none does not go through a model, and one looks like a step of a generation


@dataclass(frozen=True)
class Deal:
    """How the tokens of a sample are dealt to `ranks`: chunks are `folded` over ranks / inner, and what each gets lies straight
    on `inner` ranks in turn. With `striped` single tokens go to those ranks / inner in turn instead.

    Any length is dealt as evenly as can be; where it is below the number of ranks, some have none. A rank that has fewer than
    two runs stand-ins behind them: nobody attends to those, and what comes out of them is dropped.
    """

    ranks: int
    inner: int = 1
    folded: bool = True
    striped: bool = False

    def spans(self, length: int, index: int) -> tuple[Span, ...]:
        """The positions that the rank at `index` has, in order."""
        outer, place = divmod(index, self.inner)
        around = self.ranks // self.inner
        mine = self._around(length, outer, around)
        return within(mine, *_piece(count_of(mine), self.inner, place))

    def count(self, length: int, index: int) -> int:
        """How many tokens that are."""
        return self.counts(length)[index]

    def counts(self, length: int) -> tuple[int, ...]:
        """How many each rank has."""
        return _counts(self, length)

    @property
    def chunks(self) -> int:
        """How many spans a rank has at most, unless tokens are `striped`."""
        return 2 if self.folded and self.ranks > self.inner else 1

    def run(self, length: int, index: int) -> int:
        """How many tokens it runs."""
        return max(LEAST, self.count(length, index))

    def together(self, length: int, index: int) -> tuple[Span, ...]:
        """The positions that the `inner` ranks round the one at `index` have among them, in order."""
        return self._around(length, index // self.inner, self.ranks // self.inner)

    def _around(self, length: int, index: int, ranks: int) -> tuple[Span, ...]:
        if self.striped and ranks > 1:
            return tuple((at, at + 1) for at in range(index, length, ranks))
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


def within(spans: Sequence[Span], first: int, last: int) -> tuple[Span, ...]:
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

    It `adds` to scores; otherwise it is one of bools. `needed`: its gradient is. `known`: the block is given it as it is, by glue
    that has made all of it on every rank.
    """

    by_row: bool = False
    by_head: bool = False
    by_query: bool = True
    adds: bool = False
    needed: bool = False
    known: bool = False


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
class Convolve:
    """One convolution in one forward, in its `module` of a visit: of token i it takes in those from i - `left` to i + `right`.

    A row has so many `tokens`, each of `width` elements as it is taken in, with so many zeros `before` and `after` them; what
    comes out has so many elements `behind` its tokens, which nobody uses. `needed`: the gradient of what it takes in is. In its
    visit `attended` calls of attention stand before it, and the layers that `called` names. Where left and right are 0 it treats
    each token by itself, or has none.
    """

    visit: str
    module: str
    tokens: int = 0
    width: int = 0
    left: int = 0
    right: int = 0
    before: int = 0
    after: int = 0
    behind: int = 0
    needed: bool = False
    attended: int = 0
    called: tuple[str, ...] = ()

    @property
    def reach(self) -> int:
        """How many other tokens it takes in for one."""
        return self.left + self.right


@dataclass(frozen=True)
class Passing:
    """How tokens go through a visit: for each tensor among what it takes in and gives out, in order, which dims are tokens.

    `slots` are where those that it takes in stand among its arguments: others may be there on another batch. `mixes` says what
    keeps it from running on some of the tokens; empty: nothing, but for attention. `whole`: every rank runs it on all of them,
    since it is given nothing but what ranks read, and goes on with its own. `takes_of` and `gives_of` say of how many tokens in
    a sample they are, 0 where a tensor has none; empty: `Tokens.length`. `within` are modules that are called with tokens of
    other rows than the visit gives out (keys of an encoder): by name, how many those are.
    """

    visit: str
    takes: tuple[tuple[int, ...], ...] = ()
    gives: tuple[tuple[int, ...], ...] = ()
    mixes: str = ""
    slots: tuple[str, ...] = ()
    whole: bool = False
    takes_of: tuple[int, ...] = ()
    gives_of: tuple[int, ...] = ()
    within: tuple[tuple[str, int], ...] = ()

    def of(self, length: int) -> "Passing":
        """The same with all said, in a model whose `Tokens.length` is this."""
        takes, gives = self.takes_of or (length,) * len(self.takes), self.gives_of or (length,) * len(self.gives)
        return replace(self, takes_of=takes, gives_of=gives)

    def runs(self, length: int) -> int:
        """Of how many tokens in a sample each rank runs some; 0: every rank runs it on all there is."""
        told = self.of(length)
        found = [*zip(told.gives, told.gives_of, strict=True), *zip(told.takes, told.takes_of, strict=True)]
        return 0 if self.whole else next((count for dims, count in found if dims), 0)


@dataclass(frozen=True)
class Together:
    """What glue brings together of tokens: behind which visit (empty: in the loss), and how many elements per sample.

    Of so many `tokens` each rank gives its own, and gets all; 0: each gives a summand, and gets the sum. `rows`: every sample has
    as many; otherwise that is all of it, whatever the number of samples. `back` are the visits in whose backwards its gradient
    goes back (empty: in that of the loss). `dtype` is its own, where that is not the job's. `into` is the visit that is given it;
    empty: glue is.
    """

    visit: str
    numel: int
    tokens: int = 0
    rows: bool = True
    back: tuple[str, ...] = ()
    dtype: str = ""
    into: str = ""


@dataclass(frozen=True)
class Tokens:
    """What a model does with tokens: so many in a sample, which `inputs` and `targets` have them (along dim 1, behind the rows).

    `met` tells what glue needs of all tokens, in order; `varies` why that is not the same for every batch (empty: it is), and
    `looks` that glue, or the loss, looks at values of a batch, so that another one may take another way. `unseen`: glue gets hold
    of memory, and nobody is told what it writes there. Tokens may begin within, where a block takes in what was made of an image.
    A sample may have rows of unlike lengths: `others` are the inputs and targets that have another number of tokens than that,
    and how many.
    """

    length: int
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    visits: tuple[Passing, ...] = ()
    attends: tuple[Attend, ...] = ()
    met: tuple[Together, ...] = ()
    varies: str = ""
    looks: bool = False
    others: tuple[tuple[str, int], ...] = ()
    convolves: tuple[Convolve, ...] = ()
    unseen: bool = False

    def count_in(self, name: str) -> int:
        """How many tokens an input or target has."""
        return dict(self.others).get(name, self.length)

    def run_by(self, visit: str, module: str = "") -> int:
        """Of how many tokens in a sample each rank runs some in a visit, or in a `module` of it; 0: every rank runs it on all."""
        return self._within.get((visit, module), self._runs.get(visit, self.length))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens the rows of a sample have, `length` first."""
        found = [self.length, *(count for _, count in self.others), *self._runs.values()]
        found += [count for attend in self.attends for count in (attend.queries, attend.keys)]
        return tuple(dict.fromkeys(filter(None, found)))

    @cached_property
    def _within(self) -> dict[tuple[str, str], int]:
        return {(passing.visit, name): count for passing in self.visits for name, count in passing.within}

    @cached_property
    def _runs(self) -> dict[str, int]:
        return {passing.visit: passing.runs(self.length) for passing in self.visits}
