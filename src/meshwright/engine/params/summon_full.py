"""Forwards and backwards outside of the program's list: weights kept in shards are brought together block by block.

In every forward all ranks fetch for the same visits, in the plan's order, also for a block that the forward of one of them leaves
out: so they always meet. What is stored whole is brought up to date once, before. A rank that runs parts of the model fetches for
those visits alone that it runs: of a part none is left out.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from meshwright.engine.params.flat_params import FlatParams
from meshwright.engine.runtime.state import TrainedModule
from meshwright.model.blocks.driver import ForwardDriver
from meshwright.plan.model_spec.model_spec import block_of

UnshardFn = Callable[[str], None]  # has the weights of a block whole


@contextmanager
def summon_full_params(
    trained_module: TrainedModule, flat_params: FlatParams, driver: ForwardDriver, action: str
) -> Iterator[None]:
    """Forwards of the module find their weights meanwhile, which are sent for `action`; all ranks run as many forwards."""
    flat_params.refresh_unsharded(action)
    if not flat_params.forward_is_collective:
        yield
        return
    fetch = partial(flat_params.unshard_block, action=action)
    if trained_module.remote_param_names:
        with driver.use_pre_block_hook(fetch):
            yield
        return
    order = _UnshardOrder(fetch)
    hooks = (
        trained_module.module.register_forward_pre_hook(
            lambda *_: order.begin(trained_module.model_spec.block_calls)
        ),
        trained_module.module.register_forward_hook(lambda *_: order.end()),
    )
    with ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.remove)
        stack.enter_context(driver.use_pre_block_hook(order.reach))
        yield


@contextmanager
def unshard_in_order(block_calls: Sequence[str], unshard_block: UnshardFn) -> Iterator[UnshardFn]:
    """What to call before a visit of `visits`: all up to it are fetched for; in the end, those that are left are."""
    order = _UnshardOrder(unshard_block)
    order.begin(block_calls)
    yield order.reach
    order.end()


class _UnshardOrder:
    """The visits of one pass for which nothing has been fetched yet."""

    def __init__(self, fetch: UnshardFn) -> None:
        self._fetch = fetch
        self._left: list[str] = []

    def begin(self, visits: Sequence[str]) -> None:
        self._left = [block_of(visit) for visit in visits]

    def reach(self, visit: str) -> None:
        block = block_of(visit)
        if block not in self._left:  # called more often than the plan knows
            self._fetch(block)
        while block in self._left:
            reached = self._left.pop(0)
            self._fetch(reached)
            if reached == block:
                return

    def end(self) -> None:
        while self._left:
            self._fetch(self._left.pop(0))
