"""One attempt of a user: a command or a script, run in a folder, and what it printed.

Each is a fork of a process that has done the imports (benchmarks/recovery/forked_command.py), so that it
begins in milliseconds and leaves nothing behind in this process. A script ends as Python ends it; a PlanError
that it does not catch has exit code 2, and any other exception 3, as those of the command.
"""

import os
import runpy
import shlex
import signal
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

from benchmarks.first_hour.mistake import FIRST_FOLDER
from benchmarks.recovery import forked_command
from meshwright.plan.job.errors import PlanError

OUTPUT = "output.txt"
SCRIPT = "train.py"
REFUSED, CRASHED, TIMED_OUT = 2, 3, 124
TIMEOUT_S = 120.0
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
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


def run_command(line: str, folder: Path, env: Mapping[str, str]) -> Outcome:
    """Runs `meshwright LINE` in `folder`; the ranks that it starts are forks too."""

    def body() -> int:
        with patch.object(subprocess, "Popen", forked_command._Rank):
            return forked_command._main(shlex.split(line))

    return _run(body, folder, env)


def run_script(text: str, folder: Path, env: Mapping[str, str]) -> Outcome:
    """Runs a script of the user's, behind the lines that begin each of them, in `folder`."""
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

    return _run(body, folder, env)


def _run(body: Callable[[], int], folder: Path, env: Mapping[str, str]) -> Outcome:
    clean = {key: value for key, value in os.environ.items() if key not in LAUNCHERS}
    path = folder / OUTPUT
    with path.open("wb") as output:
        running = forked_command.Forked(body, {**clean, "COLUMNS": "100", **env}, output, folder=folder)
        try:
            code = running.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            code = TIMED_OUT
    return Outcome(code, path.read_text(encoding="utf-8", errors="replace"))
