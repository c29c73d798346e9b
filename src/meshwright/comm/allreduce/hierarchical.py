"""Hierarchical all-reduce: reduce-scatter inside each host, all-reduce between hosts.

All-gather inside each host. Why it works: a host of g ranks has fast links inside and one slow link out. A
ring inside each host leaves every rank with the host's sum of one slice, a g-th of the tensor. The ranks at
the same place in the k hosts own the same slice and sum it in a ring of their own; all g rings run side by
side. A second ring inside each host gathers the slices.

    k = 2 hosts of g = 2        host 0: rank 0   rank 1        host 1: rank 2   rank 3
    inside, reduce-scatter      slices  0 0+1    1 0+1                 0 2+3    1 2+3       g-1 rounds
    across, all-reduce          rank 0 <-> rank 2: slice 0     rank 1 <-> rank 3: slice 1   2 (k-1) rounds
    inside, all-gather          both 0 and 1 in both hosts                                  g-1 rounds

    rounds = 2 (g-1) + 2 (k-1)        sent per rank = (g-1)/g S + 2 (k-1)/k S/g + (g-1)/g S = 2 (n-1)/n S
    seconds = 2 (g-1 + k-1) a + 2 (n-1)/n S/B
    two kinds of links: 2 (g-1) a_in + 2 (g-1)/g S/B_in  +  2 (k-1) a_out + 2 (k-1)/k S/B_out (per host)

Cost: the ring's bytes per rank, in fewer rounds: 2 (g+k-2) where the flat ring has 2 (gk-1). Each chunk has
one owner.
Limits: the ranks of a host must be neighbours (0..g-1, g..2g-1, ...), and every host must have the same
number. The usual claim "sends g times less between hosts" compares with algorithms in which every rank talks
to other hosts. A flat ring whose ranks are ordered by host crosses each host boundary once, so its hosts send
2 (n-1)/n S: hardly more than 2 (k-1)/k S. The gain over it is rounds of slow latency (k-1 instead of n-1),
and at k = 2 up to half of the bytes.
Use: several hosts, as hierarchical/G with G ranks on each, when the links between them are slow.
Paper: Jia et al. 2018, arXiv 1807.11205 (section 3.3.2); Cho et al. 2019, "BlueConnect", MLSys
(reduce-scatter inside).
"""

from dataclasses import dataclass
from typing import ClassVar

from meshwright.comm.allreduce.algorithm_as_rounds import AllReduceAlgorithm, ChunkMessage, Round, chunk_numel


@dataclass(frozen=True)
class HierarchicalAllReduce(AllReduceAlgorithm):
    """A ring inside each host of `ranks_per_host` ranks, one across hosts for each slice.

    One inside again.
    """

    name: ClassVar[str] = "hierarchical"
    ranks_per_host: int

    def __str__(self) -> str:
        return f"{self.name}/{self.ranks_per_host}"

    def num_chunks(self, size: int) -> int:
        return size

    def rounds(self, size: int, index: int) -> tuple[Round, ...]:
        if size == 1:
            return ()
        hosts = size // self.ranks_per_host
        host, place = divmod(index, self.ranks_per_host)
        inside = [host * self.ranks_per_host + other for other in range(self.ranks_per_host)]
        across = [other * self.ranks_per_host + place for other in range(hosts)]
        slices = [tuple(range(first, first + hosts)) for first in range(0, size, hosts)]
        chunks: list[tuple[int, ...]] = [(chunk,) for chunk in slices[place]]
        return (
            *_ring_rounds(inside, place, slices, place - 1, adds=True),
            *_ring_rounds(across, host, chunks, host - 1, adds=True),
            *_ring_rounds(across, host, chunks, host, adds=False),
            *_ring_rounds(inside, place, slices, place, adds=False),
        )

    def num_rounds(self, size: int) -> int:
        return 2 * (self.ranks_per_host - 1) + 2 * (size // self.ranks_per_host - 1) if size > 1 else 0

    def num_sent(self, size: int, index: int, numel: int) -> int:
        if size == 1:
            return 0
        hosts = size // self.ranks_per_host
        host, place = divmod(index, self.ranks_per_host)
        own, right = (
            chunk_numel(numel, self.ranks_per_host, place),
            chunk_numel(numel, self.ranks_per_host, (place + 1) % self.ranks_per_host),
        )
        kept = (chunk_numel(numel, size, place * hosts + chunk % hosts) for chunk in (host, host + 1))
        return (
            2 * numel - own - right + 2 * own - sum(kept)
        )  # inside: all but what the ring keeps; across: of the own slice

    def seconds(self, size: int, nbytes: int, latency_s: float, bytes_per_s: float) -> float:
        return self.num_rounds(size) * latency_s + 2 * (size - 1) / size * nbytes / bytes_per_s

    def refusal(self, size: int) -> tuple[str, str] | None:
        if size == 1 or (1 < self.ranks_per_host < size and size % self.ranks_per_host == 0):
            return None
        fitting = [f"{self.name}/{ranks}" for ranks in range(2, size) if size % ranks == 0]
        fix = (
            f"write {' or '.join(fitting)}, or ring"
            if fitting
            else f"write ring: {size} ranks have no hosts of equal size"
        )
        if self.ranks_per_host in (1, size):
            where = "inside a host" if self.ranks_per_host == 1 else "between hosts"
            return (
                f"with {self.ranks_per_host} of {size} ranks on a host there is nothing to sum {where}",
                fix,
            )
        return f"{size} ranks are not a whole number of hosts with {self.ranks_per_host} ranks each", fix


def _ring_rounds(
    ring: list[int], at: int, parts: list[tuple[int, ...]], first: int, *, adds: bool
) -> list[Round]:
    """One pass around `ring` (indices of ranks.

    This rank is at position `at`): part `first` goes to the right, then the one before it.
    """
    num, right, left = len(ring), ring[(at + 1) % len(ring)], ring[at - 1]
    return [
        Round(
            (ChunkMessage(right, parts[(first - step) % num]),),
            (ChunkMessage(left, parts[(first - step - 1) % num]),),
            adds,
        )
        for step in range(num - 1)
    ]
