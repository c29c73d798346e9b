"""Forwards and backwards outside of the action list: sharded parameters are gathered block by block, or all
of them once for many forwards.

In every forward all ranks gather for the same block calls, in the plan's order, also for a block that one of
them leaves out, so the collectives always match. Parameters that are stored unsharded are refreshed once,
before. A rank that runs pipeline stages gathers only for its own block calls: within a stage none is left
out.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from meshwright.engine.params.flat_param_store import FlatParamStore
from meshwright.engine.runtime.rank_state import TrainedModule
from meshwright.model.blocks.block_forward_backward import ForwardDriver
from meshwright.plan.model_spec.model_spec import block_of

UnshardFn = Callable[[str], None]  # gathers the weights of a block


@contextmanager
def summon_full_params(
    trained_module: TrainedModule,
    flat_params: FlatParamStore,
    driver: ForwardDriver,
    action: str,
    *,
    gather_once: bool = False,
) -> Iterator[None]:
    """Makes forwards of the module find full parameters; all ranks run equally many forwards.

    With `gather_once` all parameters are gathered before, into memory of their own, and forwards gather none:
    ranks may run as many as they like.
    """
    if gather_once:
        with _gather_once(trained_module, flat_params, action):
            yield
        return
    flat_params.refresh_unsharded(action)
    if not flat_params.forward_is_collective:
        yield
        return
    fetch = partial(flat_params.unshard_block, action=action)
    if trained_module.remote_param_names:
        with driver.use_pre_block_hook(fetch):
            yield
        return
    unshard_order = _UnshardOrder(fetch)
    hooks = (
        trained_module.module.register_forward_pre_hook(
            lambda *_: unshard_order.begin(trained_module.model_spec.block_calls)
        ),
        trained_module.module.register_forward_hook(lambda *_: unshard_order.end()),
    )
    with ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.remove)
        stack.enter_context(driver.use_pre_block_hook(unshard_order.reach))
        yield


@contextmanager
def _gather_once(trained_module: TrainedModule, flat_params: FlatParamStore, action: str) -> Iterator[None]:
    parameters, before = trained_module.parameters, dict[str, torch.Tensor]()
    try:
        for flat_param in flat_params.by_param_group.values():
            if not flat_param.is_sharded:
                flat_param.gather(flat_param.full_tensor, flat_param.fetch(), action=action)
                continue
            shard = flat_param.stored_shard.to(flat_param.full_tensor.device)
            full_tensor = shard.new_empty(flat_param.spec.numel)
            flat_param.gather(full_tensor, shard, action=action)
            for name, numel, start in flat_param.spec.params:
                before[name] = parameters[name].data
                view = full_tensor[start : start + numel].view(parameters[name].shape)
                parameters[name].data = view  # no graph is alive that has saved the parameter
        yield
    finally:
        for name, data in before.items():
            parameters[name].data = data


@contextmanager
def unshard_in_order(block_calls: Sequence[str], unshard_block: UnshardFn) -> Iterator[UnshardFn]:
    """Yields a hook to call before each block call, which gathers for all of `block_calls` up to it."""
    unshard_order = _UnshardOrder(unshard_block)
    unshard_order.begin(block_calls)
    yield unshard_order.reach
    unshard_order.end()


class _UnshardOrder:
    """The block calls of one pass for which nothing has been gathered yet."""

    def __init__(self, fetch: UnshardFn) -> None:
        self._fetch = fetch
        self._remaining: list[str] = []

    def begin(self, block_calls: Sequence[str]) -> None:
        self._remaining = [block_of(block_call) for block_call in block_calls]

    def reach(self, block_call: str) -> None:
        block = block_of(block_call)
        if block not in self._remaining:  # called more often than in the plan
            self._fetch(block)
        while block in self._remaining:
            next_block = self._remaining.pop(0)
            self._fetch(next_block)
            if next_block == block:
                return

    def end(self) -> None:
        while self._remaining:
            self._fetch(self._remaining.pop(0))
