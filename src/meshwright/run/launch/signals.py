"""Ctrl-C while a job is prepared: an exception, as usual, which is not forgotten where nobody heard it.

Code that torch runs in callbacks of weak references swallows every exception. Whoever starts ranks asks once more.
"""

import signal
from types import FrameType


class Interrupt:
    """A handler of SIGINT that raises KeyboardInterrupt, and remembers it."""

    def __init__(self) -> None:
        self.told = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.told = True
        raise KeyboardInterrupt


def raise_if_told() -> None:
    """Raise KeyboardInterrupt if an `Interrupt` handles SIGINT, and one has come."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, Interrupt) and handler.told:
        raise KeyboardInterrupt
