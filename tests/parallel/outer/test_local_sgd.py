"""Local SGD equals its definition under any plan inside a site, and data parallelism where it should."""

from dataclasses import replace

import pytest
import torch

import meshwright as mw
from meshwright.plan.job.errors import PlanError
from meshwright.plan.step.program import Action
from meshwright.verifier.reference import run_reference
from meshwright.verifier.static_checks import static_checks
from tests.parallel.outer.site_plans import ANALYZED, INNER, check_plan, site_plan
from tests.tiny_model import case_of, edited, plan_of, tiny_job, token_samples, verdict_of


@pytest.mark.parametrize("inner", INNER)
def test_every_rank_equals_the_definition_in_every_step(inner: str):
    check_plan(inner, mw.LocalSGD(sync_every=2))


def test_the_first_steps_are_rounds_of_one_step():
    rounds = mw.LocalSGD(sync_every=3, warmup_steps=2)
    period = rounds.period(tiny_job())
    assert [step + 1 for step in range(20) if period.ends_with(step)] == [1, 2, 5, 8, 11, 14, 17, 20]
    check_plan("ddp", rounds, steps=6)


def test_rounds_of_one_step_are_data_parallelism_where_sites_have_as_many_tokens():
    data = token_samples(uneven=False)
    job = tiny_job(train=mw.TrainConfig(steps=20, batch=12, clip=0.0))  # a clip would be one of each site
    plan = mw.make_plan(ANALYZED, job, mw.Mesh(outer=3), (mw.LocalSGD(sync_every=1),))
    parallel = plan_of(ANALYZED, 3, job=job)
    case = case_of(ANALYZED, plan, data)
    apart = run_reference(case, 4).sites[2].steps[-1].parameters
    together = run_reference(case_of(ANALYZED, parallel, data), 4).steps[-1].parameters
    for name, value in together.items():
        torch.testing.assert_close(apart[name], value, rtol=1e-12, atol=1e-14)


def planted_faults() -> dict[str, mw.LocalSGD]:
    class Sums(mw.LocalSGD):
        def end_round(self, name, mean, kept):
            mean.mul_(3)

    class LeavesOut(mw.LocalSGD):
        def end_round(self, name, mean, kept):
            if name.startswith("head"):
                mean.zero_()

    return {"a sum in place of a mean": Sums(sync_every=2), "a parameter is lost": LeavesOut(sync_every=2)}


@pytest.mark.parametrize("fault", ["a sum in place of a mean", "a parameter is lost"])
def test_a_wrong_mean_is_noticed_in_the_step_that_ends_the_round(fault: str):
    analyzed, plan = site_plan("one rank each", planted_faults()[fault])
    verdict = verdict_of(case_of(analyzed, plan), 4)
    assert not verdict.passed
    assert verdict.first_difference.quantity == "parameter"
    assert verdict.first_difference.step == 1


def test_an_average_that_comes_too_early_or_not_at_all_is_noticed():
    analyzed, plan = site_plan("ddp", mw.LocalSGD(sync_every=2))

    def without(kinds: tuple[str, ...]) -> mw.Plan:
        return edited(plan, lambda actions: [each for each in actions if each.kind not in kinds])

    round_kinds = ("PACK_ROUND", "AVERAGE", "END_ROUND")
    verdict = verdict_of(case_of(analyzed, without(round_kinds)), 4)
    assert not verdict.passed
    assert verdict.first_difference.quantity == "parameter"
    found = [each.problem for each in static_checks(without(round_kinds))]
    assert any("stays apart along outer" in each for each in found), found

    def early(actions: list[Action]) -> list[Action]:
        average = next(each for each in actions if each.kind == "AVERAGE")
        return [replace(each, waits=("CLIP()",)) if each is average else each for each in actions]

    assert any("before STEP" in each.problem for each in static_checks(edited(plan, early)))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"sync_every": 0}, "sync_every"),
        ({"sync_every": 21}, "rounds of 21 steps in a run of 20"),
        ({"warmup_steps": 21}, "21 warm-up steps in a run of 20"),
    ],
)
def test_rounds_that_cannot_be_are_refused_with_a_repair(fields: dict[str, int], told: str):
    with pytest.raises(PlanError) as refused:
        mw.make_plan(ANALYZED, tiny_job(), mw.Mesh(outer=3), (mw.LocalSGD(**fields),))
    assert told in str(refused.value)
    assert all(each.fix for each in refused.value.diagnostics)


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_the_samples_of_a_site_take_what_the_codes_of_their_activations_lost(micro_batch: int):
    strategies = mw.Pipeline(), mw.ActivationCompression(), mw.LocalSGD(sync_every=2)
    plan = mw.make_plan(ANALYZED, tiny_job(), mw.Mesh(outer=2, pp=2), strategies, micro_batch)
    verdict = verdict_of(case_of(ANALYZED, plan), 4)
    assert verdict.passed, verdict
