"""Model states that rest on the host: fetched for the optimizer, or stepped there
(parallel/memory/offload.py).

    the device steps   FETCH_STATES     optimizer states and masters of a group -> a buffer on the device
                       OFFLOAD_STATES   back, after STEP
    the host steps     OFFLOAD_GRAD     summed gradients of a group -> the host, for the optimizer
                       FETCH_PARAM      the stepped weights -> the device

Between steps the optimizer's own `state` holds the tensors that rest on the host, so that checkpoints read
and write them as they are. The first step finds no states: FETCH_STATES copies the masters alone, and
OFFLOAD_STATES takes what the optimizer has made.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from meshwright.engine.runtime.rank_state import RankState
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler


@dataclass(frozen=True)
class _Resting:
    """A tensor that rests on the host; `assign(tensor, is_fetched=...)` puts another in its place."""

    key: tuple[str, str]
    tensor: torch.Tensor
    assign: Callable[..., None]


class OffloadedStates:
    """Copies the model states of one rank between host and device."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        # what was fetched, until it is offloaded, and where it rests
        self._fetched: dict[tuple[str, str], tuple[_Resting, torch.Tensor]] = {}
        self._first_fetch = next(
            (each.name for each in state.plan.actions if each.kind == "FETCH_STATES"), ""
        )
        self.handlers: dict[str, Handler] = {
            "FETCH_STATES": self.fetch_states,
            "OFFLOAD_STATES": self.offload_states,
            "OFFLOAD_GRAD": self.offload_grads,
            "FETCH_PARAM": self.fetch_params,
        }

    @torch.no_grad()
    def fetch_states(self, action: Action) -> None:
        """Starts to copy the states of a group into the buffer that the action allocates."""
        if action.name == self._first_fetch:
            self._settle()
        resting = sorted(self._resting(action), key=lambda each: -each.tensor.element_size())
        (allocation,), pairs, at = action.allocations, [], 0
        if resting:  # the first step may find nothing
            buffer = self._state.flat_params.buffer(allocation.name, allocation.nbytes, torch.uint8)
            for each in resting:
                tensor = each.tensor
                place = buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                at += tensor.nbytes
                pairs.append((place, tensor))
                self._fetched[each.key] = replace(each, tensor=place), tensor
                each.assign(place, is_fetched=True)
        self._state.issue(action, self._state.host_memory.start_copies(action, pairs))

    @torch.no_grad()
    def offload_states(self, action: Action) -> None:
        """Starts to copy the states of a group back to the host; the buffer is free when it has ended."""
        pairs, host_memory = [], self._state.host_memory
        for each in self._resting(action):
            _, target = self._fetched.pop(each.key, (None, None))
            if target is None:
                target = host_memory.empty(each.tensor.shape, each.tensor.dtype, each.tensor)
            pairs.append((target, each.tensor))
            each.assign(target, is_fetched=False)
        self._state.issue(action, host_memory.start_copies(action, pairs))

    def offload_grads(self, action: Action) -> None:
        """Starts to copy the summed gradients of a group to the host."""
        store, host_memory = self._state.flat_params, self._state.host_memory
        flat_param = store.flat_param_of(action.tensors[0])
        if flat_param is None:
            pairs = store.master_weights.grads_to_host(action.tensors)
        elif flat_param.gradient is None:
            pairs = []
        else:
            gradient = flat_param.gradient
            if flat_param.host_gradient is None:
                flat_param.host_gradient = host_memory.empty(gradient.shape, gradient.dtype, gradient)
                flat_param.assign_grads(flat_param.host_gradient)
            pairs = [(flat_param.host_gradient, gradient)]
        self._state.issue(action, host_memory.start_copies(action, pairs))

    @torch.no_grad()
    def fetch_params(self, action: Action) -> None:
        """Starts to copy the weights of a group, which the host has stepped, to the device."""
        store = self._state.flat_params
        flat_param = store.flat_param_of(action.tensors[0])
        if flat_param is None:
            pairs = store.master_weights.weights_to_device(action.tensors)
        else:
            pairs = [] if flat_param.host_weights is None else [(flat_param.shard, flat_param.host_weights)]
        self._state.issue(action, self._state.host_memory.start_copies(action, pairs))

    def _settle(self) -> None:
        """Puts back what a step that failed has fetched."""
        for each, target in self._fetched.values():
            target.copy_(each.tensor)
            each.assign(target, is_fetched=False)
        self._fetched.clear()

    def _resting(self, action: Action) -> list[_Resting]:
        """Returns what rests on the host of the parameters of `action`: masters, and optimizer states."""
        store, found = self._state.flat_params, []
        flat_param, masters = store.flat_param_of(action.tensors[0]), store.master_weights
        if flat_param is not None and flat_param.master is not None and flat_param.optimizer_params:
            found.append(_Resting((action.subject, "master"), flat_param.master, flat_param.move_master))
        for name in action.tensors:
            master = masters.master(name)
            if master is not None:
                found.append(_Resting((name, "master"), master, partial(masters.move_master, name)))
        optimizer_params = store.optimizer_params()
        for name in (name for name in action.tensors if name in optimizer_params):
            for optimizer in self._state.optimizers:
                states = optimizer.state.get(optimizer_params[name], {})
                for key, value in states.items():
                    if isinstance(value, torch.Tensor):
                        found.append(_Resting((name, key), value, partial(_assign, states, key)))
        return found


def _assign(states: dict[str, Any], key: str, tensor: torch.Tensor, *, is_fetched: bool) -> None:
    """Puts `tensor` among the states of a parameter; the optimizer reads it wherever it is."""
    states[key] = tensor
