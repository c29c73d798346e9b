"""The words of `report`: what a run left behind, to look at."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.faults import console, said
from meshwright.cli.verb import behind


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run: its run.folder.")],
    other: Annotated[Path | None, typer.Argument(metavar="[RUN2]", help="Another run, to be shown beside it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the page here (default: report.html in the run's folder).")] = None,
) -> None:
    """Write one HTML file, for any browser and without a network: curves, a step on its lanes, time, memory, bytes, the plan."""
    with said(("--out",)):
        path, beside = behind("report").report(run, other, out)
        if beside is not None:
            console.print(beside)
        console.print(f"report written to {path}", markup=False, soft_wrap=True)


def add_to(app: typer.Typer) -> None:
    """Give `app` the command of this file."""
    app.command()(report)
