"""The fraction of the tokens on a rank, by block call and module."""

from dataclasses import replace
from fractions import Fraction

from meshwright.parallel.context.ring import RingAttention
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.model_spec.sequence_info import BlockSequenceInfo, SequenceInfo
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.rank_work_share import RankWorkShare
from meshwright.plan.sharding.sequence_sharding import SequenceSharding
from meshwright.plan.sharding.sharding_plan import ShardingPlan

BLOCK_CALLS = (
    BlockSequenceInfo("patches"),
    BlockSequenceInfo("encoder", ((1,),), ((1,),)),
    BlockSequenceInfo(
        "decoder",
        ((1,), (1,)),
        ((1,),),
        input_num_tokens=(9, 13),
        output_num_tokens=(9,),
        module_num_tokens=(("decoder.keys", 13),),
    ),
    BlockSequenceInfo("whole", ((),), ((1,),), is_replicated=True),
)
TOKENS = SequenceInfo(13, ("ids",), (), BLOCK_CALLS)


def share_of(rank: int, tokens: SequenceInfo | None = TOKENS) -> RankWorkShare:
    names = tuple(each.block_call for each in BLOCK_CALLS)
    whole = ShardingPlan.one_device(
        Mesh(cp=2), ModelSpec("tiny", names, (), (1,) * 4, (1,) * 4, sequence_info=tokens)
    )
    return RankView(RingAttention().place(whole), whole.mesh.coordinate(rank)).work_share


def test_fractions_follow_the_tokens_of_a_block_call_and_of_its_module():
    sharding = SequenceSharding(2)
    for rank in range(2):
        here = share_of(rank)
        most, few = (Fraction(sharding.num_tokens(length, rank), length) for length in (13, 9))
        assert (here.sample_fraction, here.fractions_by_length) == (
            most,
            ((most, most), (few, few)),
        )
        found = [here.token_fraction(each.block_call) for each in BLOCK_CALLS]
        assert found == [1, most, few, 1]
        assert here.token_fraction("decoder", "decoder.keys") == most
        assert here.token_fraction("decoder", "decoder.queries") == few


def test_stand_ins_are_run_and_do_not_come_out():
    one = SequenceInfo(3, ("ids",), (), (BlockSequenceInfo("encoder", ((1,),), ((1,),)),))
    for rank, kept in ((0, Fraction(1, 3)), (1, Fraction(2, 3))):
        here = share_of(rank, one)
        assert (here.token_fraction("encoder"), here.unpadded_token_fraction("encoder")) == (
            Fraction(2, 3),
            kept,
        )
        assert here.fractions_by_length == ((Fraction(2, 3), kept),)


def test_all_tokens_without_sequence_sharding_or_analysis():
    share = share_of(0)
    alone = replace(share, plan=replace(share.plan, sequence_sharding=None))
    assert alone.token_fraction("decoder") == alone.sample_fraction == 1
    assert (
        share_of(0, None).sample_fraction,
        share_of(0, None).fractions_by_length,
        share_of(0, None).token_fraction("encoder"),
    ) == (1, (), 1)
