"""Constrains the fields of configs: the allowed values stand beside the type and the default.

    lr: float = field(default=3e-4, metadata=above(0))

`field_diagnostics` checks every field of a config and of the tables in it. The config reference states the
same constraints. Without metadata, a field of a `Literal` type takes its words. None is allowed wherever the
type allows it. What involves several fields is checked by the `diagnostics` method of the config.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from math import inf
from typing import Any, Literal, TypeVar, get_args, get_origin

from meshwright.plan.job.errors import Diagnostic, suggest_choice

Config = TypeVar("Config")
Metadata = Mapping[str, "Constraint"]


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


def _diagnostic(item: "Field[Any]", value: Any, location: str) -> Diagnostic | None:
    constraint = constraint_of(item)
    if constraint is None or value is None:
        return None
    for each in value if isinstance(value, tuple) else (value,):
        if (item.type is int and not isinstance(each, int)) or not constraint.allows(each):
            given = f"{item.name} = {each!r}" if each is value else f"{item.name} contains {each!r}"
            number = "a whole number" if item.type is int else "a number"
            needed = constraint.needed.replace("number", number, 1)
            fix = constraint.fix or _fix(item, constraint, each, needed)
            return Diagnostic(f"{given}; needed is {needed}", fix, location)
    return None


def _fix(item: "Field[Any]", constraint: Constraint, wrong: Any, needed: str) -> str:
    if len(constraint.choices) > 1:
        return suggest_choice(str(wrong), (str(choice) for choice in constraint.choices if choice != ""))
    example = constraint.choices[0] if constraint.choices else item.default
    if example is MISSING or example is None:
        return f"write {needed}"
    return f"write {item.name} = " + json.dumps(example) + ("" if constraint.choices else ", the default")
