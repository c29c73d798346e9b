"""The commands that work on what a run wrote: report, export, import, convert."""

import os
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.error_output import console, exit_on_error, print_error
from meshwright.cli.lazy_import import import_command

KEPT_VARIABLES = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "TMPDIR",
)  # the child needs these to start; it gets no token, no proxy and no home


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A run's folder (its newest valid checkpoint), or the folder of one step.")
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write, new or empty.")],
    dtype: Annotated[
        str, typer.Option(help="Store weights as float32, bfloat16, float16 (default: as trained).")
    ] = "",
    max_shard_size: Annotated[
        str, typer.Option(help="The largest size of a file; a single tensor may exceed it.")
    ] = "5GB",
    merge: Annotated[
        bool, typer.Option("--merge", help="Export an adapted model with the adapter merged into it.")
    ] = False,
) -> None:
    """Write a checkpoint as a folder that transformers loads, and compare the logits of both."""
    with exit_on_error():
        found, result = import_command("export_import_convert").export_checkpoint(
            checkpoint, out, dtype, max_shard_size, merge=merge
        )
        round_trip = result.round_trip
        if not round_trip.passed:
            print_error(f"not exported: {round_trip}")
            raise typer.Exit(1)
        console.print(f"exported    {found}", soft_wrap=True)
        console.print(f"to          {out}: {', '.join(result.files)}", soft_wrap=True)
        console.print(f"round trip  {round_trip}", soft_wrap=True)


def import_(
    source: Annotated[
        str, typer.Argument(help="A folder with config.json and safetensors, or a hub id (ORG/NAME).")
    ],
    revision: Annotated[str, typer.Option(help="A branch, tag or commit of a hub id.")] = "",
) -> None:
    """Compare loaded weights with those of transformers, and print the `model` table that trains them."""
    with exit_on_error():
        model, round_trip, numel = import_command("export_import_convert").import_weights(source, revision)
        if not round_trip.passed:
            print_error(f"the values differ from those that transformers loads: {round_trip}")
            raise typer.Exit(1)
        console.print(f"round trip  {round_trip}; {numel:,} parameters", soft_wrap=True)
        lines = {
            "source": model.source,
            "weights": model.weights,
            **({"revision": model.revision} if model.revision else {}),
        }
        table = "\n".join(["[model]", *(f'{key} = "{value}"' for key, value in lines.items())])
        console.print(table, soft_wrap=True)


def convert(
    file: Annotated[Path, typer.Argument(help="A .bin, .pt or .pth file that torch.save wrote.")],
    out: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    key: Annotated[str, typer.Option(help="The entry of the file that holds the tensors.")] = "",
) -> None:
    """Convert a pickle of tensors to safetensors, in a restricted child process."""
    with exit_on_error():
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        count = import_command("export_import_convert").convert(file, out, key, environment)
        console.print(f"{count} tensors written to {out}", soft_wrap=True)


def register_weights(app: typer.Typer) -> None:
    """Adds the commands `export`, `import` and `convert` to `app`."""
    app.command()(export)
    app.command("import")(import_)
    app.command()(convert)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS...", help="The folder of a run (its run.folder); several are compared."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Write the page here (default: report.html in the folder of the first run)."),
    ] = None,
) -> None:
    """Write one self-contained HTML file: loss curves, the timeline of a step, memory, bytes, the plan."""
    with exit_on_error():
        path, comparison = import_command("report").write_report(runs, out)
        if comparison is not None:
            console.print(comparison)
        console.print(f"report written to {path}", soft_wrap=True)


def register_report(app: typer.Typer) -> None:
    """Adds the command `report` to `app`."""
    app.command()(report)
