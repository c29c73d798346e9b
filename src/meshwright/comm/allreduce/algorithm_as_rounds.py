"""An all-reduce algorithm as data: who sends which chunks to whom, round by round.

The tensor is cut into chunks that differ by at most one element. A *round* lists what one rank sends and
receives at the same time; the next one begins when both have ended. An algorithm is a pure function from
(number of ranks, index of a rank) to rounds: the same value is executed over send and receive
(comm/backends/run_algorithm.py), counted, estimated and drawn. What is received is either added to this
rank's chunk or replaces it.

    Round(sends=(ChunkMessage(1, (0,)),), receives=(ChunkMessage(2, (2,)),), accumulate=True)
    chunk 0 goes to the rank at index 1; chunk 2 comes from index 2 and is added to this rank's chunk 2

[Note: same bits] Every rank ends with the same bits, because each chunk is summed once, in a fixed order, by
one owner that distributes it; or by every rank from the same summands in the same order. Summands of one
round are added in rank order, this rank's in its place. A rank that added its own first would end with
different bits, and replicas would drift. Two summands need no order: a + b and b + a are the same bits.

`AllReduceAlgorithm.seconds` states costs in the usual terms: n ranks, S bytes, a latency of a seconds per
round, a bandwidth of B bytes per second out of, and at the same time into, every rank. So a rank that sends
to several ranks in one round, or receives from several, does it sequentially through one port, and pays one
latency.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

NUM_SAMPLED_RANKS = 64  # ranks at either end


@dataclass(frozen=True)
class ChunkMessage:
    """The chunks that go to, or come from, the rank at index `peer` in one round, in this order."""

    peer: int
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """The messages that one rank sends and receives at once.

    Received chunks are added if `accumulate`, else they replace the chunk. With `uses_original_operand` the
    unmodified operand is sent and added to, whatever earlier rounds have changed.
    """

    sends: tuple[ChunkMessage, ...] = ()
    receives: tuple[ChunkMessage, ...] = ()
    accumulate: bool = False
    uses_original_operand: bool = False


@dataclass(frozen=True)
class AllReduceAlgorithm(ABC):
    """The interface of an all-reduce algorithm.

    Each file states idea, picture, cost and where the textbook's O() is loose.
    """

    name: ClassVar[str]

    def __str__(self) -> str:
        return self.name

    @abstractmethod
    def num_chunks(self, size: int) -> int:
        """Returns into how many chunks the tensor is cut among `size` ranks."""

    @abstractmethod
    def rounds(self, size: int, index: int) -> tuple[Round, ...]:
        """Returns the rounds of the rank at `index` of `size`.

        Every rank has the same number, empty ones included.
        """

    @abstractmethod
    def num_rounds(self, size: int) -> int:
        """Returns the number of rounds among `size` ranks, by formula: the number of latencies."""

    @abstractmethod
    def num_sent(self, size: int, index: int, numel: int) -> int:
        """Returns the number of elements that the rank at `index` sends, exactly, for a tensor of `numel`."""

    @abstractmethod
    def seconds(self, size: int, nbytes: int, latency_s: float, bytes_per_s: float) -> float:
        """Returns the seconds by the textbook's formula.

        `latency_s` per round, `bytes_per_s` out of and into a rank.
        """

    def refusal(self, size: int) -> tuple[str, str] | None:
        """Returns why it cannot run among `size` ranks, and the fix; None when it can."""
        return None


def chunk_numel(numel: int, num_chunks: int, chunk: int) -> int:
    """Returns the number of elements of `chunk` when `numel` elements are cut into `num_chunks`."""
    return (chunk + 1) * numel // num_chunks - chunk * numel // num_chunks


def wrapped_numel(numel: int, num_chunks: int, first: int, num_selected: int) -> int:
    """Returns the number of elements of `num_selected` chunks from `first` on.

    Wrapping around after the last.
    """
    whole, end = divmod(first + num_selected, num_chunks)
    return whole * numel + end * numel // num_chunks - first * numel // num_chunks


def ceil_log2(size: int) -> int:
    """Returns the smallest k with 2^k >= `size`."""
    return (size - 1).bit_length()


@lru_cache(maxsize=1024)
def cached_rounds(algorithm: AllReduceAlgorithm, size: int, index: int) -> tuple[Round, ...]:
    """Returns the rounds of `algorithm`, cached because every step asks for the same ones."""
    return algorithm.rounds(size, index)


@lru_cache(maxsize=4096)
def cached_num_sent(algorithm: AllReduceAlgorithm, size: int, index: int, numel: int) -> int:
    """Returns the number of elements that the rank at `index` sends, by formula, cached."""
    return algorithm.num_sent(size, index, numel)


@lru_cache(maxsize=1024)
def min_max_sent(algorithm: AllReduceAlgorithm, size: int, numel: int) -> tuple[int, int]:
    """Returns the fewest and the most elements that any rank sends.

    Only the first and last `NUM_SAMPLED_RANKS` ranks are counted: roles go by index, the busiest is at index
    0, and in between ranks differ by single elements of their chunks.
    """
    indices = {*range(min(size, NUM_SAMPLED_RANKS)), *range(max(0, size - NUM_SAMPLED_RANKS), size)}
    sent = [algorithm.num_sent(size, index, numel) for index in indices]
    return min(sent), max(sent)
