"""Converts the values of a TOML or JSON document to frozen dataclasses.

The dataclasses are the schema: a field is a key, its annotation is its type, its default is its default.
This module is the only one that imports pydantic. pydantic answers "is this value of that type"; the rest is
here: which known key resembles an unknown one, to which table a misplaced key belongs, and what to write
instead, in the words of the file.

Types are strict: a string never becomes a number nor a number a string, but an integer is accepted where a
float is needed. TOML has no null, so an empty table `{}` stands for None where None is allowed and a table
is not.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date, time
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from meshwright.plan.job.errors import Diagnostic, PlanError, suggest_choice, suggest_name

KeyPath = tuple[str, ...]  # a dotted path, split
TYPE_DESCRIPTIONS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string in quotes",
    "tuple_type": "a list in [ ]",
    "list_type": "a list in [ ]",
    "dict_type": "a table of keys",
    "dataclass_type": "a table of keys",
    "none_required": "{} (none)",
}


@dataclass
class SchemaCheck:
    """Converts values to types and collects every diagnostic in `diagnostics`.

    `file` and `overridden` (key paths) say where a value came from: a diagnostic names the key of the file
    or the option.
    """

    file: str
    overridden: frozenset[KeyPath] = frozenset()
    tables: Mapping[str, type] = field(default_factory=dict)
    diagnostics: list[Diagnostic] = field(default_factory=list)

    def convert(self, value: Any, hint: Any, path: KeyPath) -> Any:
        """Returns `value` as an object of type `hint`; None, with the reasons added to `diagnostics`, if it
        has another type.
        """
        known = self._check_keys(value, hint, path)
        try:
            return TypeAdapter(hint).validate_json(json.dumps(known), strict=True)
        except ValidationError as error:
            self._translate(error.errors(include_url=False), known, path, hint)
        except PlanError as error:  # the dataclass itself refused its values
            self.diagnostics += error.diagnostics
        return None

    def add_unknown_key(self, key: str, known: Iterable[str], path: KeyPath) -> None:
        """Adds the diagnostic that `path` ends in `key`, which is not one of `known`."""
        homes = [f"{table}.{key}" for table, kind in self.tables.items() if key in _field_hints(kind)]
        known = tuple(known)
        if not known:
            fix = "remove it: this table has no keys"
        elif homes:
            fix = f"it belongs to another table: write {' or '.join(homes)}"
        else:
            fix = suggest_name(key, known)
        self.diagnostics.append(Diagnostic(f"there is no key '{key}' here", fix, self.describe_path(path)))

    def describe_path(self, path: KeyPath) -> str:
        """Returns the location of `path` as text: the option if an override set it, else the file and the
        key.
        """
        dotted = ".".join(path)
        given = any(
            path[: len(value_text)] == value_text or value_text[: len(path)] == path
            for value_text in self.overridden
        )
        below = [each for each in self.overridden if each[: len(path)] == path]
        if len(below) == 1:  # as it was typed: it may be a key of a table that does not exist
            dotted = ".".join(below[0])
        return f"--{dotted}" if given else f"{self.file}: {dotted}"

    def _check_keys(self, value: Any, hint: Any, path: KeyPath) -> Any:
        """`value` without unknown keys, which become diagnostics, and with None where `{}` stands for it."""
        if isinstance(value, (int, float, str)):
            return value
        if isinstance(value, list) and set(map(type, value)) <= {int, float, str}:
            return value  # a checkpoint's manifest has many such lists
        if isinstance(value, (date, time)):
            self.diagnostics.append(
                Diagnostic(
                    f"{value} is read as a date", f'put it in quotes: "{value}"', self.describe_path(path)
                )
            )
            return str(value)
        members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        tables = [member for member in members if is_dataclass(member) or get_origin(member) is dict]
        if value == {} and NoneType in members and not tables:
            return None
        if isinstance(value, dict) and tables:
            return self._known_table(value, tables[0], path)
        lists = [member for member in members if get_origin(member) in (tuple, list)]
        if isinstance(value, list) and lists:
            hints = _item_hints(lists[0], len(value))
            return [self._check_keys(item, hints[i], (*path, str(i))) for i, item in enumerate(value)]
        return value

    def _known_table(self, value: dict[str, Any], table: Any, path: KeyPath) -> dict[str, Any]:
        if get_origin(table) is dict:
            hint = get_args(table)[1]
            return {key: self._check_keys(item, hint, (*path, key)) for key, item in value.items()}
        hints = _field_hints(table)
        for key in value:
            if key not in hints:
                self.add_unknown_key(key, hints, (*path, key))
        return {
            key: self._check_keys(item, hints[key], (*path, key))
            for key, item in value.items()
            if key in hints
        }

    def _translate(self, errors: list[ErrorDetails], value: Any, path: KeyPath, hint: Any) -> None:
        groups: dict[KeyPath, list[ErrorDetails]] = {}
        for error in errors:
            inner = tuple(_steps_into(value, error))
            groups.setdefault((*path, *inner), []).append(error)
        for place, found in groups.items():
            num_items = _num_items(hint, place[len(path) :])
            self.diagnostics.append(_type_diagnostic(found, self.describe_path(place), num_items))


@cache
def _field_hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind) if item.init}


def _item_hints(hint: Any, length: int) -> list[Any]:
    args = get_args(hint)
    if get_origin(hint) is list or args[-1] is Ellipsis:
        return [args[0]] * length
    return [*args, *[Any] * length][:length]


def _num_items(hint: Any, parts: KeyPath) -> int:
    """Returns how many items the list at `parts` of a value of type `hint` has; 0 for any number."""
    for part in parts:
        hint = _field_hints(hint).get(part) if is_dataclass(hint) and isinstance(hint, type) else hint
    args = get_args(hint) if get_origin(hint) is tuple else ()
    return 0 if Ellipsis in args else len(args)


def _steps_into(value: Any, error: ErrorDetails) -> Iterator[str]:
    """The parts of an error's location that name keys of `value`; pydantic mixes in the members of unions it
    tried.
    """
    *parts, last = error["loc"] or ("",)
    for part in parts:
        if _contains(value, part):
            value = value[part]
            yield str(part)
    if _contains(value, last) or error["type"] == "missing":
        yield str(last)


def _contains(value: Any, part: int | str) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


def _type_diagnostic(errors: list[ErrorDetails], where: str, num_items: int) -> Diagnostic:
    """One diagnostic for one value; a value that may be of several types comes with one error for each."""
    kind, given = errors[0]["type"], errors[0]["input"]
    if kind == "missing" and num_items:
        return Diagnostic("the list has too few values", f"write {num_items} values in [ ]", where)
    if kind == "missing":
        return Diagnostic("this key is missing", "write it: it has no default", where)
    if kind == "literal_error":
        expected = errors[0]["ctx"]["expected"]
        words = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
        fix = suggest_choice(given, words) if isinstance(given, str) else f"write {expected}"
        return Diagnostic(f"given is {_json_text(given)}; needed is {expected}", fix, where)
    needed = [TYPE_DESCRIPTIONS.get(error["type"], error["msg"]) for error in errors]
    text = ", or ".join(dict.fromkeys(needed))
    fix = f"write {text}" if kind in TYPE_DESCRIPTIONS else "change it accordingly"
    if kind == "string_type" and len(errors) == 1:
        fix = f"put it in quotes: {json.dumps(str(given))}" if not isinstance(given, (dict, list)) else fix
    elif isinstance(given, str) and kind in ("int_type", "float_type", "bool_type"):
        fix += ", without quotes"
    elif kind in ("tuple_type", "list_type"):
        items = [_json_text(given)] * (num_items or 1)
        values = f"{num_items} values: " if num_items else ""
        fix = f"write {values}[{', '.join(items)}]" if not isinstance(given, dict) else fix
    return Diagnostic(f"given is {_json_text(given)}; needed is {text}", fix, where)


def _json_text(given: Any) -> str:
    return json.dumps(given)
