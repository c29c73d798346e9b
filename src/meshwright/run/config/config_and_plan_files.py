"""Reads config files and plan files (TOML). Both have one schema: a plan is a config with nothing left to
resolve.

    micro_batch = 2                      samples per microbatch and rank; 0: the whole local batch at once
    align_bytes = 128                    parameters and shards begin at multiples of it in buffers; 0: by the
                                         device; 1, as in a plan file without it: no padding
    cluster = "cluster.toml"             measured by `bench network`; algorithm = "auto" chooses by it, once,
                                         for the plan

    [model] [data] [train] [optimizer] [lr_schedule] [precision] [evaluate] [guard]     together the Job
    [run]                                folder, logging, checkpoints, limits
    [mesh]                               axis = size; -1: so that the product is the number of ranks
    dp_replicate = -1

    [[strategies]]                       one table per strategy: its name and its fields
    name = "ddp"                         (strategy_tables.py)

A file without `strategies` uses the default strategies of its mesh; `strategies = []` uses none. A plan file
adds its format and version, `plan_hash`, and the `meshwright` that wrote it. All diagnostics of a file and of
the overrides are reported at once, with dotted key and location.

Paths in cluster, run.hardware, run.cluster, model.source, model.weights, data.source, data.tokenizer,
evaluate.source, and paths of .csv and .py files in a strategy, are relative to the folder of the file (in
overrides: to the current folder) if they exist there. They become absolute on reading, so a plan file can be
moved to another folder.

The command line overrides keys:

    --train.batch 16          a value, parsed as TOML (16, true, [1, 2], "text"); anything else is a string
    --train.batch=16          the same; needed when the value itself begins with --
    --strategies.zero.stage 2 a table of a list of tables, by its name ...
    --optimizer.groups.0.pattern *.bias     ... or by its index
    --strategies.zero.field   without a value: true

An override changes the document before anything is checked, so the command line obeys the same rules as the
file.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import date, time
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.errors import (
    Diagnostic,
    PlanError,
    collect_diagnostics,
    raise_diagnostics,
    refuse_special_files,
    suggest_name,
)
from meshwright.plan.job.field_constraints import field_diagnostics
from meshwright.plan.job.file_format import PLAN
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.mesh import AXES, Mesh, unknown_axis_diagnostic
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.config.source_paths import (
    resolve_source,
    search_folders,
    with_absolute_files,
    with_absolute_sources,
)
from meshwright.run.config.strategy_tables import StrategyTable, read_strategies
from meshwright.run.config.toml_validation import SchemaCheck


def apply_overrides(
    document: dict[str, Any], args: Sequence[str], diagnostics: list[Diagnostic]
) -> tuple[dict[str, Any], frozenset[tuple[str, ...]]]:
    """Returns a copy of `document` with the overrides in `args`, and the key paths that they set; appends to
    `diagnostics`.
    """
    document = deepcopy(document)
    paths = set()
    for key, text in _pairs(args, diagnostics):
        paths.add(_set_value(document, key.split("."), _value(text), diagnostics))
    return document, frozenset(paths - {()})


def _pairs(words: Sequence[str], diagnostics: list[Diagnostic]) -> Iterator[tuple[str, str]]:
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or not all(word[2:].partition("=")[0].split(".")):
            diagnostics.append(
                Diagnostic(
                    "this is not an override",
                    "write --key.sub value, for example --train.batch 16",
                    f"'{word}'",
                )
            )
            continue
        key, equals, text = word[2:].partition("=")
        if not equals:
            text = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        # Python marks bytes that are not UTF-8 by these letters.
        if any("\ud800" <= letter <= "\udfff" for letter in key + text):
            diagnostics.append(
                Diagnostic(
                    f"{key + '=' + text!a} is not valid UTF-8",
                    "write it in UTF-8, as the file is",
                    "override",
                )
            )
            continue
        yield key, text


def _value(text: str) -> Any:
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # No key takes a date, and a string with line breaks may hold further keys: both are strings.
    if set(read) != {"value"} or isinstance(read["value"], (date, time)):
        return text
    return read["value"]


def _set_value(
    document: dict[str, Any], path: Sequence[str], value: Any, diagnostics: list[Diagnostic]
) -> tuple[str, ...]:
    """Sets `path` in `document`; returns it with names in place of positions, or () when
    it could not be set.
    """
    node: Any = document
    overridden: list[str] = []
    for depth, part in enumerate(path):
        where = f"--{'.'.join(path)}"
        if not isinstance(node, (dict, list)):
            text = f"{'.'.join(path[:depth])} is {node!r}, which has no keys"
            diagnostics.append(
                Diagnostic(text, f"set it as a whole: --{'.'.join(path[:depth])} VALUE", where)
            )
            return ()
        key: Any = _place(node, part, where, diagnostics) if isinstance(node, list) else part
        if key is None:
            return ()
        last, is_item = depth == len(path) - 1, isinstance(node, list)
        if last:
            node[key] = value
        elif isinstance(node, dict) and key not in node:
            node[key] = {}
        node = node[key]
        overridden.append(_name(node, part) if is_item and not last else part)
    return tuple(overridden)


def _place(items: list[Any], part: str, where: str, diagnostics: list[Diagnostic]) -> int | None:
    """The position in `items` that `part` names: by the item's name, or by a number."""
    named = [i for i, item in enumerate(items) if _name(item, "") == part]
    if len(named) == 1:
        return named[0]
    if part.isdecimal() and int(part) < len(items):
        return int(part)
    if named:
        text = f"{len(named)} tables of this list are named '{part}'"
        diagnostics.append(
            Diagnostic(
                text, f"address one by its place: {' or '.join(map(str, named))} instead of '{part}'", where
            )
        )
    else:
        diagnostics.append(Diagnostic(f"this list has no '{part}'", _repair(part, items), where))
    return None


