"""Computes the bytes that leave a rank in a collective, by its formula or the rounds of its algorithm."""

from types import MappingProxyType

from meshwright.comm.allreduce import BACKEND, get_algorithm
from meshwright.comm.allreduce.algorithm_as_rounds import min_max_sent
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, INTEGER_NBYTES
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Transfer

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


def min_max_sent_nbytes(transfer: Transfer, mesh: Mesh) -> tuple[float, float]:
    """Returns the fewest and the most bytes that leave a rank of `mesh` in the messages of `transfer`.

    If one rank sends, or all but one do, it is what each of those sends.
    """
    least, most = 0.0, 0.0
    for message in transfer.messages:
        size = message.num_ranks(mesh)
        if message.algorithm == BACKEND:
            nbytes = sent_nbytes(message.collective, message.nbytes, size)
            least, most = least + nbytes, most + nbytes
        else:
            width = DTYPE_NBYTES[message.dtype]
            bounds = min_max_sent(get_algorithm(message.algorithm), size, message.nbytes // width)
            least, most = least + bounds[0] * width, most + bounds[1] * width
    return least, most
