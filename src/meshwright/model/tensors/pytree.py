"""Finds, replaces and copies tensors in what a module takes and returns.

Containers are tuples, lists, dicts, dataclasses and transformers' ModelOutput. A tensor inside any other
object is not found: it keeps its graph and crosses block boundaries uncut. These walkers run for every block
call of every step, so they are written out instead of using torch.utils._pytree, which flattens and rebuilds.
It also takes dataclasses, and subclasses of list and dict, for leaves: their tensors would be lost.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

_PLAIN = frozenset(
    {type(None), bool, int, float, str, slice, type(...), torch.dtype, torch.device, torch.Size}
)


def tree_tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in `value`, in order."""
    found: list[torch.Tensor] = []
    _collect((value,), found)
    return found


def named_tensors(value: Any, name: str = "", kind: type = torch.Tensor) -> list[tuple[str, Any]]:
    """Returns the tensors in `value` in the order of `tree_tensors`, each with its path: "1.mask.0"; or what
    stands for them, of class `kind`.
    """
    if isinstance(value, kind):
        return [(name, value)]
    if isinstance(value, (tuple, list)):
        items: Mapping[Any, Any] = dict(enumerate(value))
    else:
        items = (
            value
            if isinstance(value, dict)
            else dataclass_items(value)
            if is_dataclass_instance(value)
            else {}
        )
    return [
        found
        for key, item in items.items()
        for found in named_tensors(item, f"{name}.{key}" if name else str(key), kind)
    ]


def _collect(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for (
        value
    ) in values:  # this runs for every block of every step, and mostly meets plain values, tuples and dicts
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is tuple or kind is dict:
            if value:
                _collect(value if kind is tuple else value.values(), found)
        elif isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)
        elif is_dataclass_instance(value):
            _collect(dataclass_items(value).values(), found)


def storage_id(tensor: torch.Tensor) -> int:
    """Returns an id of the storage of `tensor`, which its views share."""
    return (
        tensor.untyped_storage()._cdata
    )  # meta storages have no address; this is what torch's own weak references use


def replace_tensors(value: Any, replacements: Mapping[int, torch.Tensor]) -> Any:
    """Returns `value` with each tensor whose id is a key of `replacements` replaced.

    Lists, dicts and dataclasses are changed in place, because others may hold the same object and write into
    it (a list of skip connections, a cache). A tuple is rebuilt if something in it changes.
    """
    if isinstance(value, torch.Tensor):
        return replacements.get(id(value), value)
    if isinstance(value, tuple):
        return _swap_tuple(value, replacements)
    if isinstance(value, list):
        for index, item in enumerate(value):
            fresh = replace_tensors(item, replacements)
            if fresh is not item:
                value[index] = fresh
    elif isinstance(
        value, dict
    ):  # a ModelOutput keeps its items in attributes too: setting an item sets both
        for key, item in list(value.items()):
            fresh = replace_tensors(item, replacements)
            if fresh is not item:
                value[key] = fresh
    elif is_dataclass_instance(value):
        for name, item in dataclass_items(value).items():
            fresh = replace_tensors(item, replacements)
            if fresh is not item:
                object.__setattr__(value, name, fresh)  # a frozen one too: leaf or not, it is the same value
    return value


def copy_containers(value: Any) -> Any:
    """Returns `value` with new lists, dicts and dataclasses that hold the same tensors."""
    return map_leaves(value, lambda leaf: leaf)


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Returns `value` with new containers, and `function(item)` in place of every item that is not a
    container.
    """
    if type(value) in _PLAIN and not isinstance(value, tuple):
        return function(value)
    if isinstance(value, (list, dict)):
        fresh = _empty_container(value)
        for key, item in list(enumerate(value) if isinstance(value, list) else value.items()):
            fresh[key] = map_leaves(item, function)
        return fresh
    if isinstance(value, tuple):
        return _rebuild_tuple(value, [map_leaves(item, function) for item in value])
    if not is_dataclass_instance(value):
        return function(value)
    fresh = copy(value)
    for name, item in dataclass_items(value).items():
        object.__setattr__(fresh, name, map_leaves(item, function))
    return fresh


def _empty_container(value: Any) -> Any:
    if not (isinstance(value, OrderedDict) and is_dataclass_instance(value)):
        return copy(value)
    kind: type[Any] = type(value)
    fresh = OrderedDict.__new__(
        kind
    )  # a ModelOutput looks through its fields once for each of them when it is copied
    vars(fresh).update(vars(value))
    return fresh


def value_leaves(value: Any) -> list[Any]:
    """Returns all items in `value` that are not a list, dict, tuple or dataclass, in order."""
    return (
        [leaf for item in _contents(value) for leaf in value_leaves(item)]
        if _is_container(value)
        else [value]
    )


def opaque_tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors inside other objects in `value` (a key-value cache), which `tree_tensors` does not
    find.
    """
    found: list[torch.Tensor] = []
    known: set[int] = set()
    todo = [(value, False)]
    while todo:
        one, inside = todo.pop()
        if type(one) in _PLAIN or id(one) in known or isinstance(one, (nn.Module, type)):
            continue
        known.add(id(one))
        if isinstance(one, torch.Tensor):
            found += [one] if inside else []
        else:
            todo += [(item, inside or not _is_container(one)) for item in _contents(one)]
    return found


def _is_container(value: Any) -> bool:
    return isinstance(value, (tuple, list, dict)) or is_dataclass_instance(value)


def _contents(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (tuple, list)):
        yield from value
    elif is_dataclass_instance(value):
        yield from dataclass_items(value).values()
    elif "__dict__" in dir(value) and not callable(value):
        yield from vars(value).values()


def _swap_tuple(value: tuple[Any, ...], new: Mapping[int, torch.Tensor]) -> tuple[Any, ...]:
    items = [replace_tensors(item, new) for item in value]
    if all(fresh is item for fresh, item in zip(items, value, strict=True)):
        return value
    return _rebuild_tuple(value, items)


def _rebuild_tuple(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    is_named = "_fields" in dir(value)  # a namedtuple takes its items one by one
    return type(value)(*items) if is_named else type(value)(items)


def is_dataclass_instance(value: Any) -> bool:
    """Returns whether `value` is an instance of a dataclass."""
    return _is_dataclass(type(value)) and not isinstance(value, type)


@lru_cache(maxsize=1024)
def _is_dataclass(kind: type) -> bool:
    return is_dataclass(kind)


def dataclass_items(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass instance that are set."""
    found = {}
    for field in fields(value):
        with suppress(AttributeError):  # one with init=False may have none yet
            found[field.name] = getattr(value, field.name)
    return found
