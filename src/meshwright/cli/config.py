"""The commands that help to write a config: config, and the list of known devices."""

from typing import Annotated

import typer

from meshwright.cli.error_output import console, exit_on_error
from meshwright.cli.lazy_import import import_command


def config(
    word: Annotated[
        str,
        typer.Argument(metavar="[KEY]", help="A table, a key, or a part of one: optimizer, train.batch, lr."),
    ] = "",
) -> None:
    """List the keys of a config with type, default and meaning: all, or those that KEY names."""
    with exit_on_error():
        console.print(import_command("config_help.key_reference").key_table(word))


def print_hardware_list(value: str) -> str:
    """Prints the known devices and ends the command if `value` is "list"; returns it otherwise."""
    if value == "list":
        console.print(import_command("config_help.device_list").device_table())
        raise typer.Exit
    return value


def register_config(app: typer.Typer) -> None:
    """Adds the commands of this file to `app`."""
    app.command()(config)
