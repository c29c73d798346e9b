"""The commands that help to write a config: init, config, import-config, and the list of known devices."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.error_output import console, exit_on_error
from meshwright.cli.lazy_import import import_command

OUT = Path("config.toml")


def init(
    model: Annotated[
        str, typer.Argument(help="A transformers config (folder, .json file, hub id), or file.py:factory.")
    ],
    data: Annotated[str, typer.Option(help="The training data: a file, a folder, or a dataset.")],
    out: Annotated[Path, typer.Option(help="Write the config here; an existing file is not replaced.")] = OUT,
    devices: Annotated[int, typer.Option(help="The number of ranks; each has other samples.", min=1)] = 1,
) -> None:
    """Write a commented config for a model and data that `plan` accepts, and show its plan."""
    with exit_on_error():
        ready = import_command("config_help.starter_config").write_starter_config(model, data, out, devices)
        console.print(import_command("plan").resolved_view(ready, None, actions=False))
        console.print(f"config written to {out}", soft_wrap=True)


def config(
    key: Annotated[
        str,
        typer.Argument(metavar="[KEY]", help="A table, a key, or a part of one: optimizer, train.batch, lr."),
    ] = "",
) -> None:
    """List the keys of a config with type, default and meaning: all, or those that KEY names."""
    with exit_on_error():
        console.print(import_command("config_help.key_reference").key_table(key))


def import_config(
    file: Annotated[
        Path,
        typer.Argument(
            help="A DeepSpeed JSON, Accelerate YAML, torchtitan TOML, or a script with Megatron-LM arguments."
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Write the config here; an existing file is not replaced.")
    ] = Path("config.toml"),
    model: Annotated[str, typer.Option(help="The model.source of the config.")] = "",
    data: Annotated[str, typer.Option(help="The data.source of the config.")] = "",
    devices: Annotated[
        int, typer.Option(help="The number of ranks, where the file does not say it.", min=0)
    ] = 0,
    format_name: Annotated[
        str,
        typer.Option(
            "--format", help="deepspeed, accelerate, megatron or torchtitan (default: by the file)."
        ),
    ] = "",
) -> None:
    """Make a config from one of DeepSpeed, Accelerate, Megatron-LM or torchtitan, and list what became of
    every option: mapped, dropped with the reason, or refused with the repair. The exit code is 1 if something
    is refused or unknown.
    """
    with exit_on_error():
        command = import_command("import_config.import_config")
        imported = command.import_config(file, format_name, model, data, devices)
        written = command.write_imported_config(imported, out)
        console.print(command.imported_view(imported))
        console.print(f"config written to {', '.join(map(str, written))}", soft_wrap=True)
        raise typer.Exit(0 if imported.is_complete else 1)


def print_hardware_list(value: str) -> str:
    """Prints the known devices and ends the command if `value` is "list"; returns it otherwise."""
    if value == "list":
        console.print(import_command("config_help.device_list").device_table())
        raise typer.Exit
    return value


def register_config(app: typer.Typer) -> None:
    """Adds the commands of this file to `app`."""
    app.command()(init)
    app.command()(config)
    app.command("import-config")(import_config)
