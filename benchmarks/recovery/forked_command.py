"""Runs the command and its ranks as forks of a process that has done the imports: each is ready in a second,
not in five.

A trial that kills a command takes milliseconds; importing torch takes long, once for the command and once for
each rank. `command` forks a process that calls the command's own `main`, in its own session and folder; in
it, the launcher's `subprocess.Popen` forks the ranks in the same way. Processes, signals, pipes and exit
codes are real. The process that forks must have one thread only.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn
from unittest.mock import patch

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

    def body() -> int:
        with patch.object(subprocess, "Popen", _Rank):
            return _main(argv)

    return Forked(body, env, output, folder=folder)


class _Rank(Forked):
    """Replaces `subprocess.Popen`, as run/launch/local_launcher.py calls it."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: IO[bytes] | None,
        pass_fds: Sequence[int],
        **others: object,
    ) -> None:
        if list(argv[:3]) != [sys.executable, "-m", "meshwright"]:
            raise ValueError(
                f"the launcher starts {argv}; a fork can only be `python -m meshwright ...`; support it here"
            )
        super().__init__(lambda: _main(argv[3:]), env, stdout, pass_fds)

    def __class_getitem__(cls, item: object) -> type:
        """Returns the class: the launcher writes `subprocess.Popen[bytes]`."""
        return cls


def _main(argv: Sequence[str]) -> int:
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
