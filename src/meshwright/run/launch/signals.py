"""Ctrl-C while a job is prepared: raises KeyboardInterrupt and remembers it, because the exception can be
lost.

Code that torch runs in callbacks of weak references swallows every exception. Before ranks start,
`raise_if_interrupted` checks.
"""

import signal
from types import FrameType


class InterruptHandler:
    """A handler of SIGINT that raises KeyboardInterrupt and remembers it."""

    def __init__(self) -> None:
        self.was_interrupted = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.was_interrupted = True
        raise KeyboardInterrupt


def raise_if_interrupted() -> None:
    """Raises KeyboardInterrupt if an `InterruptHandler` handles SIGINT and received one."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, InterruptHandler) and handler.was_interrupted:
        raise KeyboardInterrupt
