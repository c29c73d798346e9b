"""One attempt of a user: a command or a script, run in a folder, and what it printed.

Each is a fork of a process that has done the imports (benchmarks/recovery/forked_command.py), so that it
begins in milliseconds and leaves nothing behind in this process. A script ends as Python ends it; a PlanError
that it does not catch has exit code 2, and any other exception 3, as those of the command.
"""

import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

from benchmarks.first_hour.mistake import FIRST_FOLDER, Mistake
from benchmarks.recovery import forked_command
from meshwright.plan.job.errors import PlanError

OUTPUT = "output.txt"
SCRIPT = "train.py"
REFUSED, CRASHED, TIMED_OUT = 2, 3, 124
TIMEOUT_S, POLL_S = 120.0, 0.05
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PRELOADED = (
    "meshwright.api",
    "meshwright.cli",
    "meshwright.commands.config_help.starter_config",
    "meshwright.commands.export_import_convert",
    "meshwright.commands.import_config.import_config",
    "meshwright.commands.inspect_model",
    "meshwright.commands.report",
    "meshwright.commands.search.search",
    "meshwright.commands.train",
    "meshwright.commands.verify",
    "meshwright.integrations.transformers",
    "torch._dynamo",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)


@dataclass(frozen=True)
class Outcome:
    """The exit code of an attempt, and what it printed."""

    exit_code: int
    printed: str


def preload() -> None:
    """Imports what commands and scripts need, so that forks have it."""
    for name in PRELOADED:
        import_module(name)


def lay_out(folder: Path) -> None:
    """Writes the files of a new user into `folder`: a model, a text, a config."""
    for name, text in tomllib.loads(FIRST_FOLDER.read_text(encoding="utf-8"))["files"].items():
        write_file(folder / name, text)


def write_file(path: Path, text: str) -> None:
    """Writes a file, and its folders; a name that ends in `/` is a folder, a text `|` a named pipe."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if text == "/":
        path.mkdir()
    elif text == "|":
        os.mkfifo(path)
    else:
        path.write_text(text, encoding="utf-8")


def attempt(mistake: Mistake, what: str, folder: Path) -> Outcome:
    """Runs `what`, the command or the script of `mistake`, in `folder`."""
    if mistake.ranks:
        return _run_ranks(mistake, what, folder)
    return run_command(what, folder) if mistake.run else run_script(what, folder)


def run_command(line: str, folder: Path) -> Outcome:
    """Runs `meshwright LINE` in `folder`; the ranks that it starts are forks too."""
    return _end(_start(_command(line), folder, {}), folder)


def run_script(text: str, folder: Path) -> Outcome:
    """Runs a script of the user's, behind the lines that begin each of them, in `folder`."""
    return _end(_start(_script(text, folder), folder, {}), folder)


@contextmanager
def training_beside(line: str, folder: Path) -> Iterator[None]:
    """Runs `meshwright LINE` in `folder` during the body, which begins when a run has claimed its folder."""
    running = _start(_command(line), folder, {}, "beside.txt")
    end = time.monotonic() + TIMEOUT_S
    while not list(folder.glob("runs/*/attempts/*/owner.json")):
        if time.monotonic() > end or running.poll() is not None:
            raise RuntimeError(f"{line} does not train:\n{(folder / 'beside.txt').read_text()}")
        time.sleep(POLL_S)
    try:
        yield
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(TIMEOUT_S)


def _command(line: str) -> Callable[[], int]:
    return partial(forked_command.run_main, shlex.split(line))


def _script(text: str, folder: Path) -> Callable[[], int]:
    prelude = tomllib.loads(FIRST_FOLDER.read_text(encoding="utf-8"))["script_begins"]
    (folder / SCRIPT).write_text(prelude + text, encoding="utf-8")

    def body() -> int:
        sys.path.insert(0, str(folder))
        try:
            runpy.run_path(SCRIPT, run_name="__main__")
        except PlanError as error:
            print(f"meshwright.PlanError: {error}", file=sys.stderr)
            return REFUSED
        except Exception:
            traceback.print_exc()
            return CRASHED
        return 0

    return body


def _run_ranks(mistake: Mistake, what: str, folder: Path) -> Outcome:
    """Runs all ranks of `mistake` at once, with the variables that torchrun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(mistake.ranks), "LOCAL_WORLD_SIZE": str(mistake.ranks)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    body = _command(what) if mistake.run else _script(what, folder)
    running = [
        _start(body, folder, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, f"rank{rank}.txt")
        for rank in range(mistake.ranks)
    ]
    ended = [_end(each, folder, f"rank{rank}.txt") for rank, each in enumerate(running)]
    return Outcome(max(each.exit_code for each in ended), "\n".join(each.printed for each in ended))


def _start(
    body: Callable[[], int], folder: Path, env: Mapping[str, str], name: str = OUTPUT
) -> forked_command.Forked:
    clean = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    with (folder / name).open("wb") as output:
        return forked_command.Forked(body, {**clean, "COLUMNS": "100", **env}, output, folder=folder)


def _end(running: forked_command.Forked, folder: Path, name: str = OUTPUT) -> Outcome:
    try:
        code = running.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        code = TIMED_OUT
    return Outcome(code, (folder / name).read_text(encoding="utf-8", errors="replace"))
