"""Routes of experts in generation: records those that the tokens of an answer take, and replays given ones.

    prefill    p p p   routes of 3 tokens     the last token of an answer goes through no layer:
    decode     a       of one more            prompt + answer - 1 tokens have routes
    decode     a       of one more

A rank records the layers of its stages, of its own sequences; at the end stages add what they have. How a
route is replayed, and why: model/recording/router_replay.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from meshwright.engine.runtime.module_patches import ModulePatches
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.recording.expert_choices import ChoiceRecorder
from meshwright.model.recording.router_replay import NOT_RECORDED, Routes, replay_routes
from meshwright.plan.model_spec.model_spec import ExpertsCall

ROUTE_DTYPE = torch.int32


class RoutedSequence(Protocol):
    """A sequence with the routes of its first tokens, tensors (tokens, layers, k)."""

    routes: list[torch.Tensor]

    @property
    def num_tokens(self) -> int:
        """The tokens so far."""


class RouteRecorder:
    """Records the routes of sequences in forwards of one rank, within `recording`."""

    def __init__(self, state: RankState) -> None:
        self._state, self._recorder = state, ChoiceRecorder(lambda: "generation")
        self._local_calls = state.plan.view.model_spec.experts_calls
        every = state.plan.sharding.model_spec.experts_calls
        self._numbers, self._top_k = {call.name: place for place, call in enumerate(every)}, every[0].top_k

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records all forwards within."""
        self._recorder.attach(self._state.trained_module.module, self._local_calls)
        try:
            yield
        finally:
            self._recorder.detach()

    def add_routes(self, sequences: Sequence[RoutedSequence]) -> None:
        """Appends the routes of the latest forward, one row for each of `sequences`, to these: of the tokens
        that have none yet, which are the last ones of a row.
        """
        found = self._recorder.pop_choices(len(sequences))
        if not found:  # no experts in the stages of this rank
            return
        num_columns = next(iter(found.values())).index.shape[1]
        routes = self._zeros(len(sequences), num_columns)
        for layer, choices in found.items():
            routes[:, :, self._numbers[layer]] = choices.index.to(ROUTE_DTYPE)
        for row, sequence in zip(routes, sequences, strict=True):
            num_without = sequence.num_tokens - sum(map(len, sequence.routes))
            sequence.routes.append(row[num_columns - num_without :].clone())

    def padded_routes(
        self, sequences: Sequence[RoutedSequence], num_rows: int, num_tokens: int, action: str
    ) -> torch.Tensor:
        """Returns the routes of `sequences` through the layers of all stages, (num_rows, num_tokens, layers,
        k), 0 behind the tokens of each.
        """
        padded = self._zeros(num_rows, num_tokens)
        for row, sequence in zip(padded, sequences, strict=False):
            given = torch.cat([row[:0], *sequence.routes])
            row[: len(given)] = given
        padded = padded.to(self._state.world.device)
        self._state.world.group(("pp",)).all_reduce(padded, action=action).wait()
        return padded

    def _zeros(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        return torch.zeros(num_rows, num_tokens, len(self._numbers), self._top_k, dtype=ROUTE_DTYPE)


class RouteReplay:
    """Makes forwards of one rank, within `context`, take `routes` (rows, tokens, layers, k); None: those
    that routers choose.
    """

    routes: torch.Tensor | None = None

    def __init__(self, state: RankState) -> None:
        self._state = state

    @contextmanager
    def context(self) -> Iterator[None]:
        """Replays in all forwards within."""
        every = self._state.plan.sharding.model_spec.experts_calls
        local = self._state.plan.view.model_spec.experts_calls
        with replay_context(self._state.trained_module.module, local, every, lambda: self.routes):
            yield

    def set_routes(self, routes: Sequence[torch.Tensor], num_tokens: int) -> None:
        """Makes the next forward take `routes`, (tokens, layers, k) of each row, of which each has
        `num_tokens` tokens; padding, and a forward without rows of a request, takes what routers choose.
        """
        self.routes = None
        if not routes:
            return
        size = len(routes), num_tokens, *routes[0].shape[1:]
        padded = torch.full(size, NOT_RECORDED, dtype=torch.int64)
        for row, given in zip(padded, routes, strict=True):
            row[: len(given)] = given
        self.routes = padded.to(self._state.world.device)


@contextmanager
def replay_context(
    module: nn.Module, calls: Sequence[ExpertsCall], all_calls: Sequence[ExpertsCall], routes: Routes
) -> Iterator[None]:
    """Makes forwards of `module` within take the routes of `routes`, as `replay_routes` has them."""
    patches = ModulePatches(module)
    replay_routes(patches.wrap_forward, calls, all_calls, routes)
    patches.apply_wrappers()
    try:
        yield
    finally:
        patches.restore_forwards()
