"""Computes the bytes that leave a rank in a collective, by its formula or the rounds of its algorithm."""

from types import MappingProxyType

from meshwright.comm.allreduce import BACKEND, get_algorithm
from meshwright.comm.allreduce.algorithm_as_rounds import min_max_sent
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, INTEGER_NBYTES
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Transfer

# which ranks send: the one rank alone, or all but it
ONE_SENDER, ONE_RECEIVER = (
    ("broadcast", "scatter"),
    ("gather", "reduce"),
)
DTYPE_NBYTES = MappingProxyType({**FLOAT_NBYTES, **INTEGER_NBYTES})


def sent_nbytes(collective: str, nbytes: int, size: int) -> float:
    """Returns the bytes that leave one of `size` ranks (the one that sends.

    If not all do) for an input of `nbytes`.
    """
    others = size - 1
    match collective:
        case "all_reduce":
            return 2 * nbytes * others / size
        case "all_gather":
            return float(nbytes * others)
        case "reduce_scatter" | "all_to_all":
            return nbytes * others / size
        case "scatter":
            return float(nbytes * others)
        case "broadcast" | "gather" | "reduce" | "send" | "shift" | "all_to_all_v":
            return float(nbytes if others else 0)
        case _:
            return 0.0


def sends_bytes(collective: str, *, is_root: bool) -> bool:
    """Returns whether the root of a collective, or another rank, sends anything."""
    return collective not in (*ONE_SENDER, *ONE_RECEIVER) or is_root == (collective in ONE_SENDER)


def min_max_sent_nbytes(transfer: Transfer, mesh: Mesh, rank: int | None = None) -> tuple[float, float]:
    """Returns the fewest and the most bytes that leave a rank of `mesh` in the messages of `transfer`.

    If one rank sends, or all but one do, it is what each of those sends; with `rank`, 0 if that one does not.
    """
    least, most = 0.0, 0.0
    for message in transfer.messages:
        size = message.num_ranks(mesh)
        if rank is not None and not sends_bytes(message.collective, is_root=_is_root(message, mesh, rank)):
            continue
        if message.algorithm == BACKEND:
            nbytes = sent_nbytes(message.collective, message.nbytes, size)
            least, most = least + nbytes, most + nbytes
        else:
            width = DTYPE_NBYTES[message.dtype]
            bounds = min_max_sent(get_algorithm(message.algorithm), size, message.nbytes // width)
            least, most = least + bounds[0] * width, most + bounds[1] * width
    return least, most


def _is_root(message: Transfer, mesh: Mesh, rank: int) -> bool:
    return mesh.index(mesh.coordinate(rank), message.axes) == message.root
