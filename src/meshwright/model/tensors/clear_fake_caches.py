"""Clears functools caches in which a model's code keeps fake tensors after a trial.

    @staticmethod
    @lru_cache(maxsize=10)               in transformers' vision models: tables of relative positions
    def generate_index(size): ...        called in the trial, it caches a fake tensor for every later run

A cache may be cleared at any time, so those that hold fake tensors are cleared.
"""

import functools
import gc
import sys
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.model.tensors.pytree import tree_tensors

LRUCache = functools._lru_cache_wrapper


def clear_fake_caches(module: nn.Module) -> None:
    """Clears the caches in the code of `module` that hold fake tensors."""
    clear_caches_with_fakes(lru_caches(module))


def lru_caches(module: nn.Module) -> tuple[LRUCache, ...]:
    """Returns the caches of the classes of `module` and of the files that define them.

    A caller that clears often keeps the result and passes it to `clear_caches_with_fakes`.
    """
    found = {
        id(cache): cache
        for kind in {type(each) for each in module.modules()}
        for cache in _class_caches(kind)
    }
    return tuple(found.values())


def clear_caches_with_fakes(caches: Iterable[LRUCache]) -> None:
    """Clears those of `caches` that hold fake tensors."""
    for cache in caches:
        if any(isinstance(tensor, FakeTensor) for tensor in tree_tensors(_cached_values(cache))):
            cache.cache_clear()


def _cached_values(cache: LRUCache) -> list[Any]:
    # a cache without a limit keeps its results in a dict, which other threads may fill meanwhile
    found = gc.get_referents(cache)
    return [value for each in found for value in (list(each.values()) if type(each) is dict else (each,))]


@functools.cache
def _class_caches(kind: type) -> tuple[LRUCache, ...]:
    classes = [
        each for each in kind.__mro__ if each.__module__ != nn.Module.__module__ and each is not object
    ]
    files = [vars(sys.modules[each.__module__]) for each in classes if each.__module__ in sys.modules]
    found = [
        cache
        for names in (*map(vars, classes), *files)
        for value in list(names.values())
        for cache in _unwrap_caches(value)
    ]
    return tuple({id(cache): cache for cache in found}.values())


def _unwrap_caches(value: Any) -> Iterator[LRUCache]:
    """The cache that `value` is, or that it wraps: bare, as a method, or wrapped once more."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, functools._lru_cache_wrapper):
        yield value
    elif isinstance(value, FunctionType):
        inner = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        yield from (each for each in inner if isinstance(each, functools._lru_cache_wrapper))
