"""Signals: Ctrl-C while a job is prepared, and the flag that stops a run after a step.

Ctrl-C raises KeyboardInterrupt and is remembered, because the exception can be lost: code that torch runs in
callbacks of weak references swallows every exception. Before ranks start, `raise_if_interrupted` checks.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def stop_flag(received: list[int]) -> Iterator[Callable[[], bool]]:
    """Yields a function that returns True after SIGTERM, SIGINT or SIGUSR1; the signals are appended to
    `received`.

    The flag travels with the next step, so all ranks stop after the same step. SIGUSR1, which schedulers send
    before a time limit, counts as SIGTERM. Outside this context the signals end the process: a rank that
    waits for others cannot read a flag.
    """

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.SIGTERM if number == signal.SIGUSR1 else number)

    raise_if_interrupted()
    before = {
        number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    }
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
