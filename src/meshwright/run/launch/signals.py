"""Ctrl-C while a job is prepared: an exception, as usual, which is not forgotten where nobody heard it.

Code that torch runs in callbacks of weak references swallows every exception. Whoever starts ranks asks once more.
"""

import signal
from types import FrameType


class InterruptHandler:
    """A handler of SIGINT that raises KeyboardInterrupt, and remembers it."""

    def __init__(self) -> None:
        self.was_interrupted = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.was_interrupted = True
        raise KeyboardInterrupt


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if an `Interrupt` handles SIGINT, and one has come."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, InterruptHandler) and handler.was_interrupted:
        raise KeyboardInterrupt
