"""Sequence sharding: each token on one rank, as even as possible, and balanced under a causal mask."""

import pytest

from meshwright.plan.sharding.sequence_sharding import (
    PADDING_RANGE,
    SequenceSharding,
    TokenRange,
    with_padding,
)

SHARDINGS = [
    SequenceSharding(1),
    SequenceSharding(2),
    SequenceSharding(3),
    SequenceSharding(4),
    SequenceSharding(6, 2),
    SequenceSharding(6, 3),
    SequenceSharding(4, 4, zigzag=False),
    SequenceSharding(3, zigzag=False),
]
SHARDINGS += [SequenceSharding(3, striped=True), SequenceSharding(6, 2, striped=True)]


def positions(spans: tuple[TokenRange, ...]) -> list[int]:
    return [position for begin, end in spans for position in range(begin, end)]


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 5, 7, 12, 13, 64])
def test_every_token_is_on_one_rank(sharding: SequenceSharding, length: int):
    sharded = [positions(sharding.token_ranges(length, index)) for index in range(sharding.num_ranks)]
    assert sorted(position for mine in sharded for position in mine) == list(range(length))
    assert all(mine == sorted(mine) for mine in sharded)
    assert [len(mine) for mine in sharded] == [
        sharding.num_tokens(length, index) for index in range(sharding.num_ranks)
    ]


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_a_length_that_divides_is_split_evenly(sharding: SequenceSharding):
    assert {sharding.num_tokens(48, index) for index in range(sharding.num_ranks)} == {
        48 // sharding.num_ranks
    }


def test_neighbouring_inner_ranks_share_a_contiguous_range():
    sharding = SequenceSharding(6, num_inner_ranks=3)
    for first in (0, 3):
        together = [
            position
            for index in range(first, first + 3)
            for position in positions(sharding.token_ranges(13, index))
        ]
        assert together == positions(sharding.inner_group_ranges(13, first))


def pairs(sharding: SequenceSharding, length: int) -> list[int]:
    """Returns how many tokens the queries of each rank look at, in all, under a causal mask."""
    return [
        sum(position + 1 for position in positions(sharding.token_ranges(length, index)))
        for index in range(sharding.num_ranks)
    ]


def test_zigzag_balances_causal_attention_and_contiguous_gives_the_last_rank_most():
    length = 4096
    folded, straight = pairs(SequenceSharding(4), length), pairs(SequenceSharding(4, zigzag=False), length)
    assert max(folded) <= 1.001 * sum(folded) / 4
    assert max(straight) / (sum(straight) / 4) == pytest.approx(1.75, abs=0.001)


@pytest.mark.parametrize(
    "sharding", [SequenceSharding(4, striped=True), SequenceSharding(8, 2, striped=True)], ids=str
)
def test_striped_every_rank_has_tokens_of_each_range(sharding: SequenceSharding):
    firsts = range(0, sharding.num_ranks, sharding.num_inner_ranks)
    for begin, end in ((0, 100), (37, 41), (300, 512)):
        shares = [
            sum(begin <= at < end for at in positions(sharding.inner_group_ranges(512, first)))
            for first in firsts
        ]
        assert max(shares) - min(shares) <= 1


def test_a_rank_with_fewer_than_two_tokens_runs_stand_ins():
    sharding = SequenceSharding(4)
    assert sorted(sharding.num_tokens(3, index) for index in range(4)) == [0, 1, 1, 1]
    assert {sharding.num_padded_tokens(3, index) for index in range(4)} == {2}
    assert with_padding(()) == (PADDING_RANGE, PADDING_RANGE)
    assert with_padding(((4, 5),)) == ((4, 5), PADDING_RANGE)
    assert with_padding(((4, 6),)) == ((4, 6),)
