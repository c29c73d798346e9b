"""Numbers of tokens in a trial: primes that divide no size of the model, so that a dim of tokens is known by its size.

    rows of one length      13 tokens are 11        [3, 11, 24] has them along dim 1, [33, 24] along dim 0
    of several              13 are 11, 9 are 7      [3, 2, 7, 11] has those of both rows: a mask between them

Where several primes are in use they go as their product: whatever has a factor in common with it was made from tokens.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import count, islice
from math import gcd, isqrt

SHORTEST = 5  # a smaller prime divides too much
LONGEST = 8192  # masks of glue are real, tokens x tokens


def has_tokens(size: int, primes: int) -> bool:
    """Whether a dim of this size has to do with the tokens that the product `primes` tells."""
    return size > 0 and gcd(size, primes) > 1


def prime_in(size: int, primes: int) -> int:
    """The prime among those of the product that tells whose tokens a dim of this size has; 0: none, or several."""
    found = gcd(size, primes) if size else 1
    return found if found > 1 and len(factors(found)) == 1 else 0


@lru_cache(maxsize=256)  # it is asked for every operation of a trial
def factors(product: int) -> tuple[int, ...]:
    """The primes that a product consists of, the smallest first."""
    found, rest = list[int](), product
    while rest > 1:
        found.append(next((each for each in range(2, isqrt(rest) + 1) if rest % each == 0), rest))
        rest //= found[-1]
    return tuple(found)


def telling(sizes: Iterable[int], length: int) -> Iterator[int]:
    """Primes that divide none of `sizes`, the next below `length` first, then those above."""
    others = {size for size in sizes if size}

    def tells(number: int) -> bool:
        return len(factors(number)) == 1 and all(size % number for size in others)

    yield from islice(filter(tells, range(min(length, LONGEST), SHORTEST - 1, -1)), 1)
    yield from filter(tells, count(max(length + 1, SHORTEST)))
