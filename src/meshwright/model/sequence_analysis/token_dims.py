"""Numbers of tokens in a trial: primes that divide no size of the model, so that a dim of tokens is known by its size.

    rows of one length      13 tokens are 11        [3, 11, 24] has them along dim 1, [33, 24] along dim 0
    of several              13 are 11, 9 are 7      [3, 2, 7, 11] has those of both rows: a mask between them

Where several primes are in use they go as their product: whatever has a factor in common with it was made from tokens.

What an index with numbers and slices does to dims: which it leaves whole.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count, islice
from math import gcd, isqrt
from typing import Any

MIN_PRIME = 5  # a smaller prime divides too much
MAX_TRIAL_LENGTH = 8192  # masks of glue are real, tokens x tokens


def has_tokens(size: int, prime_product: int) -> bool:
    """Whether a dim of this size has to do with the tokens that the product `primes` tells."""
    return size > 0 and gcd(size, prime_product) > 1


def find_prime(size: int, prime_product: int) -> int:
    """The prime among those of the product that tells whose tokens a dim of this size has; 0: none, or several."""
    found = gcd(size, prime_product) if size else 1
    return found if found > 1 and len(prime_factors(found)) == 1 else 0


@lru_cache(maxsize=256)  # it is asked for every operation of a trial
def prime_factors(product: int) -> tuple[int, ...]:
    """The primes that a product consists of, the smallest first."""
    found, rest = list[int](), product
    while rest > 1:
        found.append(next((each for each in range(2, isqrt(rest) + 1) if rest % each == 0), rest))
        rest //= found[-1]
    return tuple(found)


def distinguishing_primes(sizes: Iterable[int], length: int) -> Iterator[int]:
    """Primes that divide none of `sizes`, the next below `length` first, then those above."""
    others = {size for size in sizes if size}

    def tells(number: int) -> bool:
        return len(prime_factors(number)) == 1 and all(size % number for size in others)

    yield from islice(filter(tells, range(min(length, MAX_TRIAL_LENGTH), MIN_PRIME - 1, -1)), 1)
    yield from filter(tells, count(max(length + 1, MIN_PRIME)))


def keeps_dims(index: Any, dims: Sequence[int], ndim: int, length: int = 0) -> bool:
    """Whether `index` leaves the `dims` alone. A slice of them that stops at their `length` does, where that is not 0.

    Of its own tokens, a block counts how many they are. A mask has all keys, and would be cut.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if not all(each is None or each is Ellipsis or type(each) in (slice, int, list) for each in parts):
        return False
    return all(dim not in dims or _takes_all(each, length) for dim, each in indexed_dims(parts, ndim))


def _takes_all(each: Any, length: int) -> bool:
    return isinstance(each, slice) and (
        each == slice(None) or (length > 0 and range(length)[each] == range(length))
    )


def indexed_dims(entries: Sequence[Any], ndim: int) -> Iterator[tuple[int, Any]]:
    """For each dim that is indexed, how."""
    named, dim = sum(each is not None and each is not Ellipsis for each in entries), 0
    for each in entries:
        if each is Ellipsis:
            dim += ndim - named
        elif each is not None:
            yield dim, each
            dim += 1
