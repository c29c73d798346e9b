"""Tensors inside what a module takes and gives: tuples, lists, dicts and transformers' ModelOutput."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in `value`, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def swap(value: Any, new: Mapping[int, torch.Tensor]) -> Any:
    """`value` with each tensor whose id is in `new` replaced; containers are copied, the rest is handed on."""
    if isinstance(value, torch.Tensor):
        return new.get(id(value), value)
    if isinstance(value, tuple):
        items = [swap(item, new) for item in value]
        return tuple(items) if type(value) is tuple else type(value)(*items)
    if isinstance(value, list):
        return [swap(item, new) for item in value]
    if type(value) is dict:
        return {key: swap(item, new) for key, item in value.items()}
    if isinstance(value, dict):  # a ModelOutput keeps its items in attributes too: set them through the object
        fresh = copy.copy(value)
        for key, item in value.items():
            fresh[key] = swap(item, new)
        return fresh
    return value
