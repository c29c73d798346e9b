"""Naive all-reduce: n reduces, one root after another, as lectures draw it.

Why it works: a reduce brings the sum to one rank, its root. Repeated for every rank, it is an all-reduce. In
the round of root r all others send their original operand to r, which adds everything up in rank order. So
each rank computes the sum for itself, from the same summands in the same order, and all end with the same
bits.

    n = 3     round 0             round 1             round 2
              rank 1 -> 0 <- 2    rank 0 -> 1 <- 2    rank 0 -> 2 <- 1

    rounds = n        sent per rank = (n-1) S        seconds = n (a + (n-1) S/B)

Cost: n/2 times the ring's bytes, one port at a time: each round takes as long as its root's port needs for
(n-1) S while the other ports receive nothing. n S of additional memory: what arrives, and the original
operand, which is still to be sent.
Limits: it is here to be drawn and measured. "O(n) reduces" hides a second n: each of them costs (n-1) S/B at
its root. Running the rounds in sequence is what makes it naive: all at once they are the direct exchange
(`one_shot`).
Use: to see what the others save.
Paper: Chan et al. 2007, "Collective communication: theory, practice, and experience", CCPE 19 (reduce and its
costs).
"""

from dataclasses import dataclass
from typing import ClassVar

from meshwright.comm.allreduce.algorithm_as_rounds import AllReduceAlgorithm, ChunkMessage, Round

WHOLE_TENSOR = (0,)


@dataclass(frozen=True)
class NaiveAllReduce(AllReduceAlgorithm):
    """n rounds: in round r every other rank sends its whole operand to rank r."""

    name: ClassVar[str] = "naive"

    def num_chunks(self, size: int) -> int:
        return 1

    def rounds(self, size: int, index: int) -> tuple[Round, ...]:
        if size == 1:
            return ()
        others = tuple(ChunkMessage(other, WHOLE_TENSOR) for other in range(size) if other != index)
        as_root = Round(receives=others, accumulate=True, uses_original_operand=True)
        return tuple(
            as_root
            if root == index
            else Round(sends=(ChunkMessage(root, WHOLE_TENSOR),), uses_original_operand=True)
            for root in range(size)
        )

    def num_rounds(self, size: int) -> int:
        return size if size > 1 else 0

    def num_sent(self, size: int, index: int, numel: int) -> int:
        return (size - 1) * numel

    def seconds(self, size: int, nbytes: int, latency_s: float, bytes_per_s: float) -> float:
        return self.num_rounds(size) * (latency_s + (size - 1) * nbytes / bytes_per_s)
