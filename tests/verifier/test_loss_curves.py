"""A gap beside the spread of seeds: each outcome, its words, and what is refused before training."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.plan.job.job import EvalConfig
from meshwright.verifier.loss_curves import (
    OUTCOMES,
    CurveVerdict,
    LossCurve,
    curve_diagnostics,
    default_steps,
    exact_counterparts,
    mean_over_sites,
    one_site,
)
from tests.parallel.compression.coded_plans import coded_plan
from tests.tiny_model import analyzed_model, plan_of, tiny_job


def verdict_of(
    exact: Sequence[float], lossy: Sequence[float], first: float = 5.0, *, held_out: bool = True
) -> CurveVerdict:
    """The verdict on runs that end with these losses."""
    curves = []
    for seed, pair in enumerate(zip(exact, lossy, strict=True)):
        for is_exact, last in zip((True, False), pair, strict=True):
            losses = (first,) * 10 + (last,) * 10
            curves.append(LossCurve(seed, is_exact, losses, (first, last) if held_out else None))
    return CurveVerdict("p", "e", "dp_replicate 2", "tiny", "threads", ("int8",), 20, tuple(curves))


@pytest.mark.parametrize(
    ("exact", "lossy", "outcome", "told"),
    [
        ((2.0, 2.1, 1.9), (2.05, 2.12, 1.95), "within", "2.00% above the exact one in the mean"),
        ((2.0, 2.1, 1.9), (1.9, 2.0, 1.8), "within", "5.00% below the exact one in the mean"),
        ((2.0, 2.1, 1.9), (2.3, 2.4, 2.2), "behind", "15.00% above the exact one in the mean, and seeds"),
        ((2.0, 2.1, 1.9), (2.0, nan, inf), "diverged", "not finite with seed 1, 2"),
        ((2.0, nan, 1.9), (2.0, 2.0, 2.0), "untold", "the exact runs diverge"),
        ((2.0, 2.0, 2.0), (2.0, 2.0, 2.0), "untold", "the exact runs of all seeds are equal"),
        ((4.95, 5.0, 4.9), (4.95, 5.0, 4.9), "untold", "has fallen by 1.01% in 20 steps, and seeds alone"),
    ],
)
def test_the_outcome_follows_from_the_gap_and_the_spread(exact, lossy, outcome, told, tmp_path: Path):
    verdict = verdict_of(exact, lossy)
    assert (verdict.outcome, verdict.passed) == (outcome, outcome == "within")
    assert told in verdict.reason
    assert str(verdict) == f"dp_replicate 2 {OUTCOMES[outcome]}: {verdict.reason}"
    verdict.write(tmp_path / "curve.json")
    document = json.loads((tmp_path / "curve.json").read_text())
    assert (document["outcome"], document["passed"], len(document["curves"])) == (outcome, verdict.passed, 6)


def test_every_seed_counts_and_a_gap_as_large_as_the_spread_is_within_it():
    exact = (2.0, 2.1, 1.9)
    verdict = verdict_of(exact, [loss + 0.2 for loss in exact])
    assert verdict.gap == pytest.approx(0.1)
    assert verdict.gaps == pytest.approx([0.1] * 3)
    assert verdict.spread == pytest.approx(0.1)
    assert verdict_of(exact, (2.0, 2.1, 2.6)).outcome == "behind"
    assert verdict_of(exact, (2.0, 2.1, 2.4)).outcome == "within"


def test_without_held_out_samples_the_last_tenth_of_the_steps_counts():
    curve = LossCurve(0, True, (9.0, 8.0, *[5.0] * 16, 3.0, 2.0))
    assert (curve.first, curve.last) == (8.5, 2.5)
    assert LossCurve(0, True, (3.0, 1.0)).last == 1.0
    assert "the loss of the last tenth" in verdict_of((2.0, 2.1, 1.9), (2.0, 2.1, 1.9), held_out=False).reason


def test_the_exact_counterpart_leaves_codecs_out_and_replaces_what_a_plan_needs():
    kept = mw.BatchSplit(), mw.DDP()
    assert exact_counterparts((*kept, Int8Compression())) == kept
    delayed = mw.Offload(step_on="host", delay=1)
    assert exact_counterparts((*kept, delayed)) == (*kept, replace(delayed, delay=0))
    assert exact_counterparts((mw.PipeDream(split_points=("layers.1",)),)) == (
        mw.Pipeline(split_points=("layers.1",)),
    )


def test_sites_are_compared_with_one_that_has_all_samples():
    inside = mw.BatchSplit("dp_shard"), mw.ZeRO()
    strategies = *inside, mw.DiLoCo(sync_every=4)
    sites = mw.make_plan(analyzed_model(), tiny_job(), mw.Mesh(outer=3, dp_shard=2), strategies)
    assert one_site(sites.mesh) == mw.Mesh(dp_shard=2)
    assert exact_counterparts(sites.strategies) == inside
    assert default_steps(sites) == 20
    by_rank = [((1.0, 2.0), None), ((1.0, 2.0), None), ((2.0, 4.0), None), ((2.0, 4.0), None)]
    by_rank += [((6.0, 0.0), None)] * 2
    assert mean_over_sites(sites, by_rank) == ((3.0, 2.0), None)


@pytest.mark.parametrize(
    ("every", "steps", "found"), [(7, 20, 20), (7, 300, 98), (200, 300, 200), (1, 50, 50)]
)
def test_curves_of_rounds_end_with_one(every: int, steps: int, found: int):
    job = tiny_job(train=mw.TrainConfig(steps=steps, batch=12), evaluate=EvalConfig(every=0))
    sites = mw.make_plan(analyzed_model(), job, mw.Mesh(outer=2), (mw.LocalSGD(sync_every=every),))
    assert default_steps(sites) == found


def refusals(plan: mw.Plan, num_steps: int = 15, available: int | None = None) -> list[tuple[str, str]]:
    return [(each.problem, each.fix) for each in curve_diagnostics(plan, num_steps, available)]


def test_what_shows_nothing_is_refused_with_a_repair():
    assert refusals(coded_plan(Int8Compression()), 15, 15) == []
    ((text, fix),) = refusals(plan_of(analyzed_model(), 3))
    assert "every strategy of the plan is exact (batch_split, ddp)" in text
    assert "leave out --curve" in fix
    plan = coded_plan(Int8Compression())
    assert refusals(plan, 9) == [("9 steps are no curve", "write --steps 10 or more")]
    assert plan.job.train.steps == tiny_job().train.steps == 20
    assert [fix for _, fix in refusals(plan, 21)] == ["write --steps 20, or a larger train.steps"]
    ((text, fix),) = refusals(plan, 15, 12)
    assert (text, fix.startswith("write --steps 12")) == ("the data end after 12 of 15 steps", True)
    sites = mw.make_plan(analyzed_model(), tiny_job(), mw.Mesh(outer=2), (mw.LocalSGD(sync_every=4),))
    ((text, fix),) = refusals(sites)
    assert "step 15 lies in the middle of a round" in text
    assert fix == "write --steps 16, which ends one"
    assert refusals(sites, 16) == []
    ((text, _),) = refusals(coded_plan(Int8Compression(exact_steps=15)))
    assert text == "the first 15 steps of the plan are exact, and 15 are compared"
