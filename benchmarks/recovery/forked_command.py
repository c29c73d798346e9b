"""Runs the command as a fork of a process that has done the imports: it is ready in a second, not in five.

A trial that kills a command takes milliseconds; importing torch takes long. `command` forks a process that
calls the command's own `main`, in its own session and folder, which forks its ranks. Processes, signals,
pipes and exit codes are real. The process that forks must have one thread only.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, NoReturn

POLL_S = 0.005


class Forked:
    """The counterpart of `subprocess.Popen` for a function `body`, which returns the exit code.

    Output goes to files.
    """

    def __init__(
        self,
        body: Callable[[], int],
        env: Mapping[str, str],
        output: IO[bytes] | None = None,
        keep: Sequence[int] = (),
        folder: Path | None = None,
    ) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run_as_program(body, env, output, keep, folder)

    def poll(self) -> int | None:
        """Returns the exit code (negative: the signal), None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code, after the end. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(["meshwright"], timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Sends the signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


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
    body: Callable[[], int],
    env: Mapping[str, str],
    output: IO[bytes] | None,
    keep: Sequence[int],
    folder: Path | None,
) -> NoReturn:
    """Sets up this fork as a new program: session, signals, files, folder and environment; then runs
    `body`.
    """
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if output is not None:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in keep:
                _close(int(name))
        if folder is not None:
            os.chdir(folder)
        os.environ.clear()
        os.environ.update(env)
        tempfile.tempdir = None
        code = body()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _close(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:
        return  # the descriptor of the listing itself
