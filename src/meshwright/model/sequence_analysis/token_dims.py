"""Marks token dims by prime lengths, and tells which dims an index keeps.

Trial lengths are primes that divide no size of the model, so a token dim is known by its size:

    one length          13 tokens are 11          [3, 11, 24] has them along dim 1, [33, 24] along dim 0
    several lengths     13 are 11, 9 are 7        [3, 2, 7, 11] has both: a mask between them

Several primes are passed as their product: a size with a common factor was made from tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count, islice
from math import gcd, isqrt
from typing import Any

MIN_PRIME = 5  # smaller primes divide too many sizes
MAX_TRIAL_LENGTH = 8192  # masks made by glue are real tensors, tokens x tokens


def has_tokens(size: int, prime_product: int) -> bool:
    """Returns whether a dim of this size belongs to tokens marked by `prime_product`."""
    return size > 0 and gcd(size, prime_product) > 1


def find_prime(size: int, prime_product: int) -> int:
    """Returns the prime that marks the tokens of a dim of this size; 0 if there is none or several."""
    factor = gcd(size, prime_product) if size else 1
    return factor if factor > 1 and len(prime_factors(factor)) == 1 else 0


@lru_cache(maxsize=256)  # called for every operation of a trial
def prime_factors(product: int) -> tuple[int, ...]:
    """Returns the primes of the product, the smallest first."""
    factor, remainder = list[int](), product
    while remainder > 1:
        factor.append(
            next((each for each in range(2, isqrt(remainder) + 1) if remainder % each == 0), remainder)
        )
        remainder //= factor[-1]
    return tuple(factor)


def distinguishing_primes(sizes: Iterable[int], length: int) -> Iterator[int]:
    """Yields primes that divide none of `sizes`, the next below `length` first, then those above."""
    nonzero_sizes = {size for size in sizes if size}

    def is_valid(number: int) -> bool:
        return len(prime_factors(number)) == 1 and all(size % number for size in nonzero_sizes)

    yield from islice(filter(is_valid, range(min(length, MAX_TRIAL_LENGTH), MIN_PRIME - 1, -1)), 1)
    yield from filter(is_valid, count(max(length + 1, MIN_PRIME)))


def keeps_dims(index: Any, dims: Sequence[int], ndim: int, length: int = 0) -> bool:
    """Returns whether `index` keeps the `dims`; a slice that ends at their `length` does, if that is not 0.

    A block counts the tokens that it gets. A mask has all keys and would be cut.
    """
    entries = index if isinstance(index, tuple) else (index,)
    if not all(each is None or each is Ellipsis or type(each) in (slice, int, list) for each in entries):
        return False
    return all(dim not in dims or _takes_all(each, length) for dim, each in indexed_dims(entries, ndim))


def _takes_all(each: Any, length: int) -> bool:
    return isinstance(each, slice) and (
        each == slice(None) or (length > 0 and range(length)[each] == range(length))
    )


def indexed_dims(entries: Sequence[Any], ndim: int) -> Iterator[tuple[int, Any]]:
    """Yields each indexed dim with its entry."""
    num_indexed, dim = sum(each is not None and each is not Ellipsis for each in entries), 0
    for each in entries:
        if each is Ellipsis:
            dim += ndim - num_indexed
        elif each is not None:
            yield dim, each
            dim += 1
