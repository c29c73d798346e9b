"""The command and its ranks as forks of a process that has imported everything: each is ready in a second,
not in five.

A trial that kills a command takes milliseconds; what takes long is importing torch, once for the command and
once for each rank. `command` forks a process that calls the command's own `main`, in a session and a folder
of its own; there, the launcher's `subprocess.Popen` forks the ranks likewise. All else is as in the real
thing: processes, signals, pipes, exit codes. The process that forks must have one thread only.
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
    """What `subprocess.Popen` is for a program, for `body`, which returns the exit code.

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
            _become(body, env, output, keep, folder)

    def poll(self) -> int | None:
        """The exit code (negative: the signal), None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(["meshwright"], timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send the signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def command(words: Sequence[str], env: Mapping[str, str], output: IO[bytes], folder: Path) -> Forked:
    """`meshwright WORDS...` in `folder`, as a fork of this process; its ranks are forks too."""

    def body() -> int:
        with patch.object(subprocess, "Popen", _Rank):
            return _main(words)

    return Forked(body, env, output, folder=folder)


class _Rank(Forked):
    """In place of `subprocess.Popen`, as run/launch.py calls it."""

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
                f"the launcher starts {argv}; a fork can only be `python -m meshwright ...`: teach it here"
            )
        super().__init__(lambda: _main(argv[3:]), env, stdout, pass_fds)

    def __class_getitem__(cls, item: object) -> type:
        """Itself: the launcher writes `subprocess.Popen[bytes]`."""
        return cls


def _main(words: Sequence[str]) -> int:
    from meshwright.cli import main  # the one that was imported before the fork

    sys.argv = ["meshwright", *words]
    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    return 0


def _become(
    body: Callable[[], int],
    env: Mapping[str, str],
    output: IO[bytes] | None,
    keep: Sequence[int],
    folder: Path | None,
) -> NoReturn:
    """Turn this fork into what a new program would be: its session, signals, files,
    folder and environment.
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
        return  # the one that listed them
