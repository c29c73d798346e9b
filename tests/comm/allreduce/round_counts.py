"""All-reduce algorithms on any number of ranks, and their rounds counted one by one, as a reference for the
formulas.
"""

from fractions import Fraction

from meshwright.comm.allreduce import FLAT_ALGORITHMS, get_algorithm
from meshwright.comm.allreduce.algorithm_as_rounds import AllReduceAlgorithm, chunk_numel

SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 16)
HOSTS = tuple(get_algorithm(f"hierarchical/{per_host}") for per_host in (2, 3, 4, 8))


def fitting(size: int) -> list[AllReduceAlgorithm]:
    """Every algorithm that runs among `size` ranks."""
    return [algorithm for algorithm in (*FLAT_ALGORITHMS, *HOSTS) if algorithm.refusal(size) is None]


CASES = [(algorithm, size) for size in SIZES for algorithm in fitting(size)]


def numels(size: int) -> list[int]:
    """Tensors that divide among `size` ranks, that do not, that are smaller, and empty."""
    return [0, 1, 2, size - 1, size, size + 1, 101, 12 * size]


def counted(algorithm: AllReduceAlgorithm, size: int, index: int, numel: int) -> int:
    """The elements of all parcels that the rank at `index` sends."""
    num = algorithm.num_chunks(size)
    parcels = [parcel for each in algorithm.rounds(size, index) for parcel in each.sends]
    return sum(chunk_numel(numel, num, chunk) for parcel in parcels for chunk in parcel.chunks)


def port_time(algorithm: AllReduceAlgorithm, size: int) -> tuple[int, Fraction]:
    """Rounds, and S/B units of time: each round lasts as long as the busiest port sends, or receives."""
    num = algorithm.num_chunks(size)
    everyone = [algorithm.rounds(size, index) for index in range(size)]
    rounds, total = 0, 0
    for same_time in zip(*everyone, strict=True):
        ways = [parcels for each in same_time for parcels in (each.sends, each.receives)]
        busiest = max(sum(len(parcel.chunks) for parcel in parcels) for parcels in ways)
        rounds, total = rounds + (busiest > 0), total + busiest
    return rounds, Fraction(total, num)
