"""Starts a rank as a fork of the launching process, which spares it all imports.

A process that trains spends seconds of CPU time on importing torch and transformers. The launching process
has imported them already, for the checks; a fork starts with what it has:

    launching process   imports, checks ---- fork ---- fork ---- watches
    rank 0                                    +--- runs the command as rank 0
    rank 1                                               +--- runs the command as rank 1

A fork has the memory of its parent, and none of its threads. So it is safe only where no thread is missed:
the launching process computes nothing with several threads before it forks, and has no context of an
accelerator. `launcher_env.local_launcher` decides; where it is not safe, ranks are new interpreters.

`ForkedProcess` has the methods of `subprocess.Popen` that the launcher uses.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable
from io import TextIOWrapper
from multiprocessing import get_context
from warnings import catch_warnings

RESET_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class ForkedProcess:
    """A fork of this process in a session of its own that runs `main()`.

    Its output goes to the file descriptor `output` (None: where this process writes); it closes `closed_fds`.
    Its exit code is that of an interpreter that runs `main()`.
    """

    def __init__(
        self,
        main: Callable[[], None],
        output: int | None,
        closed_fds: Iterable[int],
    ) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else the fork writes once more what is buffered
        # a signal that arrives before the fork has its own handlers would be noted by those of its parent
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, RESET_SIGNALS)
        try:
            self._process = get_context("fork").Process(
                target=_run, args=(main, output, tuple(closed_fds), mask)
            )
            with catch_warnings(action="ignore", category=DeprecationWarning):  # of threads, see above
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid or 0

    @property
    def returncode(self) -> int:
        """Its exit code, below 0 after a signal; only once `poll` or `wait` has found that it ended."""
        return self._process.exitcode or 0

    def poll(self) -> int | None:
        """Returns its exit code if it has ended."""
        return self._process.exitcode

    def wait(self) -> int:
        """Waits until it has ended; returns its exit code."""
        self._process.join()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends it a signal if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(
    main: Callable[[], None],
    output: int | None,
    closed_fds: Iterable[int],
    mask: Iterable[int],
) -> None:
    os.setsid()
    for fd in closed_fds:
        os.close(fd)
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(write_through=True)  # the last words of a rank that is killed are in its log
    for number in RESET_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    main()
