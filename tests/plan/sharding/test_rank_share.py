"""What a rank has of the tokens of a sample, by what they go through."""

from dataclasses import replace
from fractions import Fraction

from meshwright.parallel.context.ring import Ring
from meshwright.plan.model_spec.model_spec import Anatomy
from meshwright.plan.model_spec.sequence_info import Deal, Passing, Tokens
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_share import kept_share, own_share, own_shares, own_tokens
from meshwright.plan.sharding.sharding_plan import Space

VISITS = (
    Passing("patches"),
    Passing("encoder", ((1,),), ((1,),)),
    Passing("decoder", ((1,), (1,)), ((1,),), takes_of=(9, 13), gives_of=(9,), within=(("decoder.keys", 13),)),
    Passing("whole", ((),), ((1,),), whole=True),
)
TOKENS = Tokens(13, ("ids",), (), VISITS)


def space(rank: int, tokens: Tokens | None = TOKENS) -> Space:
    names = tuple(each.visit for each in VISITS)
    whole = Space.one_device(Mesh(cp=2), Anatomy("tiny", names, (), (1,) * 4, (1,) * 4, tokens=tokens))
    return Ring().place(whole).at({**whole.mesh.coordinate(rank)})


def test_shares_follow_what_goes_through_a_visit_and_a_module_of_it():
    deal = Deal(2)
    for rank in range(2):
        here = space(rank)
        most, few = (Fraction(deal.count(length, rank), length) for length in (13, 9))
        assert (own_tokens(here), own_shares(here)) == (most, ((most, most), (few, few)))
        found = [own_share(here, each.visit) for each in VISITS]
        assert found == [1, most, few, 1]
        assert own_share(here, "decoder", "decoder.keys") == most
        assert own_share(here, "decoder", "decoder.queries") == few


def test_stand_ins_are_run_and_do_not_come_out():
    one = Tokens(3, ("ids",), (), (Passing("encoder", ((1,),), ((1,),)),))
    for rank, kept in ((0, Fraction(1, 3)), (1, Fraction(2, 3))):
        here = space(rank, one)
        assert (own_share(here, "encoder"), kept_share(here, "encoder")) == (Fraction(2, 3), kept)
        assert own_shares(here) == ((Fraction(2, 3), kept),)


def test_all_of_them_where_nobody_deals_or_nothing_is_known():
    alone = replace(space(0), deal=None)
    assert own_share(alone, "decoder") == own_tokens(alone) == 1
    assert (own_tokens(space(0, None)), own_shares(space(0, None)), own_share(space(0, None), "encoder")) == (1, (), 1)
