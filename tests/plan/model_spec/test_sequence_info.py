"""Which tokens of a sample each rank has: every one on one rank, as evenly as can be, and balanced under a causal mask."""

import pytest

from meshwright.plan.model_spec.sequence_info import STAND_IN, Deal, Span, filled

DEALS = [Deal(1), Deal(2), Deal(3), Deal(4), Deal(6, 2), Deal(6, 3), Deal(4, 4, folded=False), Deal(3, folded=False)]
DEALS += [Deal(3, striped=True), Deal(6, 2, striped=True)]


def positions(spans: tuple[Span, ...]) -> list[int]:
    return [position for begin, end in spans for position in range(begin, end)]


@pytest.mark.parametrize("deal", DEALS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 5, 7, 12, 13, 64])
def test_every_token_is_on_one_rank(deal: Deal, length: int):
    dealt = [positions(deal.spans(length, index)) for index in range(deal.ranks)]
    assert sorted(position for mine in dealt for position in mine) == list(range(length))
    assert all(mine == sorted(mine) for mine in dealt)
    assert [len(mine) for mine in dealt] == [deal.count(length, index) for index in range(deal.ranks)]


@pytest.mark.parametrize("deal", DEALS, ids=str)
def test_a_length_that_divides_is_dealt_evenly(deal: Deal):
    assert {deal.count(48, index) for index in range(deal.ranks)} == {48 // deal.ranks}


def test_neighbouring_ranks_have_a_stretch_together():
    deal = Deal(6, inner=3)
    for first in (0, 3):
        together = [position for index in range(first, first + 3) for position in positions(deal.spans(13, index))]
        assert together == positions(deal.together(13, first))


def pairs(deal: Deal, length: int) -> list[int]:
    """How many tokens the queries of each rank look at, in all, under a causal mask."""
    return [sum(position + 1 for position in positions(deal.spans(length, index))) for index in range(deal.ranks)]


def test_folded_every_rank_looks_at_as_many_tokens_and_straight_the_last_at_most():
    length = 4096
    folded, straight = pairs(Deal(4), length), pairs(Deal(4, folded=False), length)
    assert max(folded) <= 1.001 * sum(folded) / 4
    assert max(straight) / (sum(straight) / 4) == pytest.approx(1.75, abs=0.001)


@pytest.mark.parametrize("deal", [Deal(4, striped=True), Deal(8, 2, striped=True)], ids=str)
def test_striped_every_rank_has_its_share_of_each_stretch(deal: Deal):
    firsts = range(0, deal.ranks, deal.inner)
    for begin, end in ((0, 100), (37, 41), (300, 512)):
        shares = [sum(begin <= at < end for at in positions(deal.together(512, first))) for first in firsts]
        assert max(shares) - min(shares) <= 1


def test_a_rank_with_fewer_than_two_tokens_runs_stand_ins():
    deal = Deal(4)
    assert sorted(deal.count(3, index) for index in range(4)) == [0, 1, 1, 1]
    assert {deal.run(3, index) for index in range(4)} == {2}
    assert filled(()) == (STAND_IN, STAND_IN)
    assert filled(((4, 5),)) == ((4, 5), STAND_IN)
    assert filled(((4, 6),)) == ((4, 6),)
