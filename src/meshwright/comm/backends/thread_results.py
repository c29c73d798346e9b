"""Computes the result of a collective from the inputs of all ranks, which are threads of one process.

On a GPU the kernels wait for the streams on which the ranks called, and leave an event for those that wait
for the result.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from meshwright.comm.allreduce import BACKEND, get_algorithm
from meshwright.comm.backends.run_algorithm import deliver_rounds, run_all_ranks
from meshwright.comm.collectives.collective_call import EXCHANGE, UNEVEN, CollectiveCall, rank_slices
from meshwright.comm.collectives.deterministic_sum import ordered_sum
from meshwright.comm.collectives.group import Rounds
from meshwright.device.device_streams import current_stream, record_event


@dataclass(frozen=True)
class CollectiveInput:
    """The input of one rank to a collective; `splits` are its rows for each rank, if these are uneven, and
    `rounds` those of an exchange. On a GPU it is `ready` when the device has come to that event.
    """

    call: CollectiveCall
    tensor: torch.Tensor
    output: torch.Tensor | None
    splits: tuple[int, ...] = ()
    rounds: Rounds | None = None
    ready: torch.Event | None = None


def wait_on_stream(event: torch.Event | None) -> None:
    """Lets what follows on the current stream wait for `event`, if there is one."""
    if event is not None:
        current_stream(event.device).wait_event(event)


@torch.no_grad()
def compute_results(call: CollectiveCall, inputs: list[CollectiveInput]) -> torch.Event | None:
    """Fills the outputs of all ranks, whose `inputs` are in their order; returns when the result is in place,
    on a GPU.
    """
    for post in inputs:
        wait_on_stream(post.ready)
    if call.collective == EXCHANGE:
        deliver_rounds([post.rounds for post in inputs if post.rounds is not None], str(call))
    else:
        _fill_outputs(call, inputs)
    ready = inputs[0].ready
    return None if ready is None else record_event(ready.device)


def _fill_outputs(call: CollectiveCall, inputs: list[CollectiveInput]) -> None:
    operands = [post.tensor for post in inputs]
    results = _rows_by_rank(inputs) if call.collective == UNEVEN else _results(call, operands)
    for post, result in zip(inputs, results, strict=True):
        if post.output is not None:  # else this rank gets none
            post.output.view(-1).copy_(result.view(-1))


def _rows_by_rank(inputs: list[CollectiveInput]) -> Iterable[torch.Tensor]:
    pieces = [post.tensor.split(list(post.splits)) for post in inputs]
    return (torch.cat(of_rank) for of_rank in zip(*pieces, strict=True))


def _results(call: CollectiveCall, operands: list[torch.Tensor]) -> Iterable[torch.Tensor]:
    size, one = len(operands), call.source or 0
    match call.collective:
        case "all_reduce" if call.algorithm != BACKEND:
            totals = [operand.detach().view(-1).clone() for operand in operands]
            run_all_ranks(get_algorithm(call.algorithm), totals)
            return totals
        case "send" | "recv":
            return [operands[0]] * size
        case "all_reduce" | "reduce":
            return [ordered_sum(operands)] * size
        case "all_gather" | "gather":
            return [torch.cat([operand.view(-1) for operand in operands])] * size
        case "reduce_scatter":
            return (
                ordered_sum(pieces)
                for pieces in zip(*(rank_slices(operand, size) for operand in operands), strict=True)
            )
        case "all_to_all":
            return (
                torch.cat(pieces)
                for pieces in zip(*(rank_slices(operand, size) for operand in operands), strict=True)
            )
        case "shift":
            return [operands[(index - one) % size] for index in range(size)]
        case "broadcast":
            return [operands[one]] * size
        case "scatter":
            return rank_slices(operands[one], size)
        case _:
            return operands
