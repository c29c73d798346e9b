"""Constrains the fields of configs: the allowed values stand beside the type and the default.

    lr: float = field(default=3e-4, metadata=above(0))

`field_diagnostics` checks every field of a config and of the tables in it. The config reference states the
same constraints. Without metadata, a field of a `Literal` type takes its words. None is allowed wherever the
type allows it. What involves several fields is checked by `Job.diagnostics`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from itertools import repeat
from math import inf
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from meshwright.plan.job.errors import Diagnostic, suggest_choice

Config = TypeVar("Config")
Metadata = Mapping[str, "Constraint"]
NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Constraint:
    """The values that a field, or each item of a list, takes: `needed` describes them, `allows` decides.

    `choices` are the values, if they can be listed. `fix` is the repair; "" names a choice, or the default.
    """

    needed: str
    allows: Callable[[Any], bool]
    fix: str = ""
    choices: tuple[Any, ...] = ()


def above(bound: float, fix: str = "", *, or_zero: bool = False) -> Metadata:
    """Returns the metadata of a finite number above `bound`, or also 0."""
    needed = f"number above {bound}, or 0" if or_zero else f"number above {bound}"
    return {
        "constraint": Constraint(needed, lambda value: bound < value < inf or (or_zero and value == 0), fix)
    }


def at_least(bound: float, fix: str = "") -> Metadata:
    """Returns the metadata of a finite number of at least `bound`."""
    return {"constraint": Constraint(f"number of at least {bound}", lambda value: bound <= value < inf, fix)}


def in_range(low: float, high: float, fix: str = "") -> Metadata:
    """Returns the metadata of a number from `low` to `high`, both included."""
    return {"constraint": Constraint(f"number from {low} to {high}", lambda value: low <= value <= high, fix)}


def below_one() -> Metadata:
    """Returns the metadata of a number from 0 to 1, without 1."""
    return {"constraint": Constraint("number from 0 up to, not including, 1", lambda value: 0 <= value < 1)}


def one_of(*choices: Any, fix: str = "") -> Metadata:
    """Returns the metadata of one of `choices`."""
    *others, last = map(repr, choices)
    needed = f"{', '.join(others)} or {last}" if others else last
    return {"constraint": Constraint(needed, lambda value: value in choices, fix, choices)}


def not_empty(fix: str = "") -> Metadata:
    """Returns the metadata of a string with at least one letter."""
    return {"constraint": Constraint("a string that is not empty", lambda value: value.strip() != "", fix)}


def constraint_of(item: "Field[Any]") -> Constraint | None:
    """Returns the constraint of a field; None if its type says all."""
    if get_origin(item.type) is Literal:
        return one_of(*get_args(item.type))["constraint"]
    return item.metadata.get("constraint")


def field_diagnostics(config: Any, location: str) -> Iterator[Diagnostic]:
    """Yields what is wrong with the fields of `config`, the table at `location`, and of the tables in it."""
    for item in fields(config):
        value, where = getattr(config, item.name), f"{location}.{item.name}"
        diagnostic = _diagnostic(item, value, where)
        if diagnostic is not None:
            yield diagnostic
        tables = [(f"{where}.{i}", each) for i, each in enumerate(value)] if isinstance(value, tuple) else []
        for place, table in tables or [(where, value)]:
            yield from field_diagnostics(table, place) if is_dataclass(table) else ()


def has_right_types(config: Any) -> bool:
    """Returns whether every value in `config`, and in the tables in it, is of the type of its field."""
    return all(_is_instance(getattr(config, item.name), item.type) for item in fields(config))


def _is_instance(value: Any, hint: Any) -> bool:
    kind, args = get_origin(hint) or hint, get_args(hint)
    if kind is Literal:
        return isinstance(value, str)
    if kind in (UnionType, Union):
        return any(_is_instance(value, each) for each in args)
    if kind is tuple:
        hints = repeat(args[0]) if args[-1] is Ellipsis else args
        return isinstance(value, tuple) and all(map(_is_instance, value, hints))
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind) and (not is_dataclass(kind) or has_right_types(value))


def with_valid_fields(config: Config) -> Config:
    """Returns `config` with the default, where there is one, in place of every wrong value, so that the rest
    can be checked.
    """
    items: tuple[Field[Any], ...] = fields(config)  # type: ignore[arg-type]  # a dataclass
    wrong = {
        item.name: item.default
        for item in items
        if item.default is not MISSING and _diagnostic(item, getattr(config, item.name), "")
    }
    return replace(config, **wrong) if wrong else config  # type: ignore[type-var]  # a dataclass


def without_wrong_values(
    config: type, values: Mapping[str, Any], location: str
) -> tuple[dict[str, Any], list[Diagnostic]]:
    """Returns `values` for the fields of `config` without those that a constraint refuses, and the
    diagnostics of these.

    Values of a wrong type stay: whoever converts them reports them.
    """
    wrong: dict[str, Diagnostic] = {}
    for item in (item for item in fields(config) if item.name in values and "constraint" in item.metadata):
        value = values[item.name]
        value = tuple(value) if isinstance(value, list) else value
        diagnostic = _diagnostic(item, value, f"{location}.{item.name}")
        if diagnostic is not None and _type_diagnostic(item, value, location) is None:
            wrong[item.name] = diagnostic
    return {name: value for name, value in values.items() if name not in wrong}, list(wrong.values())


def _diagnostic(item: "Field[Any]", value: Any, location: str) -> Diagnostic | None:
    if value is None:
        return None
    wrong_type, constraint = _type_diagnostic(item, value, location), constraint_of(item)
    if wrong_type is not None or constraint is None:
        return wrong_type
    for each in value if isinstance(value, tuple) else (value,):
        if not _is_allowed(item, constraint, each):
            given = f"{item.name} = {each!r}" if each is value else f"{item.name} contains {each!r}"
            number = "a whole number" if item.type is int else "a number"
            needed = constraint.needed.replace("number", number, 1)
            fix = constraint.fix or _fix(item, constraint, each, needed)
            return Diagnostic(f"{given}; needed is {needed}", fix, location)
    return None


def _is_allowed(item: "Field[Any]", constraint: Constraint, value: Any) -> bool:
    try:
        is_typed = not (item.type is int and (not isinstance(value, int) or isinstance(value, bool)))
        return is_typed and constraint.allows(value)
    except TypeError:  # a value of another type in a tuple, which has no order
        return False


def _type_diagnostic(item: "Field[Any]", value: Any, location: str) -> Diagnostic | None:
    """The diagnostic of a value that is not the string, number, bool or tuple that its field is, or None."""
    given = f"{item.name} = {value!r}"
    if get_origin(item.type) is tuple and not isinstance(value, tuple):
        example = tuple(value) if isinstance(value, (list, set)) else (value,)
        return Diagnostic(f"{given}; needed is a tuple", f"write {item.name} = {example!r}", location)
    plain = next((each for each in get_args(item.type) if get_origin(item.type) is UnionType), item.type)
    kinds: dict[Any, tuple[tuple[type, ...], str]] = {
        str: ((str,), "a string"),
        float: ((int, float), "a number"),
        bool: ((bool,), "True or False"),
    }
    if constraint_of(item) is None:
        kinds[int] = ((int,), "a whole number")
    accepted, needed = kinds.get(plain, ((object,), ""))
    is_number = plain in kinds and plain in (int, float)
    if isinstance(value, accepted) and not (is_number and isinstance(value, bool)):
        return None
    has_default = item.default is not MISSING
    fix = f"write {item.name} = {item.default!r}, the default" if has_default else f"write {needed}"
    if plain is float and isinstance(value, str) and NUMBER.fullmatch(value):
        fix = f"write {item.name} = {value}, without quotes"
    return Diagnostic(f"{given}; needed is {needed}", fix, location)


def _fix(item: "Field[Any]", constraint: Constraint, wrong: Any, needed: str) -> str:
    if len(constraint.choices) > 1:
        return suggest_choice(str(wrong), (str(choice) for choice in constraint.choices if choice != ""))
    example = constraint.choices[0] if constraint.choices else item.default
    if example is MISSING or example is None:
        return f"write {needed}"
    return f"write {item.name} = " + json.dumps(example) + ("" if constraint.choices else ", the default")
