"""Sequence lengths for trials that distinguish token dims from all others."""

from itertools import islice

from torch import nn

from meshwright.model.sequence_analysis.token_dims import (
    MAX_TRIAL_LENGTH,
    distinguishing_primes,
    find_prime,
    has_tokens,
    prime_factors,
)


def test_the_trial_is_on_a_prime_that_divides_no_size():
    sizes = [size for each in nn.Linear(77, 65).parameters() for size in each.shape]

    def first(length: int) -> list[int]:
        return list(islice(distinguishing_primes(sizes, length), 3))

    assert first(64) == [61, 67, 71]
    assert first(13) == [17, 19, 23]  # 5, 7, 11 and 13 divide 65 or 77
    assert first(4096)[0] == 4093
    assert first(100_000)[0] == MAX_TRIAL_LENGTH - 1


def test_a_token_dim_is_found_by_the_prime_factor_of_its_size():
    both = 7 * 11
    assert [has_tokens(size, both) for size in (0, 1, 7, 22, 77, 12)] == [
        False,
        False,
        True,
        True,
        True,
        False,
    ]
    assert [find_prime(size, both) for size in (0, 1, 7, 22, 77, 12)] == [0, 0, 7, 11, 0, 0]
    assert not has_tokens(12, 1)
    assert (prime_factors(both), prime_factors(1)) == ((7, 11), ())
