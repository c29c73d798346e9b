"""One-shot all-reduce (`one_shot`): direct exchange.

Every rank sends its operand to every other rank, and each adds up all of them. Why it works: after one
exchange every rank has all n operands. All add them in rank order, so all get the same bits, though each
computes its own sum. A rank that began with its own operand would get other bits than its neighbour: a + b
equals b + a, but (a + b) + c does not equal a + (b + c).

    n = 3     rank 0 -> 1, 2      rank 1 -> 0, 2      rank 2 -> 0, 1          one round
              a0 + a1 + a2        a0 + a1 + a2        a0 + a1 + a2            on each

    rounds = 1        sent per rank = (n-1) S        seconds = a + (n-1) S/B through one port

Cost: one latency, the fewest possible; n/2 times the ring's bytes, n times its additions, and (n-1) S of
receive buffers.
Limits: "one round" is short only if all n-1 links of a rank run at once, as on a full mesh of links. Behind
one network card, or one memory bus, the operands leave one after the other, and the time grows with n.
Use: short messages among few ranks; any message where every pair of ranks has a link of its own.
Paper: Bruck et al. 1997, "Efficient algorithms for all-to-all communications", IEEE TPDS 8 (rounds against
bytes).
"""

from dataclasses import dataclass
from typing import ClassVar

from meshwright.comm.allreduce.algorithm_as_rounds import AllReduceAlgorithm, ChunkMessage, Round


@dataclass(frozen=True)
class OneShotAllReduce(AllReduceAlgorithm):
    """One round: the whole operand to all others."""

    name: ClassVar[str] = "one_shot"

    def num_chunks(self, size: int) -> int:
        return 1

    def rounds(self, size: int, index: int) -> tuple[Round, ...]:
        others = tuple(ChunkMessage(other, (0,)) for other in range(size) if other != index)
        return (Round(others, others, accumulate=True),) if others else ()

    def num_rounds(self, size: int) -> int:
        return 1 if size > 1 else 0

    def num_sent(self, size: int, index: int, numel: int) -> int:
        return (size - 1) * numel

    def seconds(self, size: int, nbytes: int, latency_s: float, bytes_per_s: float) -> float:
        return self.num_rounds(size) * latency_s + (size - 1) * nbytes / bytes_per_s