def _repair(part: str, items: Iterable[Any]) -> str:
    names = [_name(item, str(i)) for i, item in enumerate(items)]
    add = f'add a table with name = "{part}" to the file'
    return f"{suggest_name(part, names)} or {add}" if names else add


def _name(item: Any, otherwise: str) -> str:
    return item["name"] if isinstance(item, dict) and isinstance(item.get("name"), str) else otherwise


EXTRA_KEYS = ("plan_hash", "meshwright")  # written by a plan file


@dataclass(frozen=True)
class PlanRequest:
    """The contents of a config or plan file. `mesh` has the sizes as written; `strategies` is None when the
    file lists none.

    `cluster` is the path of a cluster.toml for algorithm = "auto", or "". `strategy_diagnostics` are wrong
    values of strategies, in whose place their defaults stand: they are reported with all other diagnostics.
    """

    job: Job = field(default_factory=Job)
    run: RunConfig = field(default_factory=RunConfig)
    mesh: dict[str, int] = field(default_factory=dict)
    micro_batch: int = 0
    align_bytes: int = 0
    strategies: tuple[Strategy, ...] | None = None
    extra: dict[str, str] = field(default_factory=dict)
    cluster: str = ""
    strategy_diagnostics: tuple[Diagnostic, ...] = ()

    @cached_property
    def job_diagnostics(self) -> list[Diagnostic]:
        """What is wrong with `job` and `run`; they may name no data."""
        return self.job.diagnostics(self.run, needs_data=False)


