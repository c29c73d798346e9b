"""Makes the reference of the command line from the commands themselves."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import typer
from typer.main import get_params_from_function
from typer.models import ArgumentInfo, OptionInfo

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
| 1 | a verdict is negative (`verify`, `export`, `doctor`), or a rank of `train` failed |
| 2 | the request is refused; the message says what to change |
| 3 | crashed: an unexpected error of the command, or of a rank that `verify` or `bench` started |
| 130 | interrupted (Ctrl-C) |
| 143 | stopped by SIGTERM or SIGUSR1, after a checkpoint |"""


@dataclass(frozen=True)
class Parameter:
    """An argument, or an option with its `flags`, and the type and default that the page shows."""

    name: str
    flags: tuple[str, ...]
    kind: str
    default: str
    help: str


@dataclass(frozen=True)
class Command:
    """A command by its full name (`bench network`), with what it takes."""

    name: str
    help: str
    arguments: tuple[Parameter, ...]
    options: tuple[Parameter, ...]


def commands(source: typer.Typer = app, prefix: str = "") -> list[Command]:
    """Returns the commands of an application, those of its groups behind them."""
    found = [_command(info, prefix) for info in source.registered_commands if not info.hidden]
    for group in source.registered_groups:
        if group.typer_instance is not None:
            found += commands(
                group.typer_instance, f"{prefix}{group.name or group.typer_instance.info.name} "
            )
    return found


def cli_page() -> dict[str, str]:
    """Returns the page by its path."""
    lines = ["# Command line", "", NOTE.format(origin="src/meshwright/cli"), "", INTRODUCTION, ""]
    for command in commands():
        lines += _section(command)
    return {PAGE: "\n".join(lines).rstrip("\n") + "\n"}


def _command(info: Any, prefix: str) -> Command:
    name = info.name or info.callback.__name__.replace("_", "-")
    parameters = get_params_from_function(info.callback).values()
    arguments = [_parameter(each) for each in parameters if isinstance(each.default, ArgumentInfo)]
    options = [_parameter(each) for each in parameters if isinstance(each.default, OptionInfo)]
    about = info.help or inspect.getdoc(info.callback) or ""
    return Command(f"{prefix}{name}", about, tuple(arguments), tuple(options))


def _parameter(given: Any) -> Parameter:
    info, annotation = given.default, given.annotation
    flags = tuple(each for each in info.param_decls or () if each.startswith("-"))
    default = "" if info.default in (None, "", False, 0, 0.0, ...) else f"`{info.default}`"
    flags = flags or (f"--{given.name.replace('_', '-')}",)
    return Parameter(given.name, flags, _type(annotation), default, info.help or "")


def _type(annotation: Any) -> str:
    if annotation is bool:
        return "flag"
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(annotation))
    inner = [each for each in get_args(annotation) if each is not NoneType]
    if inner:
        repeated = get_origin(annotation) is list or get_origin(inner[0]) is list
        return _type(inner[0]) + (", repeated" if repeated and get_origin(inner[0]) is not list else "")
    names = {"str": "text", "int": "integer", "float": "number", "Path": "path"}
    return names.get(annotation.__name__, annotation.__name__)


def _argument_text(argument: Parameter) -> str:
    return argument.name.upper() + ("..." if argument.kind.endswith("repeated") else "")


def _section(command: Command) -> Iterator[str]:
    words = " ".join(map(_argument_text, command.arguments))
    usage = f"meshwright {command.name} {words}".rstrip() + (" [OPTIONS]" if command.options else "")
    yield from (f"## {command.name}", "", "```text", usage, "```", "")
    if command.help:
        yield from (markdown(command.help), "")
    if command.arguments:
        yield from ("| argument | meaning |", "| --- | --- |")
        yield from (f"| `{_argument_text(each)}` | {cell(each.help)} |" for each in command.arguments)
        yield ""
    if command.options:
        yield from ("| option | type | default | meaning |", "| --- | --- | --- | --- |")
        yield from map(_row, command.options)
        yield ""


def _row(option: Parameter) -> str:
    flags = ", ".join(f"`{flag}`" for flag in option.flags)
    return f"| {flags} | {option.kind} | {option.default} | {cell(option.help)} |"
