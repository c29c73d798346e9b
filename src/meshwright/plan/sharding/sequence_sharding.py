"""Assigns the tokens of a sequence to ranks: zigzag, striped or contiguous.

    length 8, 2 ranks, zigzag          chunks 0 1 2 3        rank 0: 0 1 | 6 7        rank 1: 2 3 | 4 5
    the same, contiguous                                     rank 0: 0 1 2 3          rank 1: 4 5 6 7
    the same, striped                                        rank 0: 0 2 4 6          rank 1: 1 3 5 7

Under a causal mask token i attends to i others, so the last of n contiguous shards costs (2 n - 1) times the
first. With zigzag, each rank has an early chunk and the late chunk that balances it. Striped, each rank has a
share of every range of neighbouring tokens, which also balances sliding windows and packed documents.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

TokenRange = tuple[int, int]  # the first position, and the end
PADDING_RANGE: TokenRange = (0, 1)  # padding repeats the first token; its outputs are dropped
MIN_TOKENS = 2  # a model cannot run on no token, and takes a single one for a step of generation


@dataclass(frozen=True)
class SequenceSharding:
    """The assignment of the tokens of a sequence to `num_ranks` ranks.

    The sequence is split over num_ranks / num_inner_ranks groups, in `zigzag` order (an early and a late
    chunk each), or token by token if `striped`; within a group, `num_inner_ranks` ranks get contiguous
    pieces. Any length is split as evenly as possible; a sequence shorter than the number of ranks leaves some
    without tokens. A rank with fewer than two tokens appends padding tokens: no token attends to them, and
    their outputs are dropped.
    """

    num_ranks: int
    num_inner_ranks: int = 1
    zigzag: bool = True
    striped: bool = False

    def token_ranges(self, length: int, index: int) -> tuple[TokenRange, ...]:
        """Returns the position ranges of rank `index`, in order."""
        outer, inner_index = divmod(index, self.num_inner_ranks)
        num_groups = self.num_ranks // self.num_inner_ranks
        ranges = self._outer_ranges(length, outer, num_groups)
        return select_positions(ranges, *_piece(num_positions(ranges), self.num_inner_ranks, inner_index))

    def num_tokens(self, length: int, index: int) -> int:
        """Returns the number of tokens of rank `index`."""
        return self.num_tokens_by_rank(length)[index]

    def num_tokens_by_rank(self, length: int) -> tuple[int, ...]:
        """Returns the number of tokens of every rank."""
        return _counts(self, length)

    @property
    def max_ranges(self) -> int:
        """The largest number of ranges of a rank, if not `striped`."""
        return 2 if self.zigzag and self.num_ranks > self.num_inner_ranks else 1

    def num_padded_tokens(self, length: int, index: int) -> int:
        """Returns the number of tokens that rank `index` runs, padding included."""
        return max(MIN_TOKENS, self.num_tokens(length, index))

    def inner_group_ranges(self, length: int, index: int) -> tuple[TokenRange, ...]:
        """Returns the position ranges of all inner ranks in the group of rank `index`, in order."""
        return self._outer_ranges(
            length, index // self.num_inner_ranks, self.num_ranks // self.num_inner_ranks
        )

    def _outer_ranges(self, length: int, index: int, num_ranks: int) -> tuple[TokenRange, ...]:
        if self.striped and num_ranks > 1:
            return tuple((at, at + 1) for at in range(index, length, num_ranks))
        if not self.zigzag or num_ranks == 1:
            return tuple(
                token_range
                for token_range in (_piece(length, num_ranks, index),)
                if token_range[0] < token_range[1]
            )
        counts = [
            end - begin for begin, end in (_piece(length, num_ranks, each) for each in range(num_ranks))
        ]
        first = sum((each + 1) // 2 for each in counts[:index])
        last = length - sum(each // 2 for each in counts[:index])
        early, late = (first, first + (counts[index] + 1) // 2), (last - counts[index] // 2, last)
        if early[1] == late[0]:
            early, late = (early[0], late[1]), (late[1], late[1])
        return tuple(token_range for token_range in (early, late) if token_range[0] < token_range[1])


def num_positions(spans: Iterable[TokenRange]) -> int:
    """Returns the number of positions in `spans`."""
    return sum(end - begin for begin, end in spans)


def with_padding(spans: tuple[TokenRange, ...]) -> tuple[TokenRange, ...]:
    """Returns the ranges `spans` and the padding ranges after them."""
    return (*spans, *[PADDING_RANGE] * (MIN_TOKENS - num_positions(spans)))


@lru_cache(maxsize=256)  # attention asks for it in every call
def _counts(sequence_sharding: SequenceSharding, length: int) -> tuple[int, ...]:
    return tuple(
        num_positions(sequence_sharding.token_ranges(length, index))
        for index in range(sequence_sharding.num_ranks)
    )


def _piece(length: int, num_chunks: int, index: int) -> TokenRange:
    return length * index // num_chunks, length * (index + 1) // num_chunks


def select_positions(spans: Sequence[TokenRange], first: int, last: int) -> tuple[TokenRange, ...]:
    """Returns the positions number `first` to `last` of those in `spans`, as ranges."""
    found, before = [], 0
    for begin, end in spans:
        low, high = max(begin, begin + first - before), min(end, begin + last - before)
        if low < high:
            found.append((low, high))
        before += end - begin
    return tuple(found)
