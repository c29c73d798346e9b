"""Keys of a config file, set from the command line.

    --train.batch 16          a value, read as TOML (16, true, [1, 2], "text"); what is not TOML is a text
    --train.batch=16          the same; needed when the value itself begins with --
    --strategies.zero.stage 2 one table of a list of tables, by its name ...
    --optimizer.groups.0.pattern *.bias     ... or by its place
    --strategies.zero.field   without a value: true

An override changes the document before anything is checked, so the command line obeys the same rules as the file.
"""

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from datetime import date, time
from typing import Any

from meshwright.core.errors import Fault, nearest


def overridden(
    document: dict[str, Any], words: Sequence[str], faults: list[Fault]
) -> tuple[dict[str, Any], frozenset[tuple[str, ...]]]:
    """A copy of `document` with the overrides in `words`, and the paths that they set; `faults` grows by what is wrong."""
    document = deepcopy(document)
    paths = set()
    for key, text in _pairs(words, faults):
        path = _put(document, key.split("."), _value(text), faults)
        paths.add(path)
    return document, frozenset(paths - {()})


def _pairs(words: Sequence[str], faults: list[Fault]) -> Iterator[tuple[str, str]]:
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or not all(word[2:].partition("=")[0].split(".")):
            faults.append(Fault("this is not an override", "write --key.sub value, for example --train.batch 16", f"'{word}'"))
            continue
        key, equals, text = word[2:].partition("=")
        if not equals:
            text = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        if any("\ud800" <= letter <= "\udfff" for letter in key + text):  # how Python marks bytes that are not UTF-8
            faults.append(Fault(f"{key + '=' + text!a} is not a text in UTF-8", "write it in UTF-8, as the file is", "override"))
            continue
        yield key, text


def _value(text: str) -> Any:
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # No key takes a date, and a text with line breaks may hold further keys: both are texts.
    if set(read) != {"value"} or isinstance(read["value"], (date, time)):
        return text
    return read["value"]


def _put(document: dict[str, Any], path: Sequence[str], value: Any, faults: list[Fault]) -> tuple[str, ...]:
    """Set `path` in `document`; returns it with names in place of positions, or () when it could not be set."""
    node: Any = document
    said: list[str] = []
    for depth, part in enumerate(path):
        where = f"--{'.'.join(path)}"
        if not isinstance(node, (dict, list)):
            text = f"{'.'.join(path[:depth])} is {node!r}, which has no keys"
            faults.append(Fault(text, f"set it as a whole: --{'.'.join(path[:depth])} VALUE", where))
            return ()
        key: Any = _place(node, part, where, faults) if isinstance(node, list) else part
        if key is None:
            return ()
        last = depth == len(path) - 1
        if last:
            node[key] = value
        elif isinstance(node, dict) and key not in node:
            node[key] = {}
        node = node[key]
        said.append(_name(node, part) if not last else part)
    return tuple(said)


def _place(items: list[Any], part: str, where: str, faults: list[Fault]) -> int | None:
    """The position in `items` that `part` names: by the item's name, or by a number."""
    named = [i for i, item in enumerate(items) if _name(item, "") == part]
    if len(named) == 1:
        return named[0]
    if part.isdecimal() and int(part) < len(items):
        return int(part)
    if named:
        text = f"{len(named)} tables of this list are named '{part}'"
        faults.append(Fault(text, f"address one by its place: {' or '.join(map(str, named))} instead of '{part}'", where))
    else:
        faults.append(Fault(f"this list has no '{part}'", _repair(part, items), where))
    return None


def _repair(part: str, items: Iterable[Any]) -> str:
    names = [_name(item, str(i)) for i, item in enumerate(items)]
    add = f'add a table with name = "{part}" to the file'
    return f"{nearest(part, names)} or {add}" if names else add


def _name(item: Any, otherwise: str) -> str:
    if isinstance(item, dict) and isinstance(item.get("name"), str):
        return item["name"]
    return otherwise