def read_request(path: Path, overrides: Sequence[str], strategies: StrategyTable) -> PlanRequest:
    """Returns the request in the TOML file at `path`, changed by `overrides`; `strategies` are the known
    ones by name.

    The links by which algorithms are chosen are also those by which steps are predicted, unless others are
    named. Checks the types of values only. Raises PlanError with all diagnostics.
    """
    diagnostics: list[Diagnostic] = []
    document, overridden = apply_overrides(_parse(path), overrides, diagnostics)
    tables: dict[str, Any] = {**get_type_hints(Job), "run": RunConfig}
    hints = {
        **tables,
        "mesh": dict[str, int],
        "micro_batch": int,
        "align_bytes": int,
        "cluster": str,
        **dict.fromkeys(EXTRA_KEYS, str),
    }
    check = SchemaCheck(str(path), overridden, tables, diagnostics)
    chosen, wrong = read_strategies(document.pop("strategies", None), strategies, check, path.parent)
    for key in (key for key in document if key not in hints):
        check.add_unknown_key(key, (*hints, "strategies"), (key,))
    values = {
        key: check.convert(document[key], hint, (key,)) for key, hint in hints.items() if key in document
    }
    for axis in (axis for axis in values.get("mesh") or () if axis not in AXES):
        diagnostics.append(unknown_axis_diagnostic(axis, check.describe_path(("mesh", axis))))
    raise_diagnostics([*diagnostics, *_field_diagnostics(values), *wrong] if diagnostics else ())
    job = Job(**{item.name: values[item.name] for item in fields(Job) if item.name in values})
    places = search_folders(path.parent, is_override=("cluster",) in overridden)
    cluster = resolve_source(values.get("cluster", ""), places)
    run = with_absolute_files(values.get("run", RunConfig()), path.parent, overridden)
    return PlanRequest(
        job=with_absolute_sources(job, path.parent, overridden),
        run=run if run.cluster or not run.hardware else replace(run, cluster=cluster),
        mesh=values.get("mesh", {}),
        micro_batch=values.get("micro_batch", 0),
        align_bytes=values.get("align_bytes", int("plan_hash" in document)),
        strategies=chosen,
        cluster=cluster,
        # another plan has another hash
        extra={key: values[key] for key in EXTRA_KEYS[1 if overrides else 0 :] if key in values},
        strategy_diagnostics=tuple(wrong),
    )


def _field_diagnostics(values: Mapping[str, Any]) -> list[Diagnostic]:
    diagnostics: list[Diagnostic] = []
    sizes = {axis: size for axis, size in (values.get("mesh") or {}).items() if axis in AXES and size != -1}
    collect_diagnostics(diagnostics, Mesh.infer, sizes)
    for key, table in values.items():
        diagnostics += field_diagnostics(table, key) if is_dataclass(table) else ()
    return diagnostics


def _parse(path: Path) -> dict[str, Any]:
    where = str(path)
    if path.is_dir():
        names = ", ".join(sorted(found.name for found in path.glob("*.toml"))) or "there is none"
        raise PlanError(
            "this is a folder; needed is a TOML file", fix=f"name a file in it: {names}", location=where
        )
    refuse_special_files([path], "name a TOML file; write what a pipe delivers into a file first")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        names = [found.name for found in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        fix = (
            suggest_name(path.name, names)
            if names
            else "check the path; the file is looked for from the current folder"
        )
        raise PlanError("there is no such file", fix=fix, location=where) from error
    except OSError as error:
        raise PlanError(
            f"the file cannot be read: {error.strerror}", fix="check its permissions", location=where
        ) from error
    except UnicodeDecodeError as error:
        fix = f"save it as UTF-8; the byte at position {error.start} is not"
        raise PlanError("the file is not valid UTF-8", fix=fix, location=where) from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(path, text, error) from error
    if not document:
        fix = "name at least a model and data: [model] source = ..., [data] source = ..."
        raise PlanError("the file is empty: it sets no key", fix=fix, location=where)
    is_plan = not document.keys().isdisjoint((*PLAN.header, *EXTRA_KEYS))
    return PLAN.contents(document, where) if is_plan else document


def _syntax_error(path: Path, text: str, error: tomllib.TOMLDecodeError) -> PlanError:
    lines = text.splitlines() or [""]
    place = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
    line = int(place[1]) if place else len(lines)
    reason = str(error).split(" (at ")[0]
    fix = 'write key = value; strings in quotes ("text"), lists in brackets ([1, 2])'
    return PlanError(
        f"not TOML: {reason}, in the line '{lines[min(line, len(lines)) - 1].strip()}'",
        fix=fix,
        location=f"{path}:{line}",
    )
