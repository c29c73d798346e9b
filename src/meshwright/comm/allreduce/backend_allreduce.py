"""The backend's own all-reduce: one call, and the transport decides how.

Why it is the default: it runs in compiled code, without Python in each round, and may know its links. gloo
runs a ring in segments, NCCL a ring or a tree by message size; shared memory is summed in place; of ranks
that are threads the last one to arrive computes the sum.

    n = 3     rank 0    rank 1    rank 2
              [ gloo | NCCL | shared memory | threads ]          one call on every rank

    modelled as the ring:
    rounds = 2 (n-1)        sent per rank = 2 (n-1)/n S        seconds = 2 (n-1) a + 2 (n-1)/n S/B

Cost: counted and estimated as the ring, the fewest bytes possible. The real cost has to be measured.
Limits: the transport decides who sends what to whom and the order of summation; another version, or another
number of ranks per host, may give other bits. The transport also has to guarantee that all ranks end with the
same bits. To be certain, choose an algorithm by name. On a CPU its latency differs from that of plain
messages: measure short ones.
Use: by default; on GPUs always, unless measured otherwise.
Paper: Gloo, docs/algorithms.md (ring); Hu et al. 2025, "Demystifying NCCL", arXiv 2507.04786 (its ring and
its tree).
"""

from dataclasses import dataclass
from typing import ClassVar

from meshwright.comm.allreduce.algorithm_as_rounds import AllReduceAlgorithm, Round
from meshwright.comm.allreduce.ring import RingAllReduce


@dataclass(frozen=True)
class BackendAllReduce(AllReduceAlgorithm):
    """Counted and estimated as the ring; the transport runs its own algorithm."""

    name: ClassVar[str] = "backend"

    def num_chunks(self, size: int) -> int:
        return RingAllReduce().num_chunks(size)

    def rounds(self, size: int, index: int) -> tuple[Round, ...]:
        return RingAllReduce().rounds(size, index)

    def num_rounds(self, size: int) -> int:
        return RingAllReduce().num_rounds(size)

    def num_sent(self, size: int, index: int, numel: int) -> int:
        return RingAllReduce().num_sent(size, index, numel)

    def seconds(self, size: int, nbytes: int, latency_s: float, bytes_per_s: float) -> float:
        return RingAllReduce().seconds(size, nbytes, latency_s, bytes_per_s)
