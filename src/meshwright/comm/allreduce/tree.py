"""Tree all-reduce: a reduce up a binomial tree to rank 0, and a broadcast down the same tree.

Why it works: in round k of the reduce the ranks whose lowest set bit is k send their sum to the rank 2^k
below and are done; the number of active ranks halves each time. The broadcast is the same, backwards. There
is one sum, computed at rank 0: all ranks get its bits.

    n = 5     round 0          round 1     round 2     and back: round 3 is 2, round 4 is 1, round 5 is 0
              1 -> 0  3 -> 2   2 -> 0      4 -> 0

    rounds = 2 ceil(log2 n)   sent per rank = S to its parent and each child   seconds = 2 ceil(log2 n) (a +
                                                                               S/B)

Cost: 2 ceil(log2 n) rounds at any n, no power of two needed. In all 2 (n-1) S pass the links, as in a ring;
but rank 0 sends ceil(log2 n) S and half of the ranks only S.
Limits: "O(log n)" counts rounds of the whole tensor, S/B each: for long messages log2 n times the ring's
time. Half of the ranks are idle after the first round. `recursive_doubling` takes half of the rounds, or two
more than that where n is no power of two, by keeping all ports busy; a tree sends less in all.
Use: short messages among ranks that share their links.
Paper: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH",
IJHPCA 19 (binomial trees, 4.2 and 4.5).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from meshwright.comm.allreduce.algorithm_as_rounds import AllReduceAlgorithm, ChunkMessage, Round, ceil_log2


@dataclass(frozen=True)
class TreeAllReduce(AllReduceAlgorithm):
    """ceil(log2 n) rounds of the whole tensor up to the rank at index 0, and as many down."""

    name: ClassVar[str] = "tree"

    def num_chunks(self, size: int) -> int:
        return 1

    def rounds(self, size: int, index: int) -> tuple[Round, ...]:
        up = tuple(self._reduce_rounds(size, index))
        down = tuple(Round(sends=each.receives, receives=each.sends) for each in reversed(up))
        return (*up, *down)

    def num_rounds(self, size: int) -> int:
        return 2 * ceil_log2(size)

    def num_sent(self, size: int, index: int, numel: int) -> int:
        above = index & -index if index else size  # a child is nearer than the parent
        children = sum(1 << bit < above and index + (1 << bit) < size for bit in range(ceil_log2(size)))
        return (children + (index > 0)) * numel

    def seconds(self, size: int, nbytes: int, latency_s: float, bytes_per_s: float) -> float:
        return self.num_rounds(size) * (latency_s + nbytes / bytes_per_s)

    def _reduce_rounds(self, size: int, index: int) -> Iterator[Round]:
        for bit in range(ceil_log2(size)):
            far = 1 << bit
            if index % (2 * far) == far:
                yield Round(sends=(ChunkMessage(index - far, (0,)),), accumulate=True)
            elif index % (2 * far) == 0 and index + far < size:
                yield Round(receives=(ChunkMessage(index + far, (0,)),), accumulate=True)
            else:
                yield Round(accumulate=True)
