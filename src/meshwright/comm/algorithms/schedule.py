"""An all-reduce algorithm as data: who sends which pieces to whom, round by round.

The tensor is cut into pieces that differ by at most one element. A *round* says what one rank sends and receives at the same
time; the next begins when both have ended. An algorithm is a pure function from (number of ranks, index of a rank) to rounds:
the same value is played over send and receive (comm/rounds.py), counted, priced and drawn. What is received is either added to
this rank's piece or put in its place.

    Round(sends=(Parcel(1, (0,)),), receives=(Parcel(2, (2,)),), adds=True)
    piece 0 goes to the rank at index 1; piece 2 comes from index 2 and is added to the own one

[Note: same bits] Every rank ends with the same bits, because each piece is summed once, in a fixed order, by one owner who
hands it on; or by everyone from the same summands in the same order. Summands of one round are added in the order of their
ranks, the own one in its place. A rank that added its own first would end with bits of its own, and replicas would drift.
Two summands need no order: a + b and b + a are the same bits.

Costs are stated in `Algorithm.seconds` in the usual terms: n ranks, S bytes, a latency a in seconds per round, a bandwidth of
B bytes per second out of, and at the same time into, every rank. So whoever sends to several ranks in one round, or receives
from several, does it one behind the other through one port, and pays one latency.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

NUM_SAMPLED_RANKS = 64  # ranks at either end


@dataclass(frozen=True)
class PieceMessage:
    """What goes to, or comes from, the rank at index `peer` in one round: pieces, in this order."""

    peer: int
    pieces: tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """What one rank sends and receives at once. Received pieces are added, or put in place where `adds` is false.

    With `fresh`, the operand as it came is sent and added to, whatever earlier rounds have made of it.
    """

    sends: tuple[PieceMessage, ...] = ()
    receives: tuple[PieceMessage, ...] = ()
    accumulate: bool = False
    uses_original_operand: bool = False


@dataclass(frozen=True)
class AllReduceAlgorithm(ABC):
    """One way to all-reduce. Its file states idea, picture, cost and where the textbook's O() is loose."""

    name: ClassVar[str]

    def __str__(self) -> str:
        return self.name

    @abstractmethod
    def num_pieces(self, size: int) -> int:
        """Into how many pieces the tensor is cut among `size` ranks."""

    @abstractmethod
    def rounds(self, size: int, index: int) -> tuple[Round, ...]:
        """What the rank at `index` of `size` does; as many rounds on every rank, empty ones included."""

    @abstractmethod
    def num_rounds(self, size: int) -> int:
        """The rounds among `size` ranks, by formula: how often the latency is paid."""

    @abstractmethod
    def num_sent(self, size: int, index: int, numel: int) -> int:
        """The elements that leave the rank at `index` for a tensor of `numel` elements, by formula, exactly."""

    @abstractmethod
    def seconds(self, size: int, nbytes: int, latency_s: float, bytes_per_s: float) -> float:
        """The time by the textbook's formula: a round costs `latency_s`, and a rank sends and receives `bytes_per_s`."""

    def refusal(self, size: int) -> tuple[str, str] | None:
        """Why it cannot run among `size` ranks, and the repair; None when it can."""
        return None


def piece_numel(numel: int, num_pieces: int, piece: int) -> int:
    """The elements of `piece` when `numel` are cut into `num_pieces`."""
    return (piece + 1) * numel // num_pieces - piece * numel // num_pieces


def wrapped_numel(numel: int, num_pieces: int, first: int, num_selected: int) -> int:
    """The elements of `num` pieces from `first` on, going round behind the last."""
    whole, end = divmod(first + num_selected, num_pieces)
    return whole * numel + end * numel // num_pieces - first * numel // num_pieces


def ceil_log2(size: int) -> int:
    """The smallest k with 2^k >= `size`: how often the number of those who know can double."""
    return (size - 1).bit_length()


@lru_cache(maxsize=1024)
def cached_rounds(algorithm: AllReduceAlgorithm, size: int, index: int) -> tuple[Round, ...]:
    """The rounds of `algorithm`, remembered: a step asks for the same ones again and again."""
    return algorithm.rounds(size, index)


@lru_cache(maxsize=4096)
def cached_num_sent(algorithm: AllReduceAlgorithm, size: int, index: int, numel: int) -> int:
    """The elements that the rank at `index` sends: by the formula, to which tests hold every round; remembered."""
    return algorithm.num_sent(size, index, numel)


@lru_cache(maxsize=1024)
def min_max_sent(algorithm: AllReduceAlgorithm, size: int, numel: int) -> tuple[int, int]:
    """The elements that the rank which sends least sends, and the one which sends most; of the first and the last `ASKED` ranks.

    Roles go by index, and the busiest is at index 0; in between, ranks differ by the odd elements of their pieces.
    """
    indices = {*range(min(size, NUM_SAMPLED_RANKS)), *range(max(0, size - NUM_SAMPLED_RANKS), size)}
    sent = [algorithm.num_sent(size, index, numel) for index in indices]
    return min(sent), max(sent)
