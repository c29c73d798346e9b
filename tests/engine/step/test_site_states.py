"""Names of what sites save: their own optimizer states, and in the middle of a round their parameters."""

import pytest
import torch

import meshwright as mw
from meshwright.engine.optim.sharded_state_dict import TensorShard
from meshwright.engine.step.site_states import (
    is_in_round,
    num_saved_sites,
    site_state_dict,
    state_of_site,
)
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import RankPlan
from tests.tiny_model import analyzed_model, tiny_job

STATE = {
    "model/w": torch.ones(2),
    "buffer/b": torch.zeros(1),
    "optimizer/exp_avg/w": TensorShard(torch.ones(1), 1, (2,)),
    "state/local_sgd/totals": torch.zeros(4),
}


def rank_plan(rank: int, sites: int, rounds: mw.Strategy | None = None) -> RankPlan:
    strategies = (rounds or mw.LocalSGD(sync_every=3),) if sites > 1 else ()
    return mw.make_plan(analyzed_model(), tiny_job(), mw.Mesh(outer=sites), strategies).for_rank(rank)


def saved_by(sites: int, *, in_round: bool) -> dict[str, torch.Tensor]:
    """What all sites save; a value says which site it is of."""
    found = {}
    for rank in range(sites):
        for name, value in site_state_dict(rank_plan(rank, sites), STATE, in_round=in_round).items():
            found[name] = torch.full((2,), float(rank)) if name not in found else found[name]
            assert isinstance(value, TensorShard) or name.startswith("state/") or not in_round
    return found


def test_the_end_of_a_round_has_one_model_and_the_optimizer_states_of_each_site():
    saved = saved_by(3, in_round=False)
    assert sorted(saved) == [
        *("buffer/b", "model/w", "optimizer/exp_avg/w"),
        *("site.1/optimizer/exp_avg/w", "site.2/optimizer/exp_avg/w", "state/local_sgd/totals"),
    ]
    assert not is_in_round(saved)
    assert num_saved_sites(saved) == 3
    for sites in (2, 3, 4):
        for rank in range(sites):
            own = state_of_site(rank_plan(rank, sites), saved)
            assert sorted(own) == sorted(STATE)
            assert own["optimizer/exp_avg/w"][0] == rank % 3
            assert own["model/w"][0] == 0


def test_the_middle_of_a_round_has_the_model_of_each_site_and_belongs_to_as_many():
    saved = saved_by(2, in_round=True)
    assert "site.1/model/w" in saved
    assert "site.1/state/local_sgd/totals" not in saved
    assert is_in_round(saved)
    assert state_of_site(rank_plan(1, 2), saved)["model/w"][0] == 1
    for sites in (1, 3):
        with pytest.raises(PlanError, match=r"round of 2 sites(?s:.*)mesh.outer = 2"):
            state_of_site(rank_plan(0, sites), saved)
    with pytest.raises(PlanError, match=r"where it began(?s:.*)repair: resume it with the strategies"):
        state_of_site(rank_plan(0, 2, mw.DiLoCo(sync_every=3)), saved)


def test_without_sites_nothing_is_renamed():
    assert site_state_dict(rank_plan(0, 1), STATE, in_round=False) == STATE
    saved = {"model/w": torch.ones(2)}
    assert state_of_site(rank_plan(0, 1), saved) is saved
