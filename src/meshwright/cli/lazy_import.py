"""The module behind a word of the command line, imported when the word is said: it imports torch."""

import os
import signal
from importlib import import_module
from types import FrameType
from typing import Any

from meshwright.run.launch.signals import InterruptHandler


def import_command(command: str) -> Any:
    """The module of `meshwright.commands` that does what `word` says. Ctrl-C meanwhile ends the process, with 130.

    As an exception it can be lost: code that runs while a package is imported (callbacks of weak references) swallows it. From
    then on it is one that is remembered.
    """
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    try:
        return import_module(f"meshwright.commands.{command}")
    finally:
        if usual is signal.default_int_handler:
            signal.signal(signal.SIGINT, InterruptHandler())


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
