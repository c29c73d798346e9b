"""All-reduce algorithms by name: one file each, every one a list of rounds over plain send and receive.

    algorithm_as_rounds    rounds as data, and the interface AllReduceAlgorithm
    backend_allreduce      the transport's own all-reduce (gloo, NCCL, shared memory, threads)
    naive_allreduce        one reduce per rank
    reduce_broadcast       gather at one rank, sum, broadcast
    one_shot               everyone sends to everyone
    ring                   reduce-scatter and all-gather around a ring
    recursive_halving      recursive halving and doubling
    recursive_doubling     partners exchange whole sums
    tree                   binomial tree
    hierarchical           rings inside hosts and across hosts
    cost_model             seconds of an algorithm on a measured network
    size_rule              algorithm by message size

A name may carry a number behind a slash: hierarchical/4 for four ranks per host.
"""

from types import MappingProxyType

from meshwright.comm.allreduce.algorithm_as_rounds import AllReduceAlgorithm
from meshwright.comm.allreduce.backend_allreduce import BackendAllReduce
from meshwright.comm.allreduce.hierarchical import HierarchicalAllReduce
from meshwright.comm.allreduce.naive_allreduce import NaiveAllReduce
from meshwright.comm.allreduce.one_shot import OneShotAllReduce
from meshwright.comm.allreduce.recursive_doubling import RecursiveDoublingAllReduce
from meshwright.comm.allreduce.recursive_halving import RecursiveHalvingAllReduce
from meshwright.comm.allreduce.reduce_broadcast import ReduceBroadcastAllReduce
from meshwright.comm.allreduce.ring import RingAllReduce
from meshwright.comm.allreduce.tree import TreeAllReduce
from meshwright.plan.job.errors import PlanError, suggest_name

BACKEND = BackendAllReduce.name
FLAT_ALGORITHMS = (
    BackendAllReduce(),
    NaiveAllReduce(),
    ReduceBroadcastAllReduce(),
    RingAllReduce(),
    OneShotAllReduce(),
    RecursiveHalvingAllReduce(),
    RecursiveDoublingAllReduce(),
    TreeAllReduce(),
)
ALGORITHMS = MappingProxyType({algorithm.name: algorithm for algorithm in FLAT_ALGORITHMS})
ALGORITHM_NAMES = (*ALGORITHMS, f"{HierarchicalAllReduce.name}/G")


def get_algorithm(name: str, location: str = "") -> AllReduceAlgorithm:
    """Returns the algorithm called `name`. Raises PlanError when there is none."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    stem, slash, number = name.partition("/")
    if stem == HierarchicalAllReduce.name and number.isdecimal() and number.isascii() and int(number) > 0:
        return HierarchicalAllReduce(int(number))
    raise PlanError(
        f"there is no all_reduce algorithm '{name}'", fix=_suggestion(stem, slash, number), location=location
    )


def _suggestion(stem: str, slash: str, number: str) -> str:
    if stem == HierarchicalAllReduce.name:
        return "write hierarchical/G, where G is the number of ranks on each host: hierarchical/4"
    if slash and stem in ALGORITHMS:
        return f"write {stem} alone: only {HierarchicalAllReduce.name} takes a number"
    close = suggest_name(stem, (*ALGORITHMS, HierarchicalAllReduce.name))
    if f"'{HierarchicalAllReduce.name}'" in close:
        return f"did you mean '{HierarchicalAllReduce.name}/{number or 'G'}'?"
    return close if "'" in close else f"choose one of: {', '.join(ALGORITHM_NAMES)}"
