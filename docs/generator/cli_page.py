"""Makes the reference of the command line from the commands themselves."""

import inspect
from collections.abc import Iterator

import click
import typer.main

from docs.generator.essay import NOTE, cell, markdown
from meshwright.cli import app

PAGE = "docs/reference/cli.md"
INTRODUCTION = """Every command that takes a config also takes its keys as options:
`meshwright train config.toml --train.steps 100 --optimizer.lr 1e-3`. See the
[config reference](config.md). The same command works under `torchrun`, SLURM and MPI, where it is one rank
([launching](../howto/launch.md)).

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | a rank failed, or a verdict is negative |
| 2 | the request cannot work; the message says what to change |
| 130 | interrupted (Ctrl-C) |
| 143 | stopped by SIGTERM or SIGUSR1, after a checkpoint |"""


def cli_page() -> dict[str, str]:
    """Returns the page by its path."""
    root = typer.main.get_command(app)
    lines = ["# Command line", "", NOTE.format(origin="src/meshwright/cli"), "", INTRODUCTION, ""]
    for name, command in _commands(root, ""):
        lines += _section(name, command)
    return {PAGE: "\n".join(lines).rstrip("\n") + "\n"}


def _commands(command: click.Command, prefix: str) -> Iterator[tuple[str, click.Command]]:
    """The commands below `command` with their full names; those of a group behind the group."""
    children = vars(command).get("commands", {})
    for name, child in children.items():
        yield f"{prefix}{name}", child
        yield from _commands(child, f"{prefix}{name} ")


def _section(name: str, command: click.Command) -> Iterator[str]:
    parameters = [each for each in command.params if not vars(each).get("hidden")]
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    options = [each for each in parameters if each.param_type_name == "option" and each.name != "help"]
    words = " ".join(each.human_readable_name.upper() for each in arguments)
    usage = f"meshwright {name} {words}".rstrip() + (" [OPTIONS]" if options else "")
    yield from (f"## {name}", "", "```text", usage, "```", "")
    if command.help:
        yield from (markdown(inspect.cleandoc(command.help)), "")
    if arguments:
        yield from ("| argument | meaning |", "| --- | --- |")
        yield from (f"| `{each.human_readable_name.upper()}` | {cell(_help(each))} |" for each in arguments)
        yield ""
    if options:
        yield from ("| option | type | default | meaning |", "| --- | --- | --- | --- |")
        yield from map(_option, options)
        yield ""


def _option(option: click.Parameter) -> str:
    flags = ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
    default = (
        ""
        if option.default in (None, "", False, 0, 0.0) or callable(option.default)
        else f"`{option.default}`"
    )
    return f"| {flags} | {_type(option)} | {default} | {cell(_help(option))} |"


def _type(option: click.Parameter) -> str:
    if vars(option).get("is_flag"):
        return "flag"
    choices = vars(option.type).get("choices")
    return ", ".join(f"`{choice}`" for choice in choices) if choices else option.type.name


def _help(parameter: click.Parameter) -> str:
    return vars(parameter).get("help") or ""
