"""Computes pairs of a token and an expert in chunks if too many arrive, so that what experts save is bounded.

    pairs of a rank     [ first chunk ][ second ][ third ]
    forward             each chunk saves nothing; the rows that came are kept
    backward            run the third once more, gradients; the second, gradients; the first, gradients

A rank expects n T k e / E pairs: of T tokens of each of n ranks, with k of E experts chosen, and e of them
here. A chunk has at most `checkpoint_load` times as many, so a rank with no more computes them at once. If
all tokens choose the experts of one rank, that rank has more, up to n T min(k, e):

    saved <= rows + chunk x activations of a pair         instead of all pairs x activations of a pair

The results are the same up to rounding: the gradients of weights are sums over chunks.
Cost: such pairs are computed once more, and a second gradient of the experts lives while it is added.
Paper: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.plan.model_spec.model_spec import ExpertsCall

ComputePairs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of rows and slots of pairs: [pairs, D]


@dataclass(frozen=True)
class PairCounts:
    """The names under which a rank records its pairs beyond those expected, the pairs and rows saved, and
    the rows of sums that it makes and gets.
    """

    more_pairs: str
    saved_pairs: str
    saved_rows: str
    sums: str


def pair_counts(call: ExpertsCall, number: int, microbatch: int | None) -> PairCounts:
    """Returns the names of the counts of the `number`-th call in its block call."""
    of = f"({call.block_call}, {number}, {microbatch})"
    return PairCounts(f"more pairs{of}", f"saved pairs{of}", f"saved rows{of}", f"sums of experts{of}")


def expected_pairs(call: ExpertsCall, num_tokens: int, num_ranks: int, num_local_experts: int) -> float:
    """Returns the pairs of a rank if all experts are chosen alike, on `num_tokens` of each rank."""
    return num_ranks * num_tokens * call.top_k * num_local_experts / call.num_experts


def chunk_size(expected: float, checkpoint_load: float) -> int:
    """Returns how many pairs a rank computes at once, if it expects so many."""
    return max(1, ceil(expected * checkpoint_load))


def sum_in_chunks(
    compute: ComputePairs,
    module: nn.Module,
    pairs: tuple[torch.Tensor, torch.Tensor],
    num_pairs: int,
    shape: torch.Size,
) -> torch.Tensor:
    """Returns the sum for each row, of `shape` [rows, D], of what `compute` returns for `pairs`, at most
    `num_pairs` at a time.

    `pairs` are their rows and their slots, both [pairs], at least one. They are computed once more in
    backward, with the parameters that `module` has now.
    """
    again = partial(_with_parameters, module, dict(module._parameters), compute)
    run = partial(checkpoint, again, use_reentrant=False, preserve_rng_state=False)
    num_chunks = -(-len(pairs[0]) // num_pairs)
    chunks = zip(*(each.tensor_split(num_chunks) for each in pairs), strict=True)
    row, slot = next(chunks)
    outputs = run(row, slot)
    sums = _AddRows.apply(outputs.new_zeros(shape), row, outputs)
    for row, slot in chunks:
        sums = _AddRows.apply(sums, row, run(row, slot))
    return sums


class _AddRows(torch.autograd.Function):
    """Adds to rows of a tensor, in place; `index_add_` would save what it adds."""

    @staticmethod
    def forward(ctx: Any, sums: torch.Tensor, row: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(row)
        ctx.mark_dirty(sums)
        return sums.index_add_(0, row, outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (row,) = ctx.saved_tensors
        return grads[0], None, grads[0].index_select(0, row)


def _with_parameters(
    module: nn.Module,
    parameters: dict[str, nn.Parameter | None],
    compute: ComputePairs,
    row: torch.Tensor,
    slot: torch.Tensor,
) -> torch.Tensor:
    before = dict(module._parameters)
    module._parameters.update(parameters)
    try:
        return compute(row, slot)
    finally:
        module._parameters.update(before)
