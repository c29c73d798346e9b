"""Computes pairs of a token and an expert in chunks if too many arrive, so that what experts save is bounded.

    pairs of a rank     [ first chunk ][ second ][ third ]
    forward             each chunk saves nothing; the rows that came are kept
    backward            run the third once more, gradients; the second, gradients; the first, gradients

A rank expects n T k e / E pairs: of T tokens of each of n ranks, with k of E experts chosen, and e of them
here. A chunk has at most `checkpoint_load` times as many, so a rank with no more computes them at once. If
all tokens choose the experts of one rank, that rank has more, up to n T min(k, e):

    saved <= rows + chunk x activations of a pair         instead of all pairs x activations of a pair

In the dense form (dense_experts.py) pairs count with the rows of zeros that pad them: of c pairs of one
expert the rank computes c e rows, so a chunk has 1/e as many pairs.

The results are the same up to rounding: the gradients of weights are sums over chunks.
Cost: such pairs are computed once more, and a second gradient of the experts lives while it is added.
Paper: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil, inf
from sys import maxsize
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.parallel.expert.expert_pairs import add_pairs, take_pairs
from meshwright.plan.model_spec.model_spec import ExpertsCall


@dataclass(frozen=True)
class PairPlaces:
    """The pairs of some rows with experts of this rank, in the order of the rows.

    For each pair its row, its place in the flat choice [rows * k] of these rows, and its expert here.
    """

    row: torch.Tensor
    choice: torch.Tensor
    expert: torch.Tensor

    def part(self, begin: int, end: int) -> "PairPlaces":
        """Returns the pairs from `begin` to before `end`, as far as there are any."""
        chosen = slice(max(0, begin), max(0, end))
        return PairPlaces(self.row[chosen], self.choice[chosen], self.expert[chosen])


Results = Callable[[PairPlaces, PairPlaces], torch.Tensor]  # [pairs, D] of pairs of own rows, and of others


@dataclass(frozen=True)
class PairCounts:
    """The names under which a rank records its pairs beyond those expected, and the pairs and rows saved."""

    more_pairs: str
    saved_pairs: str
    saved_rows: str


def pair_counts(call: ExpertsCall, number: int, microbatch: int | None) -> PairCounts:
    """Returns the names of the counts of the `number`-th call in its block call."""
    of = f"({call.block_call}, {number}, {microbatch})"
    return PairCounts(f"more pairs{of}", f"saved pairs{of}", f"saved rows{of}")


def expected_pairs(call: ExpertsCall, num_tokens: int, num_ranks: int, num_local_experts: int) -> float:
    """Returns the pairs of a rank if all experts are chosen alike, on `num_tokens` of each rank."""
    return num_ranks * num_tokens * call.top_k * num_local_experts / call.num_experts


def chunk_size(expected: float, checkpoint_load: float, most_per_pair: int = 1) -> int:
    """Returns how many rows a rank computes at once, if it expects so many, `most_per_pair` at most for a
    pair; all with an infinite load.
    """
    return maxsize if checkpoint_load == inf else max(most_per_pair, ceil(expected * checkpoint_load))


def add_in_chunks(
    results: Results,
    module: nn.Module,
    places: tuple[PairPlaces, PairPlaces],
    num_rows: tuple[int, int],
    num_pairs: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sums for `num_rows` own rows, and for others, of the `results` for their pairs, at most
    `num_pairs` at a time.

    There is a pair at least. All are computed once more in backward, with the parameters that `module` has
    now.
    """
    again = partial(_with_parameters, module, dict(module._parameters), results)
    run = partial(checkpoint, again, use_reentrant=False, preserve_rng_state=False)
    chunks = _chunks(*places, num_pairs)
    own, others = next(chunks)
    found = run(own, others)
    sums = add_pairs(found, own.row, others.row, num_rows)
    for own, others in chunks:
        sums = _AddMorePairs.apply(*sums, run(own, others), own.row, others.row)
    return sums


def _chunks(own: PairPlaces, others: PairPlaces, num_pairs: int) -> Iterator[tuple[PairPlaces, PairPlaces]]:
    """Yields chunks of own pairs and then of others, all of about the same size."""
    num_own, total = len(own.row), len(own.row) + len(others.row)
    num_chunks = -(-total // num_pairs)
    begins = [number * total // num_chunks for number in range(num_chunks + 1)]
    for begin, end in pairwise(begins):
        yield own.part(begin, end), others.part(begin - num_own, end - num_own)


class _AddMorePairs(torch.autograd.Function):
    """Adds pairs to sums of own rows and of others, in place; `index_add_` would save the pairs."""

    @staticmethod
    def forward(
        ctx: Any,
        own: torch.Tensor,
        others: torch.Tensor,
        pairs: torch.Tensor,
        own_row: torch.Tensor,
        other_row: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(own_row, other_row)
        ctx.mark_dirty(own, others)
        of_own, of_others = pairs.split([len(own_row), len(other_row)])
        return own.index_add_(0, own_row, of_own), others.index_add_(0, other_row, of_others)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own, others = grads
        return own, others, take_pairs(own, others, *ctx.saved_tensors), None, None


def _with_parameters(
    module: nn.Module,
    parameters: dict[str, nn.Parameter | None],
    results: Results,
    own: PairPlaces,
    others: PairPlaces,
) -> torch.Tensor:
    before = dict(module._parameters)
    module._parameters.update(parameters)
    try:
        return results(own, others)
    finally:
        module._parameters.update(before)
