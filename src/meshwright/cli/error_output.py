"""Prints errors as a user sees them: the diagnostics of a PlanError, the failure of a rank."""

import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from meshwright.plan.job.errors import PlanError

if TYPE_CHECKING:
    from meshwright.run.launch.local_launcher import LaunchResult

console, errors = Console(highlight=False), Console(stderr=True, highlight=False)


@contextmanager
def exit_on_error(own_options: Sequence[str] = ()) -> Iterator[None]:
    """Turns a PlanError in the body into printed diagnostics and exit code 2.

    A traceback is shown only if the error was raised by the user's own file.
    """
    try:
        yield
    except PlanError as error:
        if error.__cause__ is not None and (trace := _own_frames(error.__cause__)):
            errors.print(trace.rstrip(), markup=False, soft_wrap=True)
        for diagnostic in error.diagnostics:
            unknown = diagnostic.problem.startswith("there is no key") and diagnostic.location.startswith(
                "--"
            )
            options = f" (options of the command itself: {', '.join(own_options)})" if unknown else ""
            _print_error(
                f"{diagnostic.location}: {diagnostic.problem}" if diagnostic.location else diagnostic.problem,
                diagnostic.fix + options,
            )
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def _print_error(text: str, fix: str) -> None:
    errors.print("[bold red]error[/] ", end="")
    errors.print(text, markup=False, soft_wrap=True)
    errors.print("  [green]repair:[/] ", end="")
    errors.print(fix, markup=False, soft_wrap=True)


def show_failure(result: "LaunchResult") -> None:
    """Prints the failure of the ranks once, and restores the cursor that a killed rank may have hidden."""
    if console.is_terminal:
        console.show_cursor(True)
    if result.failure is None:
        return
    if result.exit_code == 2:
        errors.print("[bold red]error[/] ", end="")
    errors.print(result.failure.text, markup=False, soft_wrap=True)


def _own_frames(error: BaseException) -> str:
    installed = (str(Path(__file__).parents[1]), sys.prefix, sys.base_prefix, "<")
    frames = traceback.extract_tb(error.__traceback__)
    own = next((i for i, frame in enumerate(frames) if not frame.filename.startswith(installed)), None)
    if own is None:
        return ""
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames[own:])])
