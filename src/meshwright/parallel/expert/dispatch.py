"""Runs one call of experts whose weights lie on several ranks: rows go to the experts, and sums return.

    tokens --sent once to each rank--> rows --one row per (token, expert)--> pairs --the module's forward-->
    weighted pairs --added up per row--> sums --returned--> added up per token

The module computes on pairs with one expert each, so it needs no mark for an expert that is elsewhere, and
any of its kernels serves. Sums of float16 and bfloat16 are taken in float32.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.comm.collectives.group import Group
from meshwright.comm.collectives.route import Route, send_rows
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.model.tensors.select_token_ranges import index_tensor
from meshwright.parallel.expert.chunked_experts import chunk_size, expected_pairs, pair_counts, sum_in_chunks
from meshwright.plan.model_spec.model_spec import ExpertsCall
from meshwright.plan.sharding.expert_load import expert_ranges
from meshwright.plan.strategy_interface import Runtime

COUNT_DTYPE, INDEX_DTYPE = "int64", "int32"


def weights_dtype(compute: str) -> str:
    """Returns the dtype in which the weights of chosen experts travel."""
    return "float64" if compute == "float64" else "float32"


def expected_rows(call: ExpertsCall, num_tokens: int, num_ranks: int, index: int) -> tuple[int, int]:
    """Returns how many rows the rank at `index` sends and receives if all experts are chosen alike.

    Each rank has `num_tokens` tokens. A token goes to a rank if at least one of its k experts is there.
    """
    reached = reached_shares(call, num_ranks)
    sent = sum(share for rank, share in enumerate(reached) if rank != index)
    return round(num_tokens * sent), round(num_tokens * (num_ranks - 1) * reached[index])


def reached_shares(call: ExpertsCall, num_ranks: int) -> list[float]:
    """Returns for each rank the share of tokens that have an expert there, if all are chosen alike."""
    number, chosen = call.num_experts, call.top_k
    sizes = [end - first for first, end in expert_ranges(number, num_ranks)]
    return [1 - comb(number - size, chosen) / comb(number, chosen) for size in sizes]


def count_names(call: ExpertsCall, number: int, microbatch: int | None) -> tuple[str, str]:
    """Returns the names under which a rank records the rows that it sends, and those that it receives."""
    of = f"({call.block_call}, {number}, {microbatch})"
    return f"rows to experts{of}", f"rows from tokens{of}"


@dataclass(frozen=True)
class _Rows:
    """Rows of this rank and of others, for the experts here: [rows, features], [rows, k], [rows, k]."""

    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor


class ExpertDispatch:
    """Runs the `number`-th call of experts in its block call, with those of this rank along `axis`.

    `microbatches` are those of the planned actions, by name. Pairs beyond `checkpoint_load` times those
    expected are computed in chunks (chunked_experts.py).
    """

    def __init__(
        self,
        runtime: Runtime,
        axis: str,
        call: ExpertsCall,
        number: int,
        microbatches: Mapping[str, int | None],
        checkpoint_load: float,
    ) -> None:
        state = runtime.state
        self._state, self._call, self._number, self._microbatches = state, call, number, microbatches
        self._group: Group = state.world.group((axis,))
        self._ranges = expert_ranges(call.num_experts, self._group.size)
        self._first, self._end = self._ranges[self._group.index]
        self._checkpoint_load = checkpoint_load
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
        hidden, index, weights = tree_tensors((args, kwargs))

        def compute(*pairs: torch.Tensor) -> torch.Tensor:
            given = iter(pairs)
            positional = [next(given) if isinstance(each, torch.Tensor) else each for each in args]
            named = {
                key: next(given) if isinstance(each, torch.Tensor) else each for key, each in kwargs.items()
            }
            with _with_num_experts(self._module, self.num_local_experts):
                return forward(*positional, **named)

        own, away, route = self._find_route(index)
        self._record_counts(route)
        rows = self._send(route, _Rows(hidden, index, weights), own, away)
        expected = expected_pairs(self._call, len(index), self._group.size, self.num_local_experts)
        self._record(sums=len(rows.hidden) + sum(route.input_splits))
        sums = self._compute(compute, rows, expected, is_fake=isinstance(index, FakeTensor))
        own_sums, other_sums = sums.split([len(own), len(sums) - len(own)])
        (returned,) = send_rows(route.adjoint, self._action_name, other_sums.to(self._dtype))
        total = sums.new_zeros(hidden.shape)
        total = total.index_add(0, own, own_sums).index_add(0, away, returned.to(sums.dtype))
        return total.to(hidden.dtype)

    def _action_name(self) -> str:
        return self._state.current_action

    def _record_counts(self, route: Route) -> None:
        action = self._action_name()
        if action in self._microbatches:
            names = count_names(self._call, self._number, self._microbatches[action])
            self._state.world.ledger.record_count(names[0], sum(route.input_splits))
            self._state.world.ledger.record_count(names[1], sum(route.output_splits))

    @torch.no_grad()
    def _find_route(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Route]:
        """Returns the tokens with experts here, those sent to other ranks (in the order of ranks), and the
        route of these.
        """
        if isinstance(index, FakeTensor):
            return self._expected_route(index)
        if self._firsts is None:
            self._firsts = index_tensor([first for first, _ in self._ranges[1:]], index.device)
        size = self._group.size
        nowhere = index >= self._call.num_experts  # of a token that a router with capacity has dropped
        rank = torch.bucketize(index.contiguous(), self._firsts, right=True).masked_fill(nowhere, size)
        reached = torch.zeros(size + 1, len(index), dtype=torch.bool, device=index.device)
        reached.t().scatter_(1, rank, value=True)
        reached = reached[:size]
        route = Route.exchange(self._group, reached.sum(1), self._action_name())
        (own,) = reached[self._group.index].nonzero(as_tuple=True)
        reached[self._group.index] = False
        _, away = reached.nonzero(as_tuple=True)
        return own, away, route

    def _expected_route(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Route]:
        """Returns the route of tokens without values: as if all experts were chosen alike."""
        shares = reached_shares(self._call, self._group.size)
        num_rows = [round(len(index) * share) for share in shares]
        here, size = num_rows[self._group.index], self._group.size
        own, away = (index.new_zeros(number) for number in (here, sum(num_rows) - here))
        splits, arriving = tuple(num_rows), (here,) * size
        counts = index.new_zeros(size)
        return own, away, Route.exchange(self._group, counts, self._action_name(), known=(splits, arriving))

    def _send(self, route: Route, given: _Rows, own: torch.Tensor, away: torch.Tensor) -> _Rows:
        """Returns the rows for the experts here: own ones, then those of other ranks."""
        index = route.send(given.index[away].to(getattr(torch, INDEX_DTYPE)), self._action_name())
        hidden, weights = send_rows(
            route,
            self._action_name,
            given.hidden[away].to(self._dtype),
            given.weights[away].to(self._weights_dtype),
        )
        return _Rows(
            torch.cat([given.hidden[own], hidden.to(given.hidden.dtype)]),
            torch.cat([given.index[own], index.to(given.index.dtype)]),
            torch.cat([given.weights[own], weights.to(given.weights.dtype)]),
        )

    def _compute(
        self, compute: Callable[..., torch.Tensor], rows: _Rows, expected: float, *, is_fake: bool
    ) -> torch.Tensor:
        """Returns the weighted sum of the experts here for each row."""
        if is_fake:
            row = slot = rows.index.new_zeros(
                rows.index.numel() * self.num_local_experts // self._call.num_experts
            )
        else:
            row, slot = ((rows.index >= self._first) & (rows.index < self._end)).nonzero(as_tuple=True)
        max_pairs = chunk_size(expected, self._checkpoint_load)
        self._record_pairs(len(row), len(rows.hidden), int(expected), max_pairs)

        def compute_pairs(row: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
            hidden, weights = rows.hidden[row], rows.weights[row, slot].unsqueeze(1)
            if len(row):
                outputs = compute(hidden, (rows.index[row, slot] - self._first).unsqueeze(1), weights)
            else:  # no expert here is chosen: ranks still meet in backward, so the graph must lead there
                parameter = next(self._module.parameters())
                outputs = hidden * weights + 0 * parameter.flatten()[:1].to(hidden.dtype)
            half = outputs.dtype in (torch.float16, torch.bfloat16)
            return outputs.float() if half else outputs

        if len(row) > max_pairs:
            return sum_in_chunks(compute_pairs, self._module, (row, slot), max_pairs, rows.hidden.shape)
        outputs = compute_pairs(row, slot)
        return outputs.new_zeros(rows.hidden.shape).index_add(0, row, outputs)

    def _record_pairs(self, num_pairs: int, num_rows: int, expected: int, max_pairs: int) -> None:
        is_chunked = num_pairs > max_pairs
        self._record(
            more_pairs=max(0, num_pairs - expected),
            saved_pairs=0 if is_chunked else num_pairs,
            saved_rows=num_rows if is_chunked else 0,
        )

    def _record(self, **counts: int) -> None:
        action = self._action_name()
        if action in self._microbatches:
            names = asdict(pair_counts(self._call, self._number, self._microbatches[action]))
            for name, number in counts.items():
                self._state.world.ledger.record_count(names[name], number)


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
