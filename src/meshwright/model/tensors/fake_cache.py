"""What a model's code remembers beside the model, in a functools.lru_cache: a trial on fake tensors must leave none there.

    @staticmethod
    @lru_cache(maxsize=10)                        in transformers, of several models of images: tables of relative positions
    def generate_index(size): ...                 asked in the trial, it remembers a fake tensor, and hands it to every later run

A cache may be emptied whenever one likes; so those that hold fakes are.
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
    """Empty the caches of the code of `module` that hold fake tensors."""
    clear_caches_with_fakes(lru_caches(module))


def lru_caches(module: nn.Module) -> tuple[LRUCache, ...]:
    """Those of the classes of `module`, and of the files where these are written: for who forgets often."""
    found = {
        id(cache): cache
        for kind in {type(each) for each in module.modules()}
        for cache in _class_caches(kind)
    }
    return tuple(found.values())


def clear_caches_with_fakes(caches: Iterable[LRUCache]) -> None:
    """Empty those of the caches that hold fake tensors."""
    for cache in caches:
        if any(isinstance(tensor, FakeTensor) for tensor in tree_tensors(_cached_values(cache))):
            cache.cache_clear()


def _cached_values(cache: LRUCache) -> list[Any]:
    """What `cache` has given out and keeps: one without a limit has it in a dict."""
    found = gc.get_referents(cache)
    return [*found, *(value for each in found if type(each) is dict for value in each.values())]


@functools.cache
def _class_caches(kind: type) -> tuple[LRUCache, ...]:
    own = [each for each in kind.__mro__ if each.__module__ != nn.Module.__module__ and each is not object]
    files = [vars(sys.modules[each.__module__]) for each in own if each.__module__ in sys.modules]
    found = [
        cache
        for names in (*map(vars, own), *files)
        for value in list(names.values())
        for cache in _unwrap_caches(value)
    ]
    return tuple({id(cache): cache for cache in found}.values())


def _unwrap_caches(value: Any) -> Iterator[LRUCache]:
    """The cache that `value` is, or that a function of such a cache holds: bare, as a method, or wrapped once more."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, functools._lru_cache_wrapper):
        yield value
    elif isinstance(value, FunctionType):
        inner = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        yield from (each for each in inner if isinstance(each, functools._lru_cache_wrapper))
