"""Runs one call of experts whose weights lie on several ranks: rows go to the experts, and sums return.

    tokens --sent once to each rank--> rows --one row per (token, expert)--> pairs --the module's forward-->
    weighted pairs --added up per row--> sums --returned--> added up per token

The module computes on pairs with one expert each, so it needs no mark for an expert that is elsewhere, and
any of its kernels serves. Sums of float16 and bfloat16 are taken in float32. Pairs are taken from the rank's
own tokens and from the rows of others without putting these together first, and added up likewise.

Ranks tell each other how many rows and how many pairs come. So every size is known after one read by the
host, which waits for a GPU there and nowhere else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import comb, inf
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.comm.collectives.group import Group
from meshwright.comm.collectives.route import Route, RowsInFlight, exchange_counts, send_rows
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.model.tensors.select_token_ranges import index_tensor
from meshwright.parallel.expert.chunked_experts import (
    PairPlaces,
    add_in_chunks,
    chunk_size,
    expected_pairs,
    pair_counts,
)
from meshwright.parallel.expert.expert_pairs import add_pairs, take_pairs
from meshwright.plan.model_spec.model_spec import ExpertsCall
from meshwright.plan.sharding.expert_load import expert_ranges
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.strategy_interface import Runtime

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of pairs: rows, expert, weight
COUNT_DTYPE, NUM_COUNTS = "int64", 2  # of what a rank tells each other rank: rows, and their pairs


def weights_dtype(compute: str) -> str:
    """Returns the dtype in which the weights of chosen experts travel."""
    return "float64" if compute == "float64" else "float32"


def index_dtype(weights: torch.dtype) -> str:
    """Returns the dtype in which the indices of chosen experts travel: as wide as their weights."""
    return f"int{8 * weights.itemsize}"


@dataclass(frozen=True)
class ExpertPlaces:
    """The ranks that have the experts of a layer: `num_ranks` to which rows travel, each `num_summed` times.

    Rows travel to ranks of the same `summed_index` alone; what these ranks compute is summed afterwards. A
    rank with more than `checkpoint_load` times the pairs that it expects computes them in chunks.
    """

    num_experts: int
    num_ranks: int
    num_summed: int = 1
    summed_index: int = 0
    checkpoint_load: float = inf

    @property
    def all_ranges(self) -> list[tuple[int, int]]:
        """The experts of all ranks, those that are summed next to each other."""
        return expert_ranges(self.num_experts, self.num_ranks * self.num_summed)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The experts of each rank to which rows of this one travel."""
        return self.all_ranges[self.summed_index :: self.num_summed]


def expected_rows(
    call: ExpertsCall, places: ExpertPlaces, tokens_by_rank: Sequence[int], index: int
) -> tuple[int, int]:
    """Returns how many rows the rank at `index` sends and receives if all experts are chosen alike.

    A token goes to a rank if at least one of its k experts is there.
    """
    reached, own = reached_shares(call, places), tokens_by_rank[index]
    sent = sum(share for rank, share in enumerate(reached) if rank != index)
    return round(own * sent), round((sum(tokens_by_rank) - own) * reached[index])


def reached_shares(call: ExpertsCall, places: ExpertPlaces) -> list[float]:
    """Returns for each rank the share of tokens that have an expert there, if all are chosen alike."""
    number, chosen = call.num_experts, call.top_k
    sizes = (end - first for first, end in places.ranges)
    return [1 - comb(number - size, chosen) / comb(number, chosen) for size in sizes]


def count_names(call: ExpertsCall, number: int, microbatch: int | None) -> tuple[str, str]:
    """Returns the names under which a rank records the rows that it sends, and those that it receives."""
    of = f"({call.block_call}, {number}, {microbatch})"
    return f"rows to experts{of}", f"rows from tokens{of}"


def call_position(call: ExpertsCall, view: RankView) -> float:
    """Returns the position of the call among the collectives of sharded layers in its block."""
    before = [
        at
        for at, layer in enumerate(view.model_spec.layer_calls)
        if layer.block_call == call.block_call and layer.name in call.prior_layers
    ]
    return max(before, default=-1) + 0.5


def tokens_per_sample(call: ExpertsCall, view: RankView) -> int:
    """Returns how many tokens of a sample a rank gives to the experts; of those that experts choose, its
    share of them.
    """
    return int(call.num_tokens * view.work_share.token_fraction(call.block_call, call.name))


class _Unfinished(NamedTuple):
    """What a call of experts has returned, without the sums of other ranks: `result` is `total` in the dtype
    of the tokens, or `total` itself; `away` are the tokens to which the sums are added.
    """

    result: torch.Tensor
    total: torch.Tensor
    away: torch.Tensor
    returning: RowsInFlight


