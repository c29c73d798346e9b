"""The command line: plan, verify, train. Thin: it reads words, calls the verbs, and shows what comes back.

    meshwright plan   CONFIG.toml [--out PLAN.toml] [--train.steps 100]
    meshwright verify PLAN.toml
    meshwright train  PLAN.toml

Any key of the file can be set behind it: `--optimizer.lr 1e-3`. Under torchrun (RANK in the environment) the command is
one rank; otherwise it starts the local ranks itself. The only module that reads the environment. torch is imported when a
verb runs, not for `--help`.

Exit codes: 0 done, 1 a rank failed or a verdict is negative, 2 the request cannot work, 130 after Ctrl-C, 143 after SIGTERM.
"""

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from meshwright.core.errors import PlanError

if TYPE_CHECKING:
    from meshwright.run.launch import Outcome
    from meshwright.verbs import Launcher, Ranked

ABOUT = """Train any PyTorch model on any number of devices, and prove that it trains what one device would.

Any key of the config can be set behind it: meshwright train CONFIG.toml --train.steps 100 --optimizer.lr 1e-3"""
EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
OWN = ("--out", "--world", "--all", "--steps", "--on", "--shrink", "--json", "--from-step")
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=ABOUT)
console, errors = Console(highlight=False), Console(stderr=True, highlight=False)

World = Annotated[int | None, typer.Option(help="The number of ranks, for a mesh axis of -1.", min=1)]
Config = Annotated[Path, typer.Argument(help="A config or plan file (TOML); keys behind it (--train.steps 100) replace its own.")]


@app.command(context_settings=EXTRA)
def plan(
    context: typer.Context,
    config: Config,
    out: Annotated[Path | None, typer.Option(help="Write the resolved plan here.")] = None,
    world: World = None,
    every: Annotated[bool, typer.Option("--all", help="One row per action.")] = False,
) -> None:
    """Resolve a config into a plan, refuse what cannot work, and show what will happen."""
    with _said():
        verbs = _verbs()
        resolved = verbs.resolve(config, context.args, world)
        console.print(verbs.view(resolved, every=every))
        if out is not None:
            verbs.write_plan(resolved, out)
            console.print(f"plan written to {out}", soft_wrap=True)


@app.command(context_settings=EXTRA)
def verify(
    context: typer.Context,
    config: Config,
    steps: Annotated[int, typer.Option(help="Global steps to compare.", min=1)] = 3,
    on: Annotated[str, typer.Option(help="Where the ranks live: threads or processes.")] = "threads",
    shrink: Annotated[bool, typer.Option("--shrink", help="Compare a scaled-down copy of the model.")] = False,
    out: Annotated[Path | None, typer.Option("--json", help="Write the verdict here (default: in run.folder).")] = None,
    world: World = None,
) -> None:
    """Prove that a plan computes what one device computes: loss, gradients, norm and parameters."""
    with _said():
        verbs, rank = _verbs(), _rank()
        if rank is not None:
            verbs.verify_rank(rank, config, context.args, steps, shrink=shrink)
            return
        if on not in ("threads", "processes"):
            raise PlanError(f"ranks cannot live on '{on}'", fix="--on threads, or --on processes", where="--on")
        launcher = _launcher() if on == "processes" else None
        try:
            verdict, path = verbs.verify(config, context.args, steps, world, out, launcher, shrink=shrink)
        except verbs.RanksFailed as error:
            _show_failure(error.outcome)
            raise typer.Exit(error.outcome.code) from None
        console.print(verbs.view_verdict(verdict))
        console.print(f"verdict     {path}", soft_wrap=True)
        raise typer.Exit(0 if verdict.passed else 1)


