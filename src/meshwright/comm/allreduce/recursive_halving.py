"""Recursive halving and doubling.

A reduce-scatter that halves what is left in each round, then the same rounds backwards. Why it works: the
tensor is cut into n chunks. s counts the chunks that a rank still sums: at first all n, its own and the
following ones around the circle. In each round s becomes s' = ceil(s/2): the chunks s' .. s-1 places ahead go
to the rank s' places ahead, for which they are the nearest; it adds them. After ceil(log2 n) rounds every
rank holds one finished chunk, its own. The same rounds backwards, copying instead of adding, distribute the
chunks.

    n = 5     rank 0, reduce-scatter                 (rank r does the same, r places ahead)
    s = 5     chunks 3 4 -> rank 3     0 1 added from rank 2        (every message goes s' places ahead)
    s = 3     chunk 2    -> rank 2     0 added from rank 3
    s = 2     chunk 1    -> rank 1     0 added from rank 4           rank 0 owns chunk 0
    gather    the same three rounds, backwards: 0 -> 4, 0 -> 3, 0 1 -> 2

    rounds = 2 ceil(log2 n)      sent per rank = 2 (n-1)/n S      seconds = 2 ceil(log2 n) a + 2 (n-1)/n S/B

Cost: the bytes of a ring in 2 ceil(log2 n) rounds, at any n. Only the rounds are logarithmic, not the bytes.
The first round sends half of the tensor, the last one chunk. Chunks that wrap around the end of the circle
are packed. Rabenseifner's butterfly exchanges with the rank at index xor n/2, n/4 ... instead: at powers of
two the same rounds and bytes; at other n it must fold ranks as recursive doubling does, and send S more. Here
no rank is special.
Limits: half of the tensor goes half way around the circle at once. On links that all ranks share, or between
hosts, the ring and the hierarchical algorithm load the slow links less. Each element is summed in ceil(log2
n) steps, in an order that depends on its chunk.
Use: medium and long messages, the more so the more ranks.
Paper: Traff 2024, arXiv 2410.14234 (algorithms 1 and 2); Rabenseifner 2004, "Optimization of collective
reduction operations".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from meshwright.comm.allreduce.algorithm_as_rounds import (
    AllReduceAlgorithm,
    ChunkMessage,
    Round,
    ceil_log2,
    chunk_numel,
    wrapped_numel,
)


@dataclass(frozen=True)
class RecursiveHalvingAllReduce(AllReduceAlgorithm):
    """ceil(log2 n) rounds that each send half of the remaining chunks, and as many rounds back."""

    name: ClassVar[str] = "recursive_halving"

    def num_chunks(self, size: int) -> int:
        return size

    def rounds(self, size: int, index: int) -> tuple[Round, ...]:
        collect, hand_out = [], []
        for left, kept in _halving_counts(size):
            ahead, behind = (index + kept) % size, (index - kept) % size
            far = ChunkMessage(ahead, _wrapped_chunks(size, index + kept, left - kept))
            near = ChunkMessage(behind, _wrapped_chunks(size, index, left - kept))
            collect.append(Round((far,), (near,), accumulate=True))
            hand_out.append(Round((near,), (far,)))
        return (*collect, *reversed(hand_out))

    def num_rounds(self, size: int) -> int:
        return 2 * ceil_log2(size)

    def num_sent(self, size: int, index: int, numel: int) -> int:
        collected = numel - chunk_numel(numel, size, index)  # every chunk but the own one leaves once
        return collected + sum(
            wrapped_numel(numel, size, index, left - kept) for left, kept in _halving_counts(size)
        )

    def seconds(self, size: int, nbytes: int, latency_s: float, bytes_per_s: float) -> float:
        return self.num_rounds(size) * latency_s + 2 * (size - 1) / size * nbytes / bytes_per_s


def _halving_counts(size: int) -> Iterator[tuple[int, int]]:
    """The numbers of chunks before and after each round: 5 -> 3, 3 -> 2, 2 -> 1."""
    left = [size]
    while left[-1] > 1:
        left.append((left[-1] + 1) // 2)
    return pairwise(left)


def _wrapped_chunks(size: int, first: int, num: int) -> tuple[int, ...]:
    return tuple((first + step) % size for step in range(num))
