"""All-reduce algorithms by name: one file each, every one a list of rounds over plain send and receive.

`backend` is whatever the transport does by itself (gloo, NCCL, shared memory, threads). A name may carry a number behind a
slash: hierarchical/4 for four ranks per host.
"""

from types import MappingProxyType

from meshwright.comm.algorithms.backend import Backend
from meshwright.comm.algorithms.direct_exchange import Parallel
from meshwright.comm.algorithms.hierarchical import Hierarchical
from meshwright.comm.algorithms.naive_reduce import Naive
from meshwright.comm.algorithms.recursive_doubling import Doubling
from meshwright.comm.algorithms.recursive_halving import Halving
from meshwright.comm.algorithms.reduce_broadcast import Root
from meshwright.comm.algorithms.ring import Ring
from meshwright.comm.algorithms.schedule import Algorithm
from meshwright.comm.algorithms.tree import Tree
from meshwright.plan.job.errors import PlanError, suggest_name

BACKEND = Backend.name
PLAIN = (Backend(), Naive(), Root(), Ring(), Parallel(), Halving(), Doubling(), Tree())
ALGORITHMS = MappingProxyType({algorithm.name: algorithm for algorithm in PLAIN})
NAMES = (*ALGORITHMS, f"{Hierarchical.name}/G")


def named(name: str, where: str = "") -> Algorithm:
    """The algorithm called `name`. Raises PlanError when there is none."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    stem, slash, number = name.partition("/")
    if stem == Hierarchical.name and number.isdecimal() and number.isascii() and int(number) > 0:
        return Hierarchical(int(number))
    raise PlanError(
        f"there is no all_reduce algorithm '{name}'", fix=_meant(stem, slash, number), location=where
    )


def _meant(stem: str, slash: str, number: str) -> str:
    if stem == Hierarchical.name:
        return "write hierarchical/G, where G is the number of ranks on each host: hierarchical/4"
    if slash and stem in ALGORITHMS:
        return f"write {stem} alone: only {Hierarchical.name} takes a number"
    close = suggest_name(stem, (*ALGORITHMS, Hierarchical.name))
    if f"'{Hierarchical.name}'" in close:
        return f"did you mean '{Hierarchical.name}/{number or 'G'}'?"
    return close if "'" in close else f"choose one of: {', '.join(NAMES)}"
