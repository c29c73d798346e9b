"""Imports the module of a command when the command is called: it imports torch, which takes a second."""

import os
import signal
from importlib import import_module
from types import FrameType
from typing import Any

from meshwright.run.launch.signals import InterruptHandler


def import_command(command: str) -> Any:
    """Returns the module `meshwright.commands.<command>`. Ctrl-C during the import ends the process with code
    130.

    After the import, Ctrl-C raises KeyboardInterrupt and is remembered (`InterruptHandler`).
    """
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:
        # an exception could be lost: callbacks of weak references that run during an import swallow it
        signal.signal(signal.SIGINT, _end)
    try:
        return import_module(f"meshwright.commands.{command}")
    finally:
        if previous is signal.default_int_handler:
            signal.signal(signal.SIGINT, InterruptHandler())


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
