"""The forward of a sequence-sharded model on a single rank: what glue sees, which tokens blocks run on, and
which calls have tokens.
"""

import pytest
import torch

from meshwright.model.context_parallel.block_input_sharding import SingleRankForward
from meshwright.model.context_parallel.sharded_activation import SequenceShardedTensor
from meshwright.model.tensors.placeholder import PlaceholderTensor, make_placeholder
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.sequence_info import AttentionSpec, BlockSequenceInfo, SequenceInfo

LENGTH = 5
LAYER = BlockSequenceInfo("layer", output_token_dims=((1,), ()))
KNOWN = SequenceInfo(LENGTH, ("ids",), (), (LAYER,))
IDS = torch.arange(2 * 7).view(2, 7)


def test_glue_sees_all_tokens_and_blocks_run_on_the_local_ones():
    only = SingleRankForward.for_inputs(KNOWN, {"ids": IDS})
    assert only is not None
    ids = only.wrap_local(IDS, 1, 7)
    assert (type(ids), ids.shape) == (SequenceShardedTensor, IDS.shape)
    (local, table), _ = only.enter_block("layer", ((ids, torch.zeros(3)), {}))
    assert local is ids.local_tensor
    assert type(table) is torch.Tensor
    hidden, aside = only.leave_block((torch.zeros(2, 7, 3), torch.zeros(4)))
    assert (type(hidden), hidden.sequence_dim, type(aside)) == (SequenceShardedTensor, 1, torch.Tensor)
    assert type(only.local_outputs(hidden)) is torch.Tensor


def test_sequences_of_two_lengths_have_their_own_shards():
    tokens = SequenceInfo(
        5,
        ("ids", "more"),
        (),
        (LAYER, BlockSequenceInfo("other", output_token_dims=((1,),), output_num_tokens=(3,))),
        other_lengths=(("more", 3),),
    )
    only = SingleRankForward.for_inputs(tokens, {"ids": IDS, "more": IDS[:, :4]})
    assert only is not None
    only.enter_block("other", ((), {}))
    assert only.leave_block(torch.zeros(2, 4)).token_shard.length == 4
    only.enter_block("layer", ((), {}))
    assert only.leave_block((torch.zeros(2, 7), torch.zeros(4)))[0].token_shard.length == 7


def test_tokens_created_inside_the_model_are_counted_at_the_block_input():
    first = BlockSequenceInfo(
        "first", ((1,),), ((1,),), arg_paths=("0.0",), input_num_tokens=(17,), output_num_tokens=(17,)
    )
    only = SingleRankForward.for_inputs(
        SequenceInfo(17, (), (), (first,), (AttentionSpec("first", 1, 1, 2, 2, 17, 17),)),
        {"pixels": torch.zeros(2, 3, 8, 8)},
    )
    assert only is not None
    only.enter_block("first", ((torch.zeros(2, 26, 2),), {}))
    assert [each.length for each in only.take_attention_shards("first")] == [26, 26]
    assert only.leave_block(torch.zeros(2, 26, 2)).token_shard.length == 26
    with pytest.raises(PlanError, match="there are 26"):
        only.enter_block("first", ((torch.zeros(2, 37, 2),), {}))


def test_the_index_of_an_attention_call_decides_whose_keys_are_used():
    layer = BlockSequenceInfo(
        "layer",
        ((1,), (1,)),
        ((1,),),
        arg_paths=("0.0", "0.1"),
        input_num_tokens=(9, 13),
        output_num_tokens=(9,),
    )
    calls = (AttentionSpec("layer", 1, 1, 2, 2, 9, 9), AttentionSpec("layer", 1, 1, 2, 2, 9, 13))
    only = SingleRankForward.for_inputs(
        SequenceInfo(13, ("ids",), (), (layer,), calls), {"ids": torch.zeros(2, 12)}
    )
    assert only is not None
    for _ in range(2):
        only.enter_block("layer", ((torch.zeros(2, 8, 2), only.wrap_local(torch.zeros(2, 12, 2), 1, 12)), {}))
        asked = [only.take_attention_shards("layer") for _ in range(2)]
        assert [(queries.length, keys.length) for queries, keys in asked] == [(8, 8), (8, 12)]
        with pytest.raises(PlanError, match="it calls attention 3 times, and in the trial 2 times"):
            only.next_attention_shards("layer")
        only.leave_block(torch.zeros(2, 8, 2))


def test_sequences_of_equal_length_in_the_trial_must_stay_equal():
    with pytest.raises(PlanError, match="the sequences have ids 7, more 4 tokens"):
        SingleRankForward.for_inputs(SequenceInfo(5, ("ids", "more"), ()), {"ids": IDS, "more": IDS[:, :4]})


def test_a_block_without_sequence_info_is_refused():
    only = SingleRankForward.for_inputs(KNOWN, {"ids": IDS})
    assert only is not None
    with pytest.raises(PlanError, match="the forward reaches 'layer#2', which the plan does not contain"):
        only.enter_block("layer#2", ((), {}))


def test_there_is_no_sharded_forward_where_a_block_needs_all_tokens():
    assert SingleRankForward.for_inputs(None, {"ids": IDS}) is None
    mixing = SequenceInfo(
        LENGTH, ("ids",), (), (BlockSequenceInfo("layer", not_sequence_parallel="sums over tokens"),)
    )
    assert SingleRankForward.for_inputs(mixing, {"ids": IDS}) is None


class Told:
    """Stands for a run of a part: it says what it was asked."""

    def compute(self, func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
        return "told by the run"

    def unknown(self, what: str, name: str) -> Exception:
        return RuntimeError(f"{what} of {name}")


def test_glue_on_tokens_and_on_values_of_another_stage_is_passed_to_the_stage_run():
    only = SingleRankForward.for_inputs(KNOWN, {"ids": IDS})
    assert only is not None
    mine = only.wrap_local(torch.ones(2, 7), 1, 7)
    theirs = make_placeholder("layer", Told(), (2, 7), torch.float32, torch.device("cpu"), needs_grad=False)
    assert isinstance(theirs, PlaceholderTensor)
    assert mine + theirs == "told by the run"
    assert theirs * mine == "told by the run"
