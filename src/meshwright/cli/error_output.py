"""What a user sees when something cannot work: the faults of a request, the failure of a rank."""

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
    """A request that cannot work ends with its faults and code 2; a traceback is shown only of the user's own file."""
    try:
        yield
    except PlanError as error:
        if error.__cause__ is not None and (trace := _own_frames(error.__cause__)):
            errors.print(trace.rstrip(), markup=False, soft_wrap=True)
        for fault in error.diagnostics:
            unknown = fault.problem.startswith("there is no key") and fault.location.startswith("--")
            words = f" (options of the command itself: {', '.join(own_options)})" if unknown else ""
            _show_fault(
                f"{fault.location}: {fault.problem}" if fault.location else fault.problem, fault.fix + words
            )
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def _show_fault(text: str, fix: str) -> None:
    errors.print("[bold red]error[/] ", end="")
    errors.print(text, markup=False, soft_wrap=True)
    errors.print("  [green]repair:[/] ", end="")
    errors.print(fix, markup=False, soft_wrap=True)


def show_failure(result: "LaunchResult") -> None:
    """What the ranks said of how they failed, once; the cursor that a killed rank may have hidden comes back."""
    if console.is_terminal:
        console.show_cursor(True)
    if result.failure is None:
        return
    if result.exit_code == 2:
        errors.print("[bold red]error[/] ", end="")
    errors.print(result.failure.text, markup=False, soft_wrap=True)


def _own_frames(error: BaseException) -> str:
    """The traceback of `error` from the first line in a file that is neither installed nor ours; "" when there is none."""
    installed = (str(Path(__file__).parents[1]), sys.prefix, sys.base_prefix, "<")
    frames = traceback.extract_tb(error.__traceback__)
    own = next((i for i, frame in enumerate(frames) if not frame.filename.startswith(installed)), None)
    if own is None:
        return ""
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames[own:])])
