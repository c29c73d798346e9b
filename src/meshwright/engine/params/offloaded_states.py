"""Model states that rest on the host: fetched for the optimizer, or stepped there
(parallel/memory/tiers/offload.py).

    the device steps   FETCH_STATES     optimizer states and masters of a group -> a buffer on the device
                       OFFLOAD_STATES   back, after STEP
    the host steps     OFFLOAD_GRAD     summed gradients of a group -> the host, for the optimizer
                       FETCH_PARAM      the stepped weights -> the device
    gradients rest     ACCUMULATE       a reduced shard of each microbatch -> the host, which adds them
    weights rest       FETCH_PARAM      a shard, before each use -> its range of the full tensor

Between steps the optimizer's own `state` holds the tensors that rest on the host, so that checkpoints read
and write them as they are. The first step finds no states: FETCH_STATES copies the masters alone, and
OFFLOAD_STATES takes what the optimizer has made.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from meshwright.engine.params.delayed_steps import DelayedSteps
from meshwright.engine.runtime.async_copies import FinishedOnWait
from meshwright.engine.runtime.rank_state import RankState
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler


@dataclass(frozen=True)
class RestingTensor:
    """A tensor that rests in another tier; `assign(tensor, is_fetched=...)` puts another in its place."""

    key: tuple[str, str]
    tensor: torch.Tensor
    assign: Callable[..., None]


class OffloadedStates:
    """Copies the model states of one rank between host and device."""

    def __init__(self, state: RankState) -> None:
        self._state, self._optimizer_params = state, state.flat_params.optimizer_params()
        # what was fetched, until it is offloaded, and where it rests
        self._fetched: dict[tuple[str, str], tuple[RestingTensor, torch.Tensor]] = {}
        self._first_fetch = next(
            (each.name for each in state.plan.actions if each.kind == "FETCH_STATES"), ""
        )
        # shards that are to be added on the host, by parameter group, and where they lie until then
        self._sums: dict[str, FinishedOnWait] = {}
        self._staging: dict[str, torch.Tensor] = {}
        self.delayed_steps = DelayedSteps(state)
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
        resting = sorted(self.resting(action), key=lambda each: -each.tensor.element_size())
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
        for each in self.resting(action):
            _, target = self._fetched.pop(each.key, (None, None))
            if target is None:
                target = host_memory.empty(each.tensor.shape, each.tensor.dtype, each.tensor)
            pairs.append((target, each.tensor))
            each.assign(target, is_fetched=False)
        self._state.issue(action, host_memory.start_copies(action, pairs))

    def offload_grads(self, action: Action) -> None:
        """Starts to copy the summed gradients of a group to the host."""
        self.delayed_steps.wait_for(action.previous_waits)
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
    def accumulate(self, action: Action) -> None:
        """Copies a reduced shard out of its buffer: it is the sum, or is cast or added to it on the host."""
        store, host_memory = self._state.flat_params, self._state.host_memory
        flat_param = store.flat_param_of(action.tensors[0])
        if flat_param is None:
            raise ValueError(f"{action.name} copies a reduced shard, and {action.tensors[0]} is not flat")
        if action.subject in self._sums:
            self._sums.pop(action.subject).wait()
        local_grads, total = store.packed_shard(action), store.gradient(flat_param)
        staged = [each for each in action.allocations if each.name.startswith("staging")]
        if not staged:
            self._state.issue(action, host_memory.start_copies(action, [(total, local_grads)]))
            return
        if staged[0].name not in self._staging:
            self._staging[staged[0].name] = host_memory.empty((staged[0].nbytes,), torch.uint8, total)
        place = self._staging[staged[0].name][: local_grads.nbytes].view(local_grads.dtype)
        add = total.copy_ if len(action.allocations) > len(staged) else total.add_
        work = FinishedOnWait(host_memory.start_copies(action, [(place, local_grads)]), partial(add, place))
        if local_grads.is_cpu:  # the copy has ended
            work.wait()
        self._sums[action.subject] = work
        self._state.issue(action, work)

    @property
    def nbytes(self) -> int:
        """The bytes of the staging buffers on the host."""
        return sum(each.nbytes for each in self._staging.values())

    @torch.no_grad()
    def fetch_params(self, action: Action) -> None:
        """Starts to copy weights of a group to the device: the shard that rests on the host into the full
        tensor, or what the host has stepped.
        """
        self.delayed_steps.wait_for(action.previous_waits)
        store = self._state.flat_params
        flat_param = store.flat_param_of(action.tensors[0])
        if flat_param is not None and flat_param.shard_is_remote:
            pairs = [(flat_param.gather_input, flat_param.shard)]
        elif flat_param is None:
            pairs = store.master_weights.weights_to_device(action.tensors)
        else:
            pairs = [] if flat_param.host_weights is None else [(flat_param.shard, flat_param.host_weights)]
        overwrites = self._state.disk is not None  # the next group takes the buffer
        work = self._state.host_memory.start_copies(action, pairs, overwrites_sources=overwrites)
        self._state.issue(action, work)

    def adopt_states(self, entries: Iterable[str]) -> None:
        """Moves optimizer states that were loaded from `entries` of a checkpoint to where they rest."""
        if self._state.disk is not None:
            self._state.disk.adopt_states(entries)
            return
        for optimizer in self._state.optimizers:
            for states in optimizer.state.values():
                for key, value in states.items():
                    if isinstance(value, torch.Tensor):
                        states[key] = self._state.host_memory.adopt(value)

    def _settle(self) -> None:
        """Puts back what a step that failed has fetched."""
        for each, target in self._fetched.values():
            target.copy_(each.tensor)
            each.assign(target, is_fetched=False)
        self._fetched.clear()

    def resting(self, action: Action) -> list[RestingTensor]:
        """Returns what rests in another tier of the parameters of `action`: masters, and optimizer states."""
        store, found = self._state.flat_params, []
        flat_param, masters = store.flat_param_of(action.tensors[0]), store.master_weights
        if flat_param is not None and flat_param.master is not None and flat_param.optimizer_params:
            found.append(RestingTensor((action.subject, "master"), flat_param.master, flat_param.move_master))
        for name in action.tensors:
            master = masters.master(name)
            if master is not None:
                found.append(RestingTensor((name, "master"), master, partial(masters.move_master, name)))
        for name in (name for name in action.tensors if name in self._optimizer_params):
            for optimizer in self._state.optimizers:
                states = optimizer.state.get(self._optimizer_params[name], {})
                for key, value in states.items():
                    if isinstance(value, torch.Tensor):
                        found.append(RestingTensor((name, key), value, partial(_assign, states, key)))
        return found


def _assign(states: dict[str, Any], key: str, tensor: torch.Tensor, *, is_fetched: bool) -> None:
    """Puts `tensor` among the states of a parameter; the optimizer reads it wherever it is."""
    states[key] = tensor
