"""What an index with numbers and slices does to dims: which it leaves whole."""

from collections.abc import Iterator, Sequence
from typing import Any


def plain(index: Any, dims: Sequence[int], ndim: int, length: int = 0) -> bool:
    """Whether `index` leaves the `dims` alone. A slice of them that stops at their `length` does, where that is not 0.

    Of its own tokens, a block counts how many they are. A mask has all keys, and would be cut.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if not all(each is None or each is Ellipsis or type(each) in (slice, int, list) for each in parts):
        return False
    return all(dim not in dims or _all(each, length) for dim, each in spread(parts, ndim))


def _all(each: Any, length: int) -> bool:
    return isinstance(each, slice) and (each == slice(None) or (length > 0 and range(length)[each] == range(length)))


def spread(parts: Sequence[Any], ndim: int) -> Iterator[tuple[int, Any]]:
    """For each dim that is indexed, how."""
    named, dim = sum(each is not None and each is not Ellipsis for each in parts), 0
    for each in parts:
        if each is Ellipsis:
            dim += ndim - named
        elif each is not None:
            yield dim, each
            dim += 1
