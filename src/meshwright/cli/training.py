"""The words of the verbs that a plan goes through: plan, verify, train."""

import signal
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.environment import launcher, stop_flag, this_rank
from meshwright.cli.faults import console, said, show_failure
from meshwright.core.errors import PlanError

EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
OWN = ("--out", "--world", "--all", "--steps", "--on", "--shrink", "--json", "--from-step")

World = Annotated[int | None, typer.Option(help="The number of ranks, for a mesh axis of -1.", min=1)]
Config = Annotated[Path, typer.Argument(help="A config or plan file (TOML); keys behind it (--train.steps 100) replace its own.")]


def plan(
    context: typer.Context,
    config: Config,
    out: Annotated[Path | None, typer.Option(help="Write the resolved plan here.")] = None,
    world: World = None,
    every: Annotated[bool, typer.Option("--all", help="One row per action.")] = False,
) -> None:
    """Resolve a config into a plan, refuse what cannot work, and show what will happen."""
    with said(OWN):
        verb = _verb("plan")
        resolved = verb.resolve(config, context.args, world)
        console.print(verb.view(resolved, every=every))
        if out is not None:
            verb.write_plan(resolved, out)
            console.print(f"plan written to {out}", soft_wrap=True)


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
    with said(OWN):
        verb, rank = _verb("verify"), this_rank()
        if rank is not None:
            verb.verify_rank(rank, config, context.args, steps, shrink=shrink)
            return
        if on not in ("threads", "processes"):
            raise PlanError(f"ranks cannot live on '{on}'", fix="--on threads, or --on processes", where="--on")
        starter = launcher() if on == "processes" else None
        try:
            verdict, path = verb.verify(config, context.args, steps, world, out, starter, shrink=shrink)
        except verb.RanksFailed as error:
            show_failure(error.outcome)
            raise typer.Exit(error.outcome.code) from None
        console.print(verb.view_verdict(verdict))
        console.print(f"verdict     {path}", soft_wrap=True)
        raise typer.Exit(0 if verdict.passed else 1)


def train(
    context: typer.Context,
    config: Config,
    from_step: Annotated[int | None, typer.Option(help="Go on from the checkpoint of this step, not from the newest.")] = None,
    world: World = None,
) -> None:
    """Train, saving checkpoints; the same command goes on from the newest good one."""
    with said(OWN):
        verb, rank = _verb("train"), this_rank()
        if rank is not None:
            with stop_flag() as received:
                ended = verb.train_rank(rank, config, context.args, from_step, lambda: bool(received), console)
            raise typer.Exit(128 + (received[0] if received else signal.SIGTERM) if ended.stopped else 0)
        outcome = verb.train(config, context.args, world, from_step, launcher(), console)
        show_failure(outcome)
        raise typer.Exit(outcome.code)


def add_to(app: typer.Typer) -> None:
    """Give `app` the commands of this file."""
    for command in (plan, verify, train):
        app.command(context_settings=EXTRA)(command)


def _verb(name: str) -> Any:
    """The module behind a word; it imports torch."""
    return import_module(f"meshwright.verbs.{name}")
