"""Tensors that transformers captures inside a block: they leave it by a side channel, and count as its outputs.

A model that is asked for router logits (or attentions) does not hand them from layer to layer. A hook on the router puts
them into a list that belongs to the forward, and the model reads the list at its end:

    block      hidden ---> router ---> experts ---> hidden'            returned: cut at the border as ever
                             |
    collector  {"router_logits": [layer 0, layer 1, ...]}              captured: put in the list, behind the block's back

An auxiliary loss computed from the list would reach into every block after its border was closed. So the drive looks at
the collector before and after each block, and what a block added becomes an output of it: a leaf stands in the list, and
the block's backward starts from both gradients.

The collector is found by name in the module of transformers that holds it, if that was imported; another tensor that
leaves a block behind its outputs (a hook of one's own, an attribute) is refused by name in `model.paths`.
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
    """A list that is being filled: its channel ("router_logits"), the list, and how long it was."""

    channel: str
    captured: list[Any]
    length: int

    @property
    def added_tensors(self) -> list[Any]:
        """What was added since, in a list of its own."""
        return self.captured[self.length :]

    def replace(self, tensors: list[Any]) -> None:
        """Put `added` where what was added stands."""
        self.captured[self.length :] = tensors


def capture_marks() -> tuple[CaptureMark, ...]:
    """A mark in every list that transformers is filling on this thread; none when nothing is captured."""
    lists = _active_lists()
    return tuple(_list_marks(lists)) if lists else ()


def empty_capture_lists() -> CaptureLists | None:
    """What transformers is filling on this thread, with lists as long that hold nothing; None when nothing is captured."""
    lists = _active_lists()
    if not lists:
        return None
    return {
        channel: [None] * len(found) if isinstance(found, list) else found for channel, found in lists.items()
    }


@contextmanager
def capture_into(lists: CaptureLists | None) -> Iterator[tuple[CaptureMark, ...]]:
    """Have transformers fill `into` meanwhile, and nothing else; None: it captures nothing. Marks tell what was added."""
    collector = _collector()
    if collector is None:
        yield ()
        return
    before = collector.set(lists)
    try:
        yield tuple(_list_marks(lists or {}))
    finally:
        collector.reset(before)


def _collector() -> Any:
    home = sys.modules.get(CAPTURE_MODULE)
    return None if home is None else vars(home).get(COLLECTOR_NAME)


def _active_lists() -> dict[str, Any] | None:
    collector = _collector()
    return None if collector is None else collector.get()


def _list_marks(lists: dict[str, Any]) -> Iterator[CaptureMark]:
    for channel, found in lists.items():
        if isinstance(found, list):  # the collector also holds which layers were asked for
            yield CaptureMark(channel, found, len(found))
