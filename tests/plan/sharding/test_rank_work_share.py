"""The fraction of the tokens on a rank, by block call and module."""

from dataclasses import replace
from fractions import Fraction

from meshwright.parallel.context.ring import RingAttention
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.model_spec.sequence_info import BlockSequenceInfo, SequenceInfo
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_work_share import (
    local_fraction,
    local_fractions_by_length,
    local_token_fraction,
    unpadded_fraction,
)
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


def space(rank: int, tokens: SequenceInfo | None = TOKENS) -> ShardingPlan:
    names = tuple(each.block_call for each in BLOCK_CALLS)
    whole = ShardingPlan.one_device(
        Mesh(cp=2), ModelSpec("tiny", names, (), (1,) * 4, (1,) * 4, sequence_info=tokens)
    )
    return RingAttention().place(whole).at_coordinate({**whole.mesh.coordinate(rank)})


def test_fractions_follow_the_tokens_of_a_block_call_and_of_its_module():
    sharding = SequenceSharding(2)
    for rank in range(2):
        here = space(rank)
        most, few = (Fraction(sharding.num_tokens(length, rank), length) for length in (13, 9))
        assert (local_token_fraction(here), local_fractions_by_length(here)) == (
            most,
            ((most, most), (few, few)),
        )
        found = [local_fraction(here, each.block_call) for each in BLOCK_CALLS]
        assert found == [1, most, few, 1]
        assert local_fraction(here, "decoder", "decoder.keys") == most
        assert local_fraction(here, "decoder", "decoder.queries") == few


def test_stand_ins_are_run_and_do_not_come_out():
    one = SequenceInfo(3, ("ids",), (), (BlockSequenceInfo("encoder", ((1,),), ((1,),)),))
    for rank, kept in ((0, Fraction(1, 3)), (1, Fraction(2, 3))):
        here = space(rank, one)
        assert (local_fraction(here, "encoder"), unpadded_fraction(here, "encoder")) == (Fraction(2, 3), kept)
        assert local_fractions_by_length(here) == ((Fraction(2, 3), kept),)


def test_all_tokens_without_sequence_sharding_or_analysis():
    alone = replace(space(0), sequence_sharding=None)
    assert local_fraction(alone, "decoder") == local_token_fraction(alone) == 1
    assert (
        local_token_fraction(space(0, None)),
        local_fractions_by_length(space(0, None)),
        local_fraction(space(0, None), "encoder"),
    ) == (1, (), 1)
