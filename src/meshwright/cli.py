"""The command line: plan, verify, train. Thin: it reads words, calls the api, and shows what comes back.

    meshwright plan   CONFIG.toml [--out PLAN.toml] [--train.steps 100]
    meshwright verify PLAN.toml
    meshwright train  PLAN.toml

Any key of the file can be set behind it: `--optimizer.lr 1e-3`. Under torchrun (RANK in the environment) the command is
one rank; otherwise it starts the local ranks itself. The only module that prints, and the only one that reads the
environment. torch is imported when a verb runs, not for `--help`.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from meshwright.core.errors import PlanError

if TYPE_CHECKING:
    from meshwright.verbs import Launcher, Ranked

EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__.split("\n\n")[0])
console, errors = Console(highlight=False), Console(stderr=True, highlight=False)

World = Annotated[int | None, typer.Option(help="The number of ranks, for a mesh axis of -1.")]
Config = Annotated[Path, typer.Argument(help="A config or plan file (TOML).")]


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
        verbs = import_module("meshwright.verbs")
        resolved = verbs.resolve(config, context.args, world)
        console.print(verbs.view(resolved, every=every))
        if out is not None:
            verbs.write_plan(resolved, out)
            console.print(f"plan written to {out}", soft_wrap=True)


@app.command(context_settings=EXTRA)
def verify(
    context: typer.Context,
    config: Config,
    steps: Annotated[int, typer.Option(help="Global steps to compare.")] = 3,
    on: Annotated[str, typer.Option(help="Where the ranks live: threads or processes.")] = "threads",
    shrink: Annotated[bool, typer.Option("--shrink", help="Compare a scaled-down copy of the model.")] = False,
    out: Annotated[Path | None, typer.Option("--json", help="Write the verdict here (default: in run.folder).")] = None,
    world: World = None,
) -> None:
    """Prove that a plan computes what one device computes: loss, gradients, norm and parameters."""
    with _said():
        verbs, rank = import_module("meshwright.verbs"), _rank()
        if rank is not None:
            verbs.verify_rank(rank, config, context.args, steps, shrink=shrink)
            return
        if on not in ("threads", "processes") or steps < 1:
            text = f"{steps} steps on {on}; needed are at least 1 step, on threads or on processes"
            raise PlanError(text, fix="--steps 3 --on threads", where="verify")
        launcher = _launcher() if on == "processes" else None
        verdict, path = verbs.verify(config, context.args, steps, world, out, launcher, shrink=shrink)
        console.print(str(verdict), style="green" if verdict.passed else "red", markup=False, soft_wrap=True)
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
        verbs, rank = import_module("meshwright.verbs"), _rank()
        if rank is not None:
            with _stop_flag() as stopping:
                ended = verbs.train_rank(rank, config, context.args, from_step, stopping, console)
            raise typer.Exit(143 if ended.stopped else 0)
        outcome = verbs.train(config, context.args, world, from_step, _launcher(), console)
        if outcome.failure is not None:
            errors.print(f"[bold red]rank {outcome.failure.rank} failed[/]")
            errors.print(outcome.failure.text, markup=False, soft_wrap=True)
        raise typer.Exit(outcome.code)


def main() -> None:
    """The console script."""
    app()


@contextmanager
def _said() -> Iterator[None]:
    """A request that cannot work ends with its faults and code 2, without a traceback."""
    try:
        yield
    except PlanError as error:
        for fault in error.faults:
            errors.print("[bold red]error[/] ", end="")
            errors.print(f"{fault.where}: {fault.what}" if fault.where else fault.what, markup=False, soft_wrap=True)
            errors.print("  [green]repair[/] ", end="")
            errors.print(fault.fix, markup=False, soft_wrap=True)
        raise typer.Exit(2) from None


def _rank() -> "Ranked | None":
    """This process as one rank, when torchrun or our own launcher has started it."""
    if "RANK" not in os.environ:
        return None
    said = os.environ
    lifeline = said.get("MESHWRIGHT_LIFELINE")
    return import_module("meshwright.verbs").Ranked(
        rank=int(said["RANK"]),
        world=int(said["WORLD_SIZE"]),
        local_rank=int(said.get("LOCAL_RANK", said["RANK"])),
        store=said.get("MESHWRIGHT_STORE"),
        lifeline_fd=None if lifeline is None else int(lifeline),
    )


def _launcher() -> "Launcher":
    """Starts `meshwright ARGV...` as `world` local ranks."""
    launch = import_module("meshwright.run.launch").launch
    return lambda argv, world, folder: launch(["-m", "meshwright", *argv], world, folder, dict(os.environ))


@contextmanager
def _stop_flag() -> Iterator[Callable[[], bool]]:
    """SIGTERM asks this rank to stop; all ranks stop together after the step that carries the wish."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGTERM, before)
