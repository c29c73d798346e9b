"""Computes the bytes that leave a rank in a collective, by its formula or the rounds of its algorithm."""

from types import MappingProxyType

from meshwright.comm.allreduce import BACKEND, get_algorithm
from meshwright.comm.allreduce.algorithm_as_rounds import min_max_sent
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, INTEGER_NBYTES
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
        case "broadcast" | "gather" | "reduce" | "send" | "shift":
            return float(nbytes if others else 0)
        case _:
            return 0.0


def min_max_sent_nbytes(transfer: Transfer, size: int) -> tuple[float, float]:
    """Returns the fewest and the most bytes that leave one of `size` ranks in `transfer`, by its algorithm.

    If one rank sends, or all but one do, it is what each of those sends.
    """
    if transfer.algorithm == BACKEND:
        nbytes = sent_nbytes(transfer.collective, transfer.nbytes, size)
        return nbytes, nbytes
    width = DTYPE_NBYTES[transfer.dtype]
    least, most = min_max_sent(get_algorithm(transfer.algorithm), size, transfer.nbytes // width)
    return float(least * width), float(most * width)
