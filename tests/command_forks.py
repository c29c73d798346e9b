"""Runs the command as forks of a process that has done the imports: two ranks are ready in a second, not in
five.

In `tests.command_line.command`, importing torch takes long. Here a process that has done the imports, and has
one thread only, forks the command (benchmarks/recovery/forked_command.py), and the command forks its ranks.
Processes, signals, pipes and exit codes are real. Tests that need an interpreter of their own use `command`.

Run as a module, this is that process: it reads requests from stdin, a line of JSON each, and answers with
exit codes.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import psutil

from benchmarks.recovery import forked_command
from benchmarks.recovery.resume_matrix import PRELOADED
from meshwright.comm.shared_memory.compile_library import SharedMemoryUnavailable, load_library
from tests.command_line import ENV, Said

ROOT = Path(__file__).parents[1]
PRELOADED_FOR_TESTS = (
    "torch._dynamo",
    "meshwright.commands.verify",
    "meshwright.commands.bench_network",
    "meshwright.commands.doctor",
)


class Forks:
    """Calls the command as forks of one process, which is started at the first call; `close` ends it."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def __call__(self, *argv: object) -> Said:
        """Runs `meshwright ARGV...`; returns exit code, stdout, stderr."""
        server = self._server = self._server or self._start()
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            with TemporaryDirectory(prefix="meshwright-") as folder:
                out, err = Path(folder, "out"), Path(folder, "err")
                request = {
                    "argv": list(map(str, argv)),
                    "out": str(out),
                    "err": str(err),
                    "folder": str(Path.cwd()),
                }
                print(json.dumps(request), file=server.stdin, flush=True)
                code = int(server.stdout.readline())
                return code, out.read_text(errors="replace"), err.read_text(errors="replace")
        except BaseException:  # a test that timed out: its answer must not be taken for that of the next
            self._kill(server)
            raise

    def close(self) -> None:
        """Ends the process that forks."""
        if self._server is not None:
            self._server.communicate()  # it reads the end of its requests

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[str]:
        env = {**ENV, "PYTHONPATH": f"{ROOT}{os.pathsep}{ENV['PYTHONPATH']}"}
        argv, pipe = [sys.executable, "-m", "tests.command_forks"], subprocess.PIPE
        return subprocess.Popen(
            argv, env=env, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )

    def _kill(self, server: subprocess.Popen[str]) -> None:
        self._server = None
        below = psutil.Process(server.pid).children(recursive=True)
        for process in [psutil.Process(server.pid), *below]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        server.communicate()


def run_forked(argv: list[str], out: str, err: str, folder: str) -> int:
    """Runs the command with `argv` in a fork; returns its exit code."""
    with Path(out).open("wb") as output, Path(err).open("wb") as errors:

        def body() -> int:
            os.dup2(errors.fileno(), 2)
            return forked_command.run_main(argv)

        return forked_command.Forked(body, ENV, output, (errors.fileno(),), Path(folder)).wait()


def serve() -> None:
    """Answers requests until stdin ends."""
    for name in (*PRELOADED, *PRELOADED_FOR_TESTS):
        import_module(name)
    with suppress(SharedMemoryUnavailable):
        load_library()  # compiled here, once
    for request in sys.stdin:
        sys.stdout.write(f"{run_forked(**json.loads(request))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
