"""Optimizer steps that the host runs beside the next step of the device (parallel/memory/offload.py, delay).

    STEP(group)            gives the step of the group to a thread, and returns
    FETCH_PARAM(group)     of the next step waits for it, then copies the stepped weights to the device
    OFFLOAD_GRAD(group)    likewise, before it overwrites the gradients that the thread reads

PyTorch's kernels run without Python's lock, so thread and device compute at once. In a checkpoint
`model/...` are the stepped weights, and `state/offload/weights/...` those that the device computes with. A plan
without delay reads the former alone.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from meshwright.engine.optim.sharded_state_dict import TensorShard
from meshwright.engine.runtime.rank_state import RankState
from meshwright.plan.strategy_state import STATE_PREFIX

WEIGHTS_PREFIX = f"{STATE_PREFIX}offload/weights/"


class DelayedSteps:
    """The steps of the optimizers of one rank that are under way in a thread; without `delay` there are
    none.
    """

    def __init__(self, state: RankState) -> None:
        self._state = state
        self.is_active = bool(state.plan.sharding.tiers.delay)
        self._thread = ThreadPoolExecutor(1, "optimizer") if self.is_active else None
        self._under_way: dict[str, Future[None]] = {}

    def start(self, name: str, step: Callable[[], None]) -> None:
        """Gives `step`, that of the action `name`, to the thread, behind those that it has."""
        if self._thread is None:
            raise ValueError("the plan has no delay")
        self._under_way[name] = self._thread.submit(step)

    def wait_for(self, names: Iterable[str]) -> None:
        """Waits for the steps of the actions `names`, and raises what they have raised."""
        for name in names:
            if name in self._under_way:
                self._under_way.pop(name).result()

    def wait_for_all(self) -> None:
        """Waits for all steps."""
        self.wait_for(list(self._under_way))

    def close(self) -> None:
        """Ends the thread, when its steps have ended."""
        if self._thread is not None:
            self._thread.shutdown()

    def state_dict(self) -> dict[str, TensorShard]:
        """Returns the weights that the device computes with, as this rank stores them, by full name."""
        store, found = self._state.flat_params, {}
        for param in self._state.trained_module.model_spec.trainable if self.is_active else ():
            flat_param, shard = store.flat_param_of(param.name), store.param_shard(param.name)
            spans = store.param_slices.spans(param.name)
            if flat_param is None:
                weight = self._state.trained_module.parameters[param.name].detach()
                found[f"{WEIGHTS_PREFIX}{param.name}"] = TensorShard(
                    weight.reshape(-1), 0, param.shape, spans
                )
            elif shard is not None and param.name in store.reported_param_names:
                values = flat_param.shard[shard.shard_offset : shard.shard_offset + shard.numel]
                found[f"{WEIGHTS_PREFIX}{param.name}"] = TensorShard(values, shard.begin, param.shape, spans)
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Loads the weights that the device computes with; a checkpoint of a plan without delay has none."""
        store = self._state.flat_params
        for param in self._state.trained_module.model_spec.trainable if self.is_active else ():
            entry, flat_param = f"{WEIGHTS_PREFIX}{param.name}", store.flat_param_of(param.name)
            if entry not in state_dict:
                continue
            weight = self._state.trained_module.parameters[param.name].detach()
            begin, end, target = 0, weight.numel(), weight
            if flat_param is not None and flat_param.is_sharded:
                shard = store.param_shard(param.name)
                if shard is None:
                    continue
                begin, end = shard.begin, shard.end
                target = flat_param.shard[shard.shard_offset : shard.shard_offset + shard.numel]
            values = store.param_slices.read_shard(param.name, state_dict, entry, begin, end)
            target.copy_(values.view(target.shape))