@app.command(context_settings=EXTRA)
def train(
    context: typer.Context,
    config: Config,
    from_step: Annotated[int | None, typer.Option(help="Go on from the checkpoint of this step, not from the newest.")] = None,
    world: World = None,
) -> None:
    """Train, saving checkpoints; the same command goes on from the newest good one."""
    with _said():
        verbs, rank = _verbs(), _rank()
        if rank is not None:
            with _stop_flag() as received:
                ended = verbs.train_rank(rank, config, context.args, from_step, lambda: bool(received), console)
            raise typer.Exit(128 + (received[0] if received else signal.SIGTERM) if ended.stopped else 0)
        outcome = verbs.train(config, context.args, world, from_step, _launcher(), console)
        _show_failure(outcome)
        raise typer.Exit(outcome.code)


def main() -> None:
    """The console script."""
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _verbs() -> Any:
    """The module behind the words; it imports torch."""
    return import_module("meshwright.verbs")


@contextmanager
def _said() -> Iterator[None]:
    """A request that cannot work ends with its faults and code 2; a traceback is shown only of the user's own file."""
    try:
        yield
    except PlanError as error:
        if error.__cause__ is not None and (trace := _own_frames(error.__cause__)):
            errors.print(trace.rstrip(), markup=False, soft_wrap=True)
        for fault in error.faults:
            unknown = fault.what.startswith("there is no key") and fault.where.startswith("--")
            words = f" (options of the command itself: {', '.join(OWN)})" if unknown else ""
            _show_fault(f"{fault.where}: {fault.what}" if fault.where else fault.what, fault.fix + words)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def _show_fault(text: str, fix: str) -> None:
    errors.print("[bold red]error[/] ", end="")
    errors.print(text, markup=False, soft_wrap=True)
    errors.print("  [green]repair:[/] ", end="")
    errors.print(fix, markup=False, soft_wrap=True)


def _show_failure(outcome: "Outcome") -> None:
    """What the ranks said of how they failed, once; the cursor that a killed rank may have hidden comes back."""
    if console.is_terminal:
        console.show_cursor(True)
    if outcome.failure is None:
        return
    if outcome.code == 2:
        errors.print("[bold red]error[/] ", end="")
    errors.print(outcome.failure.text, markup=False, soft_wrap=True)


def _own_frames(error: BaseException) -> str:
    """The traceback of `error` from the first line in a file that is neither installed nor ours; "" when there is none."""
    installed = (str(Path(__file__).parent), sys.prefix, sys.base_prefix, "<")
    frames = traceback.extract_tb(error.__traceback__)
    own = next((i for i, frame in enumerate(frames) if not frame.filename.startswith(installed)), None)
    if own is None:
        return ""
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames[own:])])


def _rank() -> "Ranked | None":
    """This process as one rank, when torchrun or our own launcher has started it."""
    if "RANK" not in os.environ:
        return None
    said = os.environ
    words = {"RANK": said["RANK"], "WORLD_SIZE": said.get("WORLD_SIZE", ""), "LOCAL_RANK": said.get("LOCAL_RANK", said["RANK"])}
    odd = [f"{key}={value!r}" for key, value in words.items() if not value.isdecimal()]
    if odd:
        fix = "start it with torchrun, or unset RANK to let meshwright start the local ranks itself"
        raise PlanError(
            f"RANK is set in the environment, and {' and '.join(odd)}: needed are numbers", fix=fix, where="environment"
        )
    lifeline = said.get("MESHWRIGHT_LIFELINE")
    rank, world, local_rank = map(int, words.values())
    lifeline_fd = None if lifeline is None else int(lifeline)
    return _verbs().Ranked(rank, world, local_rank, said.get("MESHWRIGHT_STORE"), lifeline_fd)


def _launcher() -> "Launcher":
    """Starts `meshwright ARGV...` as `world` local ranks."""
    launch = import_module("meshwright.run.launch").launch
    return lambda argv, world, folder: launch(["-m", "meshwright", *argv], world, folder, dict(os.environ))


@contextmanager
def _stop_flag() -> Iterator[list[int]]:
    """The SIGTERM and SIGINT that this rank receives: all ranks stop together after the step that carries the wish."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
