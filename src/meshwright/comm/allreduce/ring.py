"""Ring all-reduce: a reduce-scatter around a ring, then an all-gather around it.

Why it works: the tensor is cut into n chunks. In each of the first n-1 rounds every rank sends one partial
sum to its right neighbour and adds its own summand to the one that comes from the left; after that each rank
owns one finished chunk. In n-1 more rounds the finished chunks go around once. Every link carries one chunk
in every round; none is idle.

    n = 3     rank 0          rank 1          rank 2             (a0 = chunk a of rank 0)
    scatter   sends c0 -> 1   sends a1 -> 2   sends b2 -> 0
              sends b2+b0     sends c0+c1     sends a1+a2
    gather    owns a          owns b          owns c             then n-1 rounds of copies

    rounds = 2 (n-1)        sent per rank = 2 (n-1)/n S        seconds = 2 (n-1) a + 2 (n-1)/n S/B

Cost: the fewest bytes possible, in the most rounds: 2 (n-1) latencies. A chunk is summed in the order in
which it passes the ranks; all ranks receive its owner's sum.
Limits: for short messages the latency decides, and it grows with n. The textbook's "independent of n" is true
of the bytes only. The slowest link limits all.
Use: long messages.
Paper: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC
69 (section 3).
"""

from dataclasses import dataclass
from typing import ClassVar

from meshwright.comm.allreduce.algorithm_as_rounds import AllReduceAlgorithm, ChunkMessage, Round, chunk_numel


@dataclass(frozen=True)
class RingAllReduce(AllReduceAlgorithm):
    """2 (n-1) rounds of one chunk each, to the right neighbour."""

    name: ClassVar[str] = "ring"

    def num_chunks(self, size: int) -> int:
        return size

    def rounds(self, size: int, index: int) -> tuple[Round, ...]:
        right, left = (index + 1) % size, (index - 1) % size
        collect = [self._round(size, right, left, index - 1 - step, adds=True) for step in range(size - 1)]
        hand_out = [self._round(size, right, left, index - step, adds=False) for step in range(size - 1)]
        return (*collect, *hand_out)

    def num_rounds(self, size: int) -> int:
        return 2 * (size - 1)

    def num_sent(self, size: int, index: int, numel: int) -> int:
        # every chunk is sent twice, except this rank's in the first pass, the right neighbour's in the second
        kept = chunk_numel(numel, size, index) + chunk_numel(numel, size, (index + 1) % size)
        return 2 * numel - kept if size > 1 else 0

    def seconds(self, size: int, nbytes: int, latency_s: float, bytes_per_s: float) -> float:
        return 2 * (size - 1) * (latency_s + nbytes / size / bytes_per_s)

    def _round(self, size: int, right: int, left: int, chunk: int, *, adds: bool) -> Round:
        """`chunk` goes to the right; the one before it comes from the left."""
        return Round(
            (ChunkMessage(right, (chunk % size,)),), (ChunkMessage(left, ((chunk - 1) % size,)),), adds
        )
