"""The backend's own all-reduce: one call, and the transport decides how.

Why it is the default: it runs in compiled code, without a turn of Python per round, and may know its links: gloo plays a ring
in segments, NCCL a ring or a tree by size, memory shared on one host is summed in place, ranks that are threads are summed
by the last to come.

    n = 3     rank 0    rank 1    rank 2
              [ gloo | NCCL | shared memory | threads ]          one call on every rank

    stated as the ring's:
    rounds = 2 (n-1)        sent per rank = 2 (n-1)/n S        seconds = 2 (n-1) a + 2 (n-1)/n S/B

Cost: booked and priced as the ring's, the least bytes that there can be. What it really costs has to be measured.
Limits: who sends what to whom, and in which order summands are added, is the transport's; another version, or another number
of ranks on a host, may give other bits. That all ranks end with the same bits is the transport's promise too. Whoever wants
to know picks an algorithm by name. On a CPU its latency is not that of plain messages: measure before taking it for short ones.
Use: by default; on GPUs always, unless measured otherwise.
Paper: Gloo, docs/algorithms.md (ring); Hu et al. 2025, "Demystifying NCCL", arXiv 2507.04786 (its ring and its tree).
"""

from dataclasses import dataclass
from typing import ClassVar

from meshwright.comm.algorithms.ring import RingAllReduce
from meshwright.comm.algorithms.schedule import AllReduceAlgorithm, Round


@dataclass(frozen=True)
class BackendAllReduce(AllReduceAlgorithm):
    """Counted and priced as the ring; what is played is the transport's own."""

    name: ClassVar[str] = "backend"

    def num_pieces(self, size: int) -> int:
        return RingAllReduce().num_pieces(size)

    def rounds(self, size: int, index: int) -> tuple[Round, ...]:
        return RingAllReduce().rounds(size, index)

    def num_rounds(self, size: int) -> int:
        return RingAllReduce().num_rounds(size)

    def num_sent(self, size: int, index: int, numel: int) -> int:
        return RingAllReduce().num_sent(size, index, numel)

    def seconds(self, size: int, nbytes: int, latency_s: float, bytes_per_s: float) -> float:
        return RingAllReduce().seconds(size, nbytes, latency_s, bytes_per_s)
