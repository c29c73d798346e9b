"""Prints errors as a user sees them: the diagnostics of a PlanError, the failure of a rank."""

import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from meshwright.plan.job.errors import PlanError
from meshwright.run.launch.local_launcher import LaunchResult, RanksFailed

UNFORESEEN_ERROR_EXIT_CODE = 3  # 1 is a negative verdict or a failed rank
# paths and messages may have brackets, which are no markup
console = Console(highlight=False, markup=False)
errors = Console(stderr=True, highlight=False, markup=False)


@contextmanager
def exit_on_error(context: typer.Context | None = None) -> Iterator[None]:
    """Turns a PlanError in the body into printed diagnostics and exit code 2, and the failure of local ranks
    into theirs.

    A traceback is shown only if the error was raised by the user's own file. With `context`, an unknown key
    is answered with the options of the command.
    """
    try:
        yield
    except PlanError as error:
        if error.__cause__ is not None and (trace := _own_frames(error.__cause__)):
            errors.print(trace.rstrip(), soft_wrap=True)
        for diagnostic in error.diagnostics:
            unknown = diagnostic.problem.startswith("there is no key") and diagnostic.location.startswith(
                "--"
            )
            options = (
                f" (options of the command itself: {', '.join(option_names(context))})" if unknown else ""
            )
            print_error(
                f"{diagnostic.location}: {diagnostic.problem}" if diagnostic.location else diagnostic.problem,
                diagnostic.fix + options,
            )
        raise typer.Exit(2) from None
    except RanksFailed as error:
        show_failure(error.result)
        raise typer.Exit(error.result.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def option_names(context: typer.Context | None) -> list[str]:
    """Returns the options of the command of `context`, as they are written."""
    params = [] if context is None else context.command.params
    return [name for param in params for name in param.opts if name.startswith("--")]


def print_error(text: str, fix: str = "") -> None:
    """Prints an error, and below it the repair if there is one."""
    errors.print("error ", style="bold red", end="")
    errors.print(text, soft_wrap=True)
    if fix:
        errors.print("  repair: ", style="green", end="")
        errors.print(fix, soft_wrap=True)


def show_failure(result: LaunchResult) -> None:
    """Prints the failure of the ranks once, and restores the cursor that a killed rank may have hidden."""
    if console.is_terminal:
        console.show_cursor(True)
    if result.failure is None:
        return
    if result.exit_code == 2:
        print_error(result.failure.text)
    else:
        errors.print(result.failure.text, soft_wrap=True)


def show_unforeseen_error() -> None:
    """Prints the traceback of the exception that is handled, and says that it is no verdict."""
    errors.print(traceback.format_exc().rstrip(), soft_wrap=True)
    print_error(
        "the command ended with an exception that it does not foresee: nothing was decided",
        "if the last lines are of your own code, correct it; else report the config and these lines",
    )


def _own_frames(error: BaseException) -> str:
    installed = (str(Path(__file__).parents[1]), sys.prefix, sys.base_prefix, "<")
    frames = traceback.extract_tb(error.__traceback__)
    own = next((i for i, frame in enumerate(frames) if not frame.filename.startswith(installed)), None)
    if own is None:
        return ""
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames[own:])])
