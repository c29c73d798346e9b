"""A forward as it runs where tokens are dealt to ranks, on the only rank: what glue sees, what blocks run on, what has tokens."""

import pytest
import torch

from meshwright.model.sequence_parallel.sharded_activation import Apart
from meshwright.model.sequence_parallel.sharded_forward import OnlyRank
from meshwright.model.tensors.placeholder import Foreign, foreign
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.sequence_info import Attend, Passing, Tokens

LENGTH = 5
LAYER = Passing("layer", gives=((1,), ()))
KNOWN = Tokens(LENGTH, ("ids",), (), (LAYER,))
IDS = torch.arange(2 * 7).view(2, 7)


def test_glue_sees_tokens_of_which_a_block_runs_on_those_that_are_here():
    only = OnlyRank.of(KNOWN, {"ids": IDS})
    assert only is not None
    ids = only.apart(IDS, 1, 7)
    assert (type(ids), ids.shape) == (Apart, IDS.shape)
    (local, table), _ = only.enter("layer", ((ids, torch.zeros(3)), {}))
    assert local is ids.local
    assert type(table) is torch.Tensor
    hidden, aside = only.leave((torch.zeros(2, 7, 3), torch.zeros(4)))
    assert (type(hidden), hidden.along, type(aside)) == (Apart, 1, torch.Tensor)
    assert type(only.here(hidden)) is torch.Tensor


def test_of_rows_of_two_lengths_each_has_its_own():
    tokens = Tokens(5, ("ids", "more"), (), (LAYER, Passing("other", gives=((1,),), gives_of=(3,))), others=(("more", 3),))
    only = OnlyRank.of(tokens, {"ids": IDS, "more": IDS[:, :4]})
    assert only is not None
    only.enter("other", ((), {}))
    assert only.leave(torch.zeros(2, 4)).share.length == 4
    only.enter("layer", ((), {}))
    assert only.leave((torch.zeros(2, 7), torch.zeros(4)))[0].share.length == 7


def test_tokens_that_begin_within_are_as_many_as_are_taken_in():
    first = Passing("first", ((1,),), ((1,),), slots=("0.0",), takes_of=(17,), gives_of=(17,))
    only = OnlyRank.of(Tokens(17, (), (), (first,), (Attend("first", 1, 1, 2, 2, 17, 17),)), {"pixels": torch.zeros(2, 3, 8, 8)})
    assert only is not None
    only.enter("first", ((torch.zeros(2, 26, 2),), {}))
    assert [each.length for each in only.asked("first")] == [26, 26]
    assert only.leave(torch.zeros(2, 26, 2)).share.length == 26
    with pytest.raises(PlanError, match="there are 26"):
        only.enter("first", ((torch.zeros(2, 37, 2),), {}))


def test_which_call_of_attention_comes_says_whose_keys_are_looked_at():
    layer = Passing("layer", ((1,), (1,)), ((1,),), slots=("0.0", "0.1"), takes_of=(9, 13), gives_of=(9,))
    calls = (Attend("layer", 1, 1, 2, 2, 9, 9), Attend("layer", 1, 1, 2, 2, 9, 13))
    only = OnlyRank.of(Tokens(13, ("ids",), (), (layer,), calls), {"ids": torch.zeros(2, 12)})
    assert only is not None
    for _ in range(2):
        only.enter("layer", ((torch.zeros(2, 8, 2), only.apart(torch.zeros(2, 12, 2), 1, 12)), {}))
        asked = [only.asked("layer") for _ in range(2)]
        assert [(queries.length, keys.length) for queries, keys in asked] == [(8, 8), (8, 12)]
        with pytest.raises(PlanError, match="it calls attention 3 times, and in the trial run 2 times"):
            only.coming("layer")
        only.leave(torch.zeros(2, 8, 2))


def test_rows_that_were_as_long_as_each_other_must_be_so_again():
    with pytest.raises(PlanError, match="the rows hold ids 7, more 4 tokens"):
        OnlyRank.of(Tokens(5, ("ids", "more"), ()), {"ids": IDS, "more": IDS[:, :4]})


def test_a_block_of_which_nothing_is_known_is_refused():
    only = OnlyRank.of(KNOWN, {"ids": IDS})
    assert only is not None
    with pytest.raises(PlanError, match="the forward reaches 'layer#2', of which nothing is known"):
        only.enter("layer#2", ((), {}))


def test_there_is_none_where_a_block_needs_all_tokens():
    assert OnlyRank.of(None, {"ids": IDS}) is None
    mixing = Tokens(LENGTH, ("ids",), (), (Passing("layer", mixes="sums over tokens"),))
    assert OnlyRank.of(mixing, {"ids": IDS}) is None


class Told:
    """Stands for a run of a part: it says what it was asked."""

    def compute(self, func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
        return "told by the run"

    def unknown(self, what: str, name: str) -> Exception:
        return RuntimeError(f"{what} of {name}")


def test_what_glue_computes_of_tokens_and_of_another_part_s_value_the_run_of_the_part_says():
    only = OnlyRank.of(KNOWN, {"ids": IDS})
    assert only is not None
    mine = only.apart(torch.ones(2, 7), 1, 7)
    theirs = foreign("layer", Told(), (2, 7), torch.float32, torch.device("cpu"), needed=False)
    assert isinstance(theirs, Foreign)
    assert mine + theirs == "told by the run"
    assert theirs * mine == "told by the run"
