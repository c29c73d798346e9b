"""A forward as it runs where tokens are dealt to ranks, on the only rank: what glue sees, what blocks run on, what has tokens."""

import pytest
import torch

from meshwright.core.errors import PlanError
from meshwright.core.tokens import Passing, Tokens
from meshwright.model.apart import Apart
from meshwright.model.foreign import Foreign, foreign
from meshwright.model.only import OnlyRank

LENGTH = 5
LAYER = Passing("layer", gives=((1,), ()))
KNOWN = Tokens(LENGTH, ("ids",), (), (LAYER,))
IDS = torch.arange(2 * 7).view(2, 7)


def test_glue_sees_tokens_of_which_a_block_runs_on_those_that_are_here():
    only = OnlyRank.of(KNOWN, {"ids": IDS})
    assert only is not None
    ids = only.apart(IDS, 1)
    assert (type(ids), ids.shape) == (Apart, IDS.shape)
    (local, table), _ = only.enter("layer", ((ids, torch.zeros(3)), {}))
    assert local is ids.local
    assert type(table) is torch.Tensor
    hidden, aside = only.leave((torch.zeros(2, 7, 3), torch.zeros(4)))
    assert (type(hidden), hidden.along, type(aside)) == (Apart, 1, torch.Tensor)
    assert type(only.here(hidden)) is torch.Tensor


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
    mine = only.apart(torch.ones(2, 7), 1)
    theirs = foreign("layer", Told(), (2, 7), torch.float32, torch.device("cpu"), needed=False)
    assert isinstance(theirs, Foreign)
    assert mine + theirs == "told by the run"
    assert theirs * mine == "told by the run"
