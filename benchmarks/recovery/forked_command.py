"""Runs the command as a fork of a process that has done the imports: it is ready in a second, not in five.

A trial that kills a command takes milliseconds; importing torch takes long. `command` forks a process that
calls the command's own `main`, in its own session and folder, which forks its ranks. Processes, signals,
pipes and exit codes are real. The process that forks must have one thread only.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, NoReturn

from meshwright.run.launch.forked_process import ForkedProcess

POLL_S = 0.005


class Forked(ForkedProcess):
    """A fork that is a program of its own: it runs `body`, which returns the exit code, in `folder`, with the
    environment `env` and no open file of this process but `keep`.

    Output goes to the file `output`, by default where this process writes.
    """

    def __init__(
        self,
        body: Callable[[], int],
        env: Mapping[str, str],
        output: IO[bytes] | None = None,
        keep: Sequence[int] = (),
        folder: Path | None = None,
    ) -> None:
        program = partial(_run_as_program, body, env, keep, folder)
        super().__init__(program, None if output is None else output.fileno(), ())

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code, after the end. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(["meshwright"], timeout or 0.0)
            time.sleep(POLL_S)
        return code


def command(argv: Sequence[str], env: Mapping[str, str], output: IO[bytes], folder: Path) -> Forked:
    """Starts `meshwright ARGV...` in `folder`, as a fork of this process; its ranks are forks too."""
    return Forked(partial(run_main, argv), env, output, folder=folder)


def run_main(argv: Sequence[str]) -> int:
    """Runs `meshwright ARGV...` in this process, which is a fork for it; returns the exit code."""
    from meshwright.cli import main  # imported before the fork

    sys.argv = ["meshwright", *argv]
    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    return 0


def _run_as_program(
    body: Callable[[], int], env: Mapping[str, str], keep: Sequence[int], folder: Path | None
) -> NoReturn:
    """Sets up this fork as a new program: files, folder and environment; then runs `body`."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            _close(int(name))
    if folder is not None:
        os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    sys.exit(body())


def _close(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:
        return  # the descriptor of the listing itself
