"""Reduce to a root and broadcast (`reduce_broadcast`).

One rank gathers all operands, adds them up, and sends the sum to all. Why it works: there is one sum,
computed in one place, in rank order. Every other rank gets a copy of it.

    n = 3     gather                broadcast
              rank 1 -> 0 <- 2      rank 1 <- 0 -> 2

    rounds = 2        sent per rank = S, by the root (n-1) S        seconds = 2 (a + (n-1) S/B)

Cost: two rounds for any n, and the root's port carries (n-1) S each way: the busiest rank sends n/2 times
what each rank of a ring sends. The root keeps (n-1) S of received operands until they are added.
Limits: "two rounds" counts latencies, not time: all n-1 operands pass the root's one port one after the
other. `tree` also has one owner, and shares the root's load with others.
Use: messages so short that only latency counts, among few ranks; or to see what a single master costs.
Paper: Chan et al. 2007, "Collective communication: theory, practice, and experience", CCPE 19 (gather,
broadcast).
"""

from dataclasses import dataclass
from typing import ClassVar

from meshwright.comm.allreduce.algorithm_as_rounds import AllReduceAlgorithm, ChunkMessage, Round

ROOT, WHOLE_TENSOR = 0, (0,)


@dataclass(frozen=True)
class ReduceBroadcastAllReduce(AllReduceAlgorithm):
    """Two rounds: all to the rank at index 0, and the sum back to all."""

    name: ClassVar[str] = "reduce_broadcast"

    def num_chunks(self, size: int) -> int:
        return 1

    def rounds(self, size: int, index: int) -> tuple[Round, ...]:
        if size == 1:
            return ()
        if index == ROOT:
            others = tuple(ChunkMessage(other, WHOLE_TENSOR) for other in range(size) if other != ROOT)
            return Round(receives=others, accumulate=True), Round(sends=others)
        to_root = (ChunkMessage(ROOT, WHOLE_TENSOR),)
        return Round(sends=to_root, accumulate=True), Round(receives=to_root)

    def num_rounds(self, size: int) -> int:
        return 2 if size > 1 else 0

    def num_sent(self, size: int, index: int, numel: int) -> int:
        return (size - 1) * numel if index == ROOT else numel

    def seconds(self, size: int, nbytes: int, latency_s: float, bytes_per_s: float) -> float:
        return self.num_rounds(size) * (latency_s + (size - 1) * nbytes / bytes_per_s)
