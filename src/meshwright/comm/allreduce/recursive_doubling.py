"""Recursive doubling: partners exchange whole sums.

Each exchange doubles the number of ranks that a sum covers. Why it works: in round k the partners are 2^k
apart (their indices differ in bit k alone). Before it, the 2^k ranks of a group hold the sum over that group;
afterwards the 2^(k+1) ranks of both groups hold the sum over both. Partners add the same two summands, and a
+ b equals b + a to the bit, so all ranks of a group hold the same bits after every round.

    n = 4     round 0              round 1              n = 5: rank 4 adds into rank 0 first,
              0 <-> 1  2 <-> 3     0 <-> 2  1 <-> 3     and gets the sum afterwards

    at powers of two: rounds = log2 n        sent per rank = S log2 n        seconds = log2 n (a + S/B)

Any n: let p be the largest power of two not above n. The n - p ranks above it first send their operands to
the first n - p ranks, the p ranks run the algorithm, and the sum is sent back: two more rounds of S, for
which all wait. A rank that takes in another one sends S more; a rank that is taken in sends S in all.
Cost: the fewest rounds with one partner per rank and round; log2 n times the operand.
Limits: for short messages. The bytes grow with log2 n; those of the ring and of recursive halving stay below
2 S, so these win above some size. Just above a power of two it costs most: 5 ranks take 4 rounds, 4 ranks
take 2.
Use: short messages.
Paper: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH",
IJHPCA 19 (4.4).
"""

from dataclasses import dataclass
from typing import ClassVar

from meshwright.comm.allreduce.algorithm_as_rounds import AllReduceAlgorithm, ChunkMessage, Round


@dataclass(frozen=True)
class RecursiveDoublingAllReduce(AllReduceAlgorithm):
    """log2 n rounds of the whole tensor, with the rank at index xor 1, 2, 4 ..."""

    name: ClassVar[str] = "recursive_doubling"

    def num_chunks(self, size: int) -> int:
        return 1

    def rounds(self, size: int, index: int) -> tuple[Round, ...]:
        power, extra, swaps = _power_of_two_split(size)
        if index >= power:
            host = _whole_tensor_with(index - power)
            return Round(sends=host, accumulate=True), *[Round(accumulate=True)] * swaps, Round(receives=host)
        doubling = [_whole_tensor_with(index ^ (1 << bit)) for bit in range(swaps)]
        inner = tuple(Round(partner, partner, accumulate=True) for partner in doubling)
        if not extra:
            return inner
        guest = _whole_tensor_with(index + power) if index < extra else ()
        return Round(receives=guest, accumulate=True), *inner, Round(sends=guest)

    def num_rounds(self, size: int) -> int:
        _, extra, swaps = _power_of_two_split(size)
        return swaps + (2 if extra else 0)

    def num_sent(self, size: int, index: int, numel: int) -> int:
        power, extra, swaps = _power_of_two_split(size)
        return numel if index >= power else (swaps + (index < extra)) * numel

    def seconds(self, size: int, nbytes: int, latency_s: float, bytes_per_s: float) -> float:
        return self.num_rounds(size) * (latency_s + nbytes / bytes_per_s)


def _power_of_two_split(size: int) -> tuple[int, int, int]:
    """The largest power of two not above `size`, the number of ranks above it, and log2 of that power."""
    swaps = size.bit_length() - 1
    return 1 << swaps, size - (1 << swaps), swaps


def _whole_tensor_with(peer: int) -> tuple[ChunkMessage, ...]:
    return (ChunkMessage(peer, (0,)),)
