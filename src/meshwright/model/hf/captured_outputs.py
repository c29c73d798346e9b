"""Tensors that transformers captures inside a block: they leave by a side channel and count as outputs.

A model that is asked for router logits (or attentions) does not pass them from layer to layer. A hook on the
router appends them to a list that belongs to the forward, and the model reads the list at its end:

    block      hidden ---> router ---> experts ---> hidden'       returned: the graph is cut at the boundary
                             |
    collector  {"router_logits": [layer 0, layer 1, ...]}         captured: appended to the list in the block

An auxiliary loss computed from the list would reach into every block after its graph was cut. So the driver
compares the collector before and after each block, and what a block appended becomes an output of it: the
list gets a leaf, and the block's backward starts from both gradients.

The collector is found by name in the module of transformers that holds it, if that was imported. Any other
tensor that leaves a block without being returned (a custom hook, an attribute) is refused by name in
`model.blocks.autograd_partition`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

CaptureLists = dict[str, Any]
CAPTURE_MODULE, COLLECTOR_NAME = "transformers.utils.output_capturing", "_active_collector"


@dataclass(frozen=True, slots=True)
class CaptureMark:
    """A list that is being filled: its channel ("router_logits"), the list, and its length at the mark."""

    channel: str
    captured: list[Any]
    length: int

    @property
    def added_tensors(self) -> list[Any]:
        """The items appended since the mark, as a new list."""
        return self.captured[self.length :]

    def replace(self, tensors: list[Any]) -> None:
        """Replaces the items appended since the mark by `tensors`."""
        self.captured[self.length :] = tensors


def capture_marks() -> tuple[CaptureMark, ...]:
    """Returns a mark in every list that transformers is filling on this thread; none if nothing is
    captured.
    """
    lists = _active_lists()
    return tuple(_list_marks(lists)) if lists else ()


def empty_capture_lists() -> CaptureLists | None:
    """Returns lists like those that transformers is filling, as long, holding None; None if nothing is
    captured.
    """
    lists = _active_lists()
    if not lists:
        return None
    return {
        channel: [None] * len(found) if isinstance(found, list) else found for channel, found in lists.items()
    }


@contextmanager
def capture_into(lists: CaptureLists | None) -> Iterator[tuple[CaptureMark, ...]]:
    """Context manager: transformers fills `lists` instead (None: captures nothing). Yields marks in them."""
    collector = _collector()
    if collector is None:
        yield ()
        return
    token = collector.set(lists)
    try:
        yield tuple(_list_marks(lists or {}))
    finally:
        collector.reset(token)


def _collector() -> Any:
    module = sys.modules.get(CAPTURE_MODULE)
    return None if module is None else vars(module).get(COLLECTOR_NAME)


def _active_lists() -> dict[str, Any] | None:
    collector = _collector()
    return None if collector is None else collector.get()


def _list_marks(lists: dict[str, Any]) -> Iterator[CaptureMark]:
    for channel, found in lists.items():
        if isinstance(found, list):  # the collector also holds the requested layers
            yield CaptureMark(channel, found, len(found))