class ExpertDispatch:
    """Runs the `number`-th call of experts in its block call, with those of this rank.

    Rows travel along `axes`, which may be none: then all ranks have all tokens. `microbatches` are those of
    the planned actions, by name.
    """

    def __init__(
        self,
        runtime: Runtime,
        axes: tuple[str, ...],
        call: ExpertsCall,
        places: ExpertPlaces,
        number: int,
        microbatches: Mapping[str, int | None],
    ) -> None:
        state = runtime.state
        self._unfinished: _Unfinished | None = None
        self._state, self._call, self._number, self._microbatches = state, call, number, microbatches
        self._group: Group = state.world.group(axes)
        self._places = places
        self._first, self._end = places.ranges[self._group.index]
        self._firsts: torch.Tensor | None = None  # of all ranks but the first, on the device
        precision = state.plan.job.precision
        self._dtype = getattr(torch, precision.compute)
        self._weights_dtype = getattr(torch, weights_dtype(precision.compute))
        self._module = state.trained_module.module.get_submodule(call.name)

    @property
    def num_local_experts(self) -> int:
        """The experts of this rank."""
        return self._end - self._first

    def run(self, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns what `forward` returns with all experts, for [tokens, features] and their choice."""
        result = self.start(forward, *args, **kwargs)
        self.finish()
        return result

    def start(self, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns what `run` returns, while the sums of other ranks are still on their way: complete after
        `finish`.
        """
        hidden, index, weights = tree_tensors((args, kwargs))

        def compute(*pairs: torch.Tensor) -> torch.Tensor:
            given = iter(pairs)
            positional = [next(given) if isinstance(each, torch.Tensor) else each for each in args]
            named = {
                key: next(given) if isinstance(each, torch.Tensor) else each for key, each in kwargs.items()
            }
            return forward(*positional, **named)

        return self._start(compute, len(index), hidden, index, weights)

    def run_rows(
        self, compute: Compute, num_expected: int, rows: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        """Returns the results of `rows` [rows, features], each of one expert of `index` [rows, 1], by the
        experts' `compute`; `num_expected` rows are expected of each rank.
        """
        result = self._start(compute, num_expected, rows, index, rows.new_ones(len(rows), 1))
        self.finish()
        return result

    def _start(
        self,
        compute: Compute,
        num_expected: int,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        away, route, (num_own, num_arriving) = self._find_route(index)
        rows, row_weights, row_index = self._send(away, route, hidden, weights, index)
        own, others = self._pairs_here(index, num_own), self._pairs_here(row_index, num_arriving)

        def results(own: PairPlaces, others: PairPlaces) -> torch.Tensor:
            return self._compute(
                compute,
                take_pairs(hidden, rows.to(hidden.dtype), own.row, others.row),
                torch.cat([own.expert, others.expert]).to(index.dtype),
                take_pairs(
                    weights.flatten(), row_weights.to(weights.dtype).flatten(), own.choice, others.choice
                ),
            )

        num_rows, num_pairs = (len(hidden), len(rows)), self._num_computed(own, others)
        expected = expected_pairs(self._call, num_expected, self._group.size, self.num_local_experts)
        most_per_pair = self.num_local_experts if self._call.form == "dense" else 1
        max_pairs = chunk_size(expected, self._places.checkpoint_load, most_per_pair)
        self._record_pairs(num_pairs, int(expected), max_pairs, sum(num_rows))
        if num_pairs > max_pairs:
            chunk = max_pairs // most_per_pair
            total, sums = add_in_chunks(results, self._module, (own, others), num_rows, chunk)
        else:
            total, sums = add_pairs(results(own, others), own.row, others.row, num_rows)
        if route is None:  # all ranks have all tokens
            return total.to(hidden.dtype)
        returning = RowsInFlight(route.adjoint, self._action_name, sums.to(self._dtype))
        result = total if total.dtype == hidden.dtype else torch.empty_like(total, dtype=hidden.dtype)
        self._unfinished = _Unfinished(result, total, away, returning)
        return result

    def finish(self) -> None:
        """Adds the sums of other ranks to what `start` has returned, if that is not done."""
        if self._unfinished is not None:
            result, total, away, returning = self._unfinished
            total.index_add_(0, away, returning.wait().to(total.dtype))
            if result is not total:
                result.copy_(total)
        self._unfinished = None

    def _send(
        self, away: torch.Tensor, route: Route | None, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Returns what ranks send of their tokens, weights and indices: none where all ranks have all."""
        if route is None:
            return tuple(each.detach()[:0] for each in given)
        self._record_counts(route)
        dtypes = self._dtype, self._weights_dtype, getattr(torch, index_dtype(self._weights_dtype))
        sent = (each.index_select(0, away).to(dtype) for each, dtype in zip(given, dtypes, strict=True))
        return send_rows(route, self._action_name, *sent)

    def _action_name(self) -> str:
        return self._state.current_action

    def _record_counts(self, route: Route) -> None:
        action = self._action_name()
        if action in self._microbatches:
            names = count_names(self._call, self._number, self._microbatches[action])
            self._state.world.ledger.record_count(names[0], sum(route.input_splits))
            self._state.world.ledger.record_count(names[1], sum(route.output_splits))

    def _record_pairs(self, num_pairs: int, expected: int, max_pairs: int, num_rows: int) -> None:
        action, is_chunked = self._action_name(), num_pairs > max_pairs
        if action in self._microbatches:
            names = pair_counts(self._call, self._number, self._microbatches[action])
            record = self._state.world.ledger.record_count
            record(names.more_pairs, max(0, num_pairs - expected))
            record(names.saved_pairs, 0 if is_chunked else num_pairs)
            record(names.saved_rows, num_rows if is_chunked else 0)

    def _num_computed(self, own: PairPlaces, others: PairPlaces) -> int:
        """Returns the rows that experts compute for these pairs: in the dense form, each as many as the one
        with the most.
        """
        num_pairs = len(own.row) + len(others.row)
        if self._call.form == "choice" or isinstance(own.expert, FakeTensor) or not num_pairs:
            return num_pairs
        expert = torch.cat([own.expert, others.expert])
        return self.num_local_experts * int(expert.bincount().max())

    @torch.no_grad()
    def _find_route(self, index: torch.Tensor) -> tuple[torch.Tensor, Route | None, tuple[int, int]]:
        """Returns the tokens that are sent to other ranks, in the order of ranks; their route, None where all
        ranks have all tokens; and how many pairs of own tokens with experts here there are, and of rows that
        arrive.
        """
        if self._group.size == 1:
            return index.new_empty(0), None, (self._count_here(index), 0)
        if isinstance(index, FakeTensor):
            return self._expected_route(index)
        if self._firsts is None:
            self._firsts = index_tensor([first for first, _ in self._places.all_ranges[1:]], index.device)
        size, here = self._group.size, self._group.index
        nowhere = index >= self._call.num_experts  # of a token that a router with capacity has dropped
        rank = torch.bucketize(index.contiguous(), self._firsts, right=True)
        if self._places.num_summed > 1:  # others send the token to the experts of the ranks that are summed
            nowhere |= rank % self._places.num_summed != self._places.summed_index
            rank = rank.div(self._places.num_summed, rounding_mode="floor")
        rank = rank.masked_fill(nowhere, size)
        reached = torch.zeros(size + 1, len(index), dtype=torch.bool, device=index.device)
        reached.t().scatter_(1, rank, value=True)
        num_pairs = rank.new_zeros(size + 1).scatter_add_(0, rank.flatten(), torch.ones_like(rank).flatten())
        counts = torch.stack([reached[:size].sum(1), num_pairs[:size]], dim=1)
        sent, arriving = exchange_counts(self._group, counts, self._action_name())
        route = Route.of_rows(self._group, *([rows for rows, _ in each] for each in (sent, arriving)))
        reached[here] = False
        away = reached[:size].flatten().nonzero_static(size=sum(route.input_splits)).squeeze(1)
        num_arriving = sum(pairs for _, pairs in arriving) - arriving[here][1]
        return away % len(index), route, (sent[here][1], num_arriving)

    def _count_here(self, index: torch.Tensor) -> int:
        if isinstance(index, FakeTensor):
            return index.numel() * self.num_local_experts // self._call.num_experts
        return int(((index >= self._first) & (index < self._end)).sum())

    def _expected_route(self, index: torch.Tensor) -> tuple[torch.Tensor, Route, tuple[int, int]]:
        """Returns the route of tokens without values: as if all experts were chosen alike."""
        size, here = self._group.size, self._group.index
        sent = [round(len(index) * share) for share in reached_shares(self._call, self._places)]
        counts = index.new_zeros(size, NUM_COUNTS)
        self._group.all_to_all(torch.empty_like(counts), counts, action=self._action_name()).wait()
        num_pairs = index.numel() * self.num_local_experts // self._call.num_experts
        away = index.new_zeros(sum(sent) - sent[here])
        route = Route.of_rows(self._group, sent, (sent[here],) * size)
        return away, route, (num_pairs, num_pairs * (size - 1))

    @torch.no_grad()
    def _pairs_here(self, index: torch.Tensor, number: int) -> PairPlaces:
        """Returns the `number` pairs of rows with `index` [rows, k] whose experts are those of this rank."""
        flat = index.flatten()
        if isinstance(index, FakeTensor):
            choice = flat.new_zeros(number, dtype=torch.int64)
        else:
            is_here = (flat >= self._first) & (flat < self._end)
            choice = is_here.nonzero_static(size=number).squeeze(1)
        row = choice.div(index.shape[1], rounding_mode="floor")
        return PairPlaces(row, choice, flat.index_select(0, choice) - self._first)

    def _compute(
        self,
        compute: Compute,
        hidden: torch.Tensor,
        expert: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the weighted results of pairs: their rows [pairs, features], experts here, and weights."""
        weights = weights.unsqueeze(1)
        if len(hidden):
            with _with_num_experts(self._module, self.num_local_experts):
                outputs = compute(hidden, expert.unsqueeze(1), weights)
        else:  # no expert here is chosen: ranks still meet in backward, so the graph must lead there
            parameter = next(self._module.parameters())
            outputs = hidden * weights + 0 * parameter.flatten()[:1].to(hidden.dtype)
        return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


@contextmanager
def _with_num_experts(module: nn.Module, number: int) -> Iterator[None]:
    """Makes a module that counts its experts count those of this rank."""
    before = module.__dict__.get("num_experts")
    if before is None:
        yield
        return
    module.__dict__["num_experts"] = number
    try:
        yield
    finally:
        module.__dict__["num_experts"] = before
