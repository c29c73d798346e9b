"""Lists the keys of a config with their types, defaults and meanings: for `meshwright config` and its page
in the docs.

The schema is the only source: types, defaults and constraints are those of the dataclasses, and the meaning
of a key is the sentence of the dataclass's docstring that names it in backticks.
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from meshwright.parallel import STRATEGIES
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.errors import PlanError, suggest_name
from meshwright.plan.job.field_constraints import Constraint
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.mesh import Mesh
from meshwright.report.table import Table

TOP_LEVEL_TEXT = """`micro_batch` is the number of samples of one microbatch on one data-parallel rank; 0
means the whole local batch at once. The number of microbatches, which is the number of gradient accumulation
steps, follows from it.

`align_bytes` is the number of bytes at whose multiples each parameter and each shard begins in a flat
parameter or bucket, a power of two; 0 means 128 if the plan is for accelerators (`run.hardware`, or those of
this host), and no padding (1) on CPUs.

`cluster` is a file of `bench network`, by which algorithm = "auto" chooses."""
SENTENCE_END = re.compile(r"(?<=[.:;])\s+(?=[A-Z`])")


@dataclass(frozen=True)
class ConfigKey:
    """A key of a config: its dotted name, its type and default in the words of TOML, and its meaning."""

    name: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class ConfigTable:
    """A table of a config, with its docstring; `path` is dotted, and "" at the top level."""

    path: str
    text: str
    keys: tuple[ConfigKey, ...]


def key_meaning(text: str, name: str) -> str:
    """Returns the sentence of the docstring `text` that begins with the key in backticks, or else contains
    it, or else the first one.
    """
    sentences = [
        sentence
        for paragraph in text.split("\n\n")
        for sentence in SENTENCE_END.split(" ".join(paragraph.split()))
    ]
    beginning = (sentence for sentence in sentences if sentence.startswith(f"`{name}`"))
    containing = (sentence for sentence in sentences if f"`{name}`" in sentence)
    return next(chain(beginning, containing), sentences[0])


TOP_LEVEL = ConfigTable(
    "",
    TOP_LEVEL_TEXT,
    (
        ConfigKey("micro_batch", "integer", "0", key_meaning(TOP_LEVEL_TEXT, "micro_batch")),
        ConfigKey("align_bytes", "integer", "0", key_meaning(TOP_LEVEL_TEXT, "align_bytes")),
        ConfigKey("cluster", "string", '""', key_meaning(TOP_LEVEL_TEXT, "cluster")),
    ),
)


def config_tables() -> Iterator[ConfigTable]:
    """Yields the tables of a config in the order of the page, nested ones behind their table, strategies
    last.
    """
    hints = get_type_hints(Job)
    tables = {field.name: hints[field.name] for field in dataclasses.fields(Job)}
    for name, schema in {**tables, "mesh": Mesh, "run": RunConfig}.items():
        yield from _tables(name, schema)
    yield from strategy_tables()


def strategy_tables() -> Iterator[ConfigTable]:
    """Yields the table of each strategy; of one with modes, a table per mode."""
    for name, modes in STRATEGIES.items():
        for mode, strategy in modes.items():
            yield _table(f"strategies.{name}" + (f" (mode {mode})" if mode else ""), strategy)


def key_table(word: str = "") -> Table:
    """Returns the keys whose name begins with, or contains, `word` as a table for the terminal.

    Raises PlanError when there are none.
    """
    keys = [key for table in (TOP_LEVEL, *config_tables()) for key in table.keys]
    beginning = [key for key in keys if f"{key.name}.".startswith(f"{word}.") or not word]
    found = beginning or [key for key in keys if word in key.name]
    if not found:
        tables = {key.name.partition(".")[0] for key in keys}
        close = get_close_matches(word, [key.name.rpartition(".")[2] for key in keys], n=1)
        fix = f"did you mean '{close[0]}'?" if close else suggest_name(word, tables)
        raise PlanError(f"no key contains '{word}'", fix=fix, location="config")
    rows = [(key.name, f"{key.type}; {key.default}", key.meaning.replace("`", "")) for key in found]
    return Table(["key", "type; default", "meaning"], rows)


def _tables(path: str, schema: type) -> Iterator[ConfigTable]:
    """The table of `schema`, and those of the tables inside it."""
    yield _table(path, schema)
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        nested = _nested(hints[field.name])
        if nested is not None:
            yield from _tables(f"{path}.{field.name}", nested)


def _docstrings(schema: type) -> str:
    """Returns the docstring of `schema`, and those of base classes that name a key which it leaves out."""
    text, names = inspect.getdoc(schema) or "", [field.name for field in dataclasses.fields(schema)]
    for inherited in (inspect.getdoc(each) or "" for each in schema.__mro__[1:]):
        if any(f"`{name}`" in inherited and f"`{name}`" not in text for name in names):
            text += f"\n\n{inherited}"
    return text


def _table(path: str, schema: type) -> ConfigTable:
    text, hints = _docstrings(schema), get_type_hints(schema)
    prefix = path.partition(" ")[0]
    keys = (
        ConfigKey(
            f"{prefix}.{field.name}",
            _values(field, hints[field.name]),
            _default(field),
            key_meaning(text, field.name),
        )
        for field in dataclasses.fields(schema)
        if field.init
    )
    return ConfigTable(path, text, tuple(keys))


def _values(field: "dataclasses.Field[Any]", hint: Any) -> str:
    """The type of a key, and which of its values are allowed."""
    kind, constraint = _type(hint), field.metadata.get("constraint")
    if not isinstance(constraint, Constraint):
        return kind
    if constraint.choices:
        choices = ", ".join(toml_text(each) for each in constraint.choices)
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
        return ", ".join(map(toml_text, args))
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
        return toml_text(field.default) if field.default is not None else "not set"
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        return "see below" if dataclasses.is_dataclass(made) else toml_text(made)
    return "required"


def toml_text(value: Any) -> str:
    """Returns `value` as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # a basic string of TOML has the escapes of JSON
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml_text(item)}" for key, item in value.items()) + "}"
    return str(value)
