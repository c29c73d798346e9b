"""Forwards and backwards outside of the program's list: weights kept in shards are brought together block by block.

In every forward all ranks fetch for the same visits, in the plan's order, also for a block that the forward of one of them leaves
out: so they always meet. What is stored whole is brought up to date once, before. A rank that runs parts of the model fetches for
those visits alone that it runs: of a part none is left out.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from meshwright.engine.params.flat_params import Store
from meshwright.engine.runtime.state import Subject
from meshwright.model.blocks.driver import Drive
from meshwright.plan.model_spec.model_spec import block_of

Fetch = Callable[[str], None]  # has the weights of a block whole


@contextmanager
def whole(subject: Subject, store: Store, drive: Drive, action: str) -> Iterator[None]:
    """Forwards of the module find their weights meanwhile, which are sent for `action`; all ranks run as many forwards."""
    store.refresh(action)
    if not store.together:
        yield
        return
    fetch = partial(store.fetch, action=action)
    if subject.elsewhere:
        with drive.fetching(fetch):
            yield
        return
    order = _Order(fetch)
    hooks = (
        subject.module.register_forward_pre_hook(lambda *_: order.begin(subject.anatomy.visits)),
        subject.module.register_forward_hook(lambda *_: order.end()),
    )
    with ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.remove)
        stack.enter_context(drive.fetching(order.reach))
        yield


@contextmanager
def in_order(visits: Sequence[str], fetch: Fetch) -> Iterator[Fetch]:
    """What to call before a visit of `visits`: all up to it are fetched for; in the end, those that are left are."""
    order = _Order(fetch)
    order.begin(visits)
    yield order.reach
    order.end()


class _Order:
    """The visits of one pass for which nothing has been fetched yet."""

    def __init__(self, fetch: Fetch) -> None:
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
