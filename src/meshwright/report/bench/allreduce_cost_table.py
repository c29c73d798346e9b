"""The textbook's table of all-reduce algorithms, counted at every n and timed where it was measured."""

from fractions import Fraction
from math import lcm

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.comm.allreduce import ALGORITHMS, BACKEND, get_algorithm
from meshwright.comm.allreduce.algorithm_as_rounds import AllReduceAlgorithm, cached_num_sent
from meshwright.comm.tuning.network_fit import fit_alpha_beta
from meshwright.plan.hardware.measured_cluster import Cluster
from meshwright.plan.job.errors import format_nbytes
from meshwright.report.table import Column, Table

FORMULA_ALGORITHMS = tuple(name for name in ALGORITHMS if name != BACKEND)
MAX_NUM_RANKS = 9
COMMON_CLAIMS = (
    '"Naive is O(n)": it has n rounds, and each of them costs (n-1) S/B at its root: n (n-1) S/B.',
    '"Root takes two rounds": of latency. All n-1 operands pass the port of one rank, twice.',
    (
        '"Ring does not depend on n": its bytes do not (2 (n-1)/n S, never more than 2 S). Its '
        "latency does: 2 (n-1) rounds."
    ),
    (
        '"Parallel takes one round": if every rank has n-1 links. Behind one port, or one memory, '
        "(n-1) S leave one after the other."
    ),
    (
        '"Halving is O(log n)": in rounds. Its bytes are those of the ring, and those of doubling '
        "and tree are S times log n."
    ),
    (
        "Of two algorithms with equal bytes the one with fewer rounds wins for short messages; of "
        "long messages only bytes count."
    ),
    (
        "On one host the ranks share cores and memory: there, what counts is the bytes of all ranks "
        "together, not of each."
    ),
)


def allreduce_view(cluster: Cluster) -> RenderableType:
    """Returns the counts at 2 to 9 ranks, the measured times beside the formula's, and common claims."""
    return Group(
        counts_table(),
        *(_timing_table(cluster, ranks) for ranks in cluster.ranks),
        Text("\nCommon claims, made precise", style="bold"),
        *(Text(f"- {line}") for line in COMMON_CLAIMS),
    )


def round_counts(algorithm: AllReduceAlgorithm, num_ranks: int) -> tuple[int, Fraction, Fraction]:
    """Returns the rounds, and the bytes of the busiest rank and of all ranks.

    As multiples of the tensor's.
    """
    numel = lcm(*range(1, MAX_NUM_RANKS + 1))  # every cut is even
    sent = [
        Fraction(cached_num_sent(algorithm, num_ranks, index, numel), numel) for index in range(num_ranks)
    ]
    return algorithm.num_rounds(num_ranks), max(sent), sum(sent, Fraction())


def counts_table() -> Table:
    """Returns rounds, bytes of the busiest rank and of all ranks, for every algorithm at n = 2 .. 9."""
    sizes = range(2, MAX_NUM_RANKS + 1)
    return Table(
        ["n =", *(Column(str(ranks), _counts_text) for ranks in sizes)],
        [
            (name, *(round_counts(get_algorithm(name), ranks) for ranks in sizes))
            for name in FORMULA_ALGORITHMS
        ],
        title="rounds / bytes sent by the busiest rank / by all, in units of the tensor (S)",
    )


def _counts_text(counts: tuple[int, Fraction, Fraction]) -> str:
    return "/".join(f"{float(count):.3g}" for count in counts)


def _timing_table(cluster: Cluster, ranks: int) -> Table:
    found = cluster.seconds_by_algorithm(ranks)
    sizes = sorted(set.intersection(*(set(cells) for cells in found.values()))) or list(cluster.sizes)
    chosen = list(dict.fromkeys((sizes[0], sizes[len(sizes) // 2], sizes[-1])))
    fit = fit_alpha_beta(cluster, ranks)
    figures = f"a = {1e6 * fit.latency_s:.0f} us and B = {fit.bytes_per_s / 1e9:.2f} GB/s"

    def cell(name: str, nbytes: int) -> str:
        took = f"{1e3 * found[name][nbytes]:.3g}" if nbytes in found[name] else "-"
        guess = get_algorithm(name).seconds(ranks, nbytes, fit.latency_s, fit.bytes_per_s)
        return took if name == BACKEND else f"{took} ({1e3 * guess:.3g})"

    return Table(
        ["", *(Column(format_nbytes(nbytes), "{}") for nbytes in chosen)],
        [
            (name, *(cell(name, nbytes) for nbytes in chosen))
            for name in (*FORMULA_ALGORITHMS, BACKEND)
            if name in found
        ],
        title=f"{ranks} ranks: milliseconds measured, and (by the formula, with {figures})",
        note=f"with one latency and one bandwidth for all sizes, the median error is "
        f"{100 * fit.error:.0f} %: message size ranges need parameters of their own",
    )
