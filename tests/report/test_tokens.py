"""The plan says in words who has which tokens, and how evenly attention is dealt."""

from dataclasses import replace

import pytest

from meshwright.api import make_plan
from meshwright.core.job import Job, Train
from meshwright.core.mesh import Mesh
from meshwright.core.sources import DataSource, ModelSource
from meshwright.core.strategy import Strategy
from meshwright.core.tokens import Deal
from meshwright.report.tokens import busiest, token_words
from meshwright.strategies.data.replicate import Replicate
from meshwright.strategies.sequence.ring import Ring
from tests.strategies.tensor.llama import known

JOB = Job(ModelSource("llama"), DataSource("random", sequence=9), Train(batch=4))


def words(mesh: Mesh, *strategies: Strategy) -> dict[str, str]:
    return token_words(make_plan(known(), JOB, mesh, strategies))


def test_of_all_tokens_on_every_rank_nothing_is_said():
    assert words(Mesh()) == {}


def test_counts_and_balance_are_said():
    assert words(Mesh(cp=2), Ring(), Replicate(axis="cp"))["tokens"] == (
        "9 of each sample on 2 ranks: 4 to 5 each; causal attention: the busiest rank has 1.11 x the mean"
    )


def test_what_glue_brings_together_is_said():
    plan = make_plan(known(), JOB, Mesh(cp=2), (Ring(), Replicate(axis="cp")))
    anatomy = replace(plan.anatomy, tokens=replace(plan.anatomy.tokens, met=(("model.norm", 432),)))
    told = token_words(replace(plan, space=replace(plan.space, whole=replace(plan.space.whole, anatomy=anatomy))))["tokens"]
    assert told.endswith(
        "; glue behind model.norm needs all tokens: 432 elements per sample are brought together, not counted below"
    )


@pytest.mark.parametrize(
    ("deal", "share"),
    [(Deal(4), 1.0), (Deal(4, folded=False), 1.75), (Deal(4, 4, folded=False), 1.0), (Deal(6, 2), 1.0)],
    ids=str,
)
def test_folded_chunks_are_even_and_straight_ones_are_not(deal: Deal, share: float):
    assert busiest(deal, 4080) == pytest.approx(share, abs=1e-3)
