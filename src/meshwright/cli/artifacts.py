"""The words of the verbs that weights go through: export, import, convert.

The words of `report`: what a run left behind, to look at.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.error_output import console, errors, exit_on_error
from meshwright.cli.lazy_import import import_command

KEPT_VARIABLES = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "TMPDIR",
)  # what a child needs to start; no token, no proxy, no home


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A run's folder (its newest good checkpoint), or the folder of one step.")
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write, new or empty.")],
    dtype: Annotated[
        str, typer.Option(help="Store weights as float32, bfloat16, float16 (default: as trained).")
    ] = "",
    max_shard_size: Annotated[str, typer.Option(help="No file is larger, unless one tensor is.")] = "5GB",
    merge: Annotated[
        bool, typer.Option("--merge", help="Of an adapted model: the whole model, not the adapter.")
    ] = False,
) -> None:
    """Write a checkpoint as a folder that transformers loads, and compare its logits with the checkpoint's."""
    with exit_on_error():
        found, written = import_command("weights").export_checkpoint(
            checkpoint, out, dtype, max_shard_size, merge=merge
        )
        trip = written.round_trip
        if not trip.passed:
            errors.print(f"[bold red]error[/] not exported: {trip}", soft_wrap=True)
            raise typer.Exit(1)
        console.print(f"exported    {found}", markup=False, soft_wrap=True)
        console.print(f"to          {out}: {', '.join(written.files)}", markup=False, soft_wrap=True)
        console.print(f"round trip  {trip}", markup=False, soft_wrap=True)


def import_(
    source: Annotated[
        str, typer.Argument(help="A folder with config.json and safetensors, or a hub id (ORG/NAME).")
    ],
    revision: Annotated[str, typer.Option(help="A branch, tag or commit of a hub id.")] = "",
) -> None:
    """Check that weights are loaded as transformers loads them, and show the table `model` that trains them."""
    with exit_on_error():
        model, trip, numel = import_command("weights").import_weights(source, revision)
        if not trip.passed:
            errors.print(f"[bold red]error[/] loaded otherwise than by transformers: {trip}", soft_wrap=True)
            raise typer.Exit(1)
        console.print(f"round trip  {trip}; {numel:,} parameters", markup=False, soft_wrap=True)
        lines = {
            "source": model.source,
            "weights": model.weights,
            **({"revision": model.revision} if model.revision else {}),
        }
        table = "\n".join(["[model]", *(f'{key} = "{value}"' for key, value in lines.items())])
        console.print(table, markup=False, soft_wrap=True)


def convert(
    file: Annotated[Path, typer.Argument(help="A .bin, .pt or .pth file that torch.save wrote.")],
    out: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    key: Annotated[str, typer.Option(help="The entry of the file that holds the tensors.")] = "",
) -> None:
    """Turn a pickle of tensors into safetensors, in a child process that can do nothing else."""
    with exit_on_error():
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        count = import_command("weights").convert(file, out, key, environment)
        console.print(f"{count} tensors written to {out}", markup=False, soft_wrap=True)


def register_weights(app: typer.Typer) -> None:
    """Give `app` the commands of this file."""
    app.command()(export)
    app.command("import")(import_)
    app.command()(convert)


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run: its run.folder.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="[RUN2]", help="Another run, to be shown beside it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the page here (default: report.html in the run's folder).")
    ] = None,
) -> None:
    """Write one HTML file, for any browser and without a network: curves, a step on its lanes, time, memory, bytes, the plan."""
    with exit_on_error(("--out",)):
        path, beside = import_command("report").report(run, other, out)
        if beside is not None:
            console.print(beside)
        console.print(f"report written to {path}", markup=False, soft_wrap=True)


def register_report(app: typer.Typer) -> None:
    """Give `app` the command of this file."""
    app.command()(report)
