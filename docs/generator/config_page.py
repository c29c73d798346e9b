"""Makes the config reference from the schema: every table of a config file with keys, types and defaults."""

import dataclasses
import inspect
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docs.generator.essay import NOTE, cell, markdown
from meshwright.parallel import STRATEGIES
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.field_constraints import Constraint
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.mesh import Mesh

PAGE = "docs/reference/config.md"
INTRODUCTION = """A config is a TOML file. Each section below is one table of it. Every key has a default,
except where the table says *required*. Any key can also be set on the command line: `--optimizer.lr 1e-3`. An
unknown key is an error that names the nearest known one. `meshwright plan CONFIG --out plan.toml` writes the
same file with nothing left open."""
TOP = """## Top level

| key | type | default |
| --- | --- | --- |
| `micro_batch` | integer | `0` |

`micro_batch` is the number of samples of one microbatch on one data-parallel rank; 0 means the whole local
batch at once. The number of microbatches, which is the number of gradient accumulation steps, follows from
it."""
STRATEGY_INTRODUCTION = """## strategies

`[[strategies]]` is a list of tables; each names one technique and sets its options. Without any, the mesh
decides: `dp_replicate` means `ddp`, `dp_shard` means `zero` with stage 3, `tp` means `tensor_parallel` (and
`vocab_parallel` where the model allows it), `pp` means `pipeline`, and `cp` means `ring`. What each technique
does is described on [its page](../techniques/index.md)."""


def config_page() -> dict[str, str]:
    """Returns the page by its path."""
    lines = [
        "# Config reference",
        "",
        NOTE.format(origin="the schema (meshwright.plan.job, meshwright.parallel)"),
        "",
    ]
    lines += [INTRODUCTION, "", TOP, ""]
    tables = {
        **{field.name: get_type_hints(Job)[field.name] for field in dataclasses.fields(Job)},
        "mesh": Mesh,
        "run": RunConfig,
    }
    for name, table in tables.items():
        lines += _table(name, table, "##")
    lines += [STRATEGY_INTRODUCTION, ""]
    for strategy in (strategy for modes in STRATEGIES.values() for strategy in modes.values()):
        mode = f', mode = "{strategy.mode}"' if strategy.mode else ""
        lines += [f'### name = "{strategy.name}"{mode}', "", markdown(inspect.getdoc(strategy) or ""), ""]
        lines += [*_keys(strategy), ""]
    return {PAGE: "\n".join(lines).rstrip("\n") + "\n"}


def _table(name: str, table: type, level: str) -> Iterator[str]:
    """The section of one table, and those of the tables inside it."""
    yield from (f"{level} {name}", "", markdown(inspect.getdoc(table) or ""), "", *_keys(table), "")
    hints = get_type_hints(table)
    for field in dataclasses.fields(table):
        nested = _nested(hints[field.name])
        if nested is not None:
            yield from _table(f"{name}.{field.name}", nested, level + "#")


def _keys(table: type) -> Iterator[str]:
    hints = get_type_hints(table)
    shown = [field for field in dataclasses.fields(table) if field.init]
    if not shown:
        yield "No options."
        return
    yield from ("| key | type | default |", "| --- | --- | --- |")
    for field in shown:
        yield f"| `{field.name}` | {cell(_values(field, hints[field.name]))} | {_default(field)} |"


def _values(field: "dataclasses.Field[Any]", hint: Any) -> str:
    """The type of a key, and which of its values are allowed."""
    kind, constraint = _type(hint), field.metadata.get("constraint")
    if not isinstance(constraint, Constraint):
        return kind
    if constraint.choices:
        choices = ", ".join(f"`{_toml(each)}`" for each in constraint.choices)
        return f"list of {choices}" if get_origin(hint) is tuple else choices
    if get_origin(hint) is not tuple and constraint.needed.startswith("number"):
        return constraint.needed.replace("number", kind, 1)
    return f"{kind}: {constraint.needed}"


def _nested(hint: Any) -> type | None:
    """The dataclass that a key holds, or a list of which it holds."""
    for each in (hint, *get_args(hint)):
        if isinstance(each, type) and dataclasses.is_dataclass(each):
            return each
    return None


def _type(hint: Any) -> str:
    """A type in the words of TOML."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f'`"{word}"`' if isinstance(word, str) else f"`{word}`" for word in args)
    if origin in (Union, UnionType):
        return " or ".join(_type(each) for each in args if each is not NoneType)
    if origin is tuple:
        inner = [each for each in args if each is not Ellipsis]
        return (
            f"list of {_type(inner[0])}" if Ellipsis in args else f"list of {len(inner)} {_type(inner[0])}s"
        )
    if origin is dict:
        return f"table of {_type(args[1])}"
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return "table"
    return {str: "string", int: "integer", float: "number", bool: "boolean"}.get(hint, str(hint))


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{_toml(field.default)}`" if field.default is not None else "not set"
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        return "see below" if dataclasses.is_dataclass(made) else f"`{_toml(made)}`"
    return "*required*"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_toml, value))}]"
    return "{}" if value == {} else str(value)
