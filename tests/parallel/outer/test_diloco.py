"""DiLoCo equals its definition under any plan inside a site; its outer state is cut, counted and saved."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.reference import run_reference
from tests.parallel.outer.site_plans import (
    ADAMW,
    ANALYZED,
    INNER,
    check_plan,
    is_equal,
    samples_of,
    site_plan,
    trained,
)
from tests.tiny_model import case_of, edited, executor_of, plan_of, tiny_job, token_samples, verdict_of

ROUNDS = mw.DiLoCo(sync_every=2)
NUMEL = sum(param.numel for param in ANALYZED.model_spec.trainable)


@pytest.mark.parametrize("inner", ["one rank each", "ddp", "zero 2", "zero 3", "stages and shards", "slices"])
def test_every_rank_equals_the_definition_in_every_step(inner: str):
    check_plan(inner, ROUNDS)


def test_a_rate_of_one_without_momentum_after_every_step_is_data_parallelism():
    data, train = token_samples(uneven=False), mw.TrainConfig(steps=20, batch=12, clip=0.0)
    rounds = mw.DiLoCo(sync_every=1, outer_lr=1.0, outer_momentum=0.0)
    plan = mw.make_plan(ANALYZED, tiny_job(train=train), mw.Mesh(outer=3), (rounds,))
    verdict = verdict_of(case_of(ANALYZED, plan, data), 3)
    assert verdict.passed, verdict
    apart = run_reference(case_of(ANALYZED, plan, data), 4).sites[1].steps[-1].parameters
    parallel = plan_of(ANALYZED, 3, job=tiny_job(train=train))
    together = run_reference(case_of(ANALYZED, parallel, data), 4).steps[-1].parameters
    for name, value in together.items():
        torch.testing.assert_close(apart[name], value, rtol=1e-12, atol=1e-14)


class WrongSign(mw.DiLoCo):
    """Steps away from where the sites went."""

    def end_round(self, name, mean, kept):
        mean.neg_()
        super().end_round(name, mean, kept)


class NoMomentum(mw.DiLoCo):
    """Forgets the outer momentum after each round."""

    def end_round(self, name, mean, kept):
        super().end_round(name, mean, kept)
        kept[f"momentum/{name}"].zero_()


class PlainMomentum(mw.DiLoCo):
    """Steps along the momentum alone: not Nesterov."""

    def end_round(self, name, mean, kept):
        start, momentum = kept[f"start/{name}"].view(-1), kept[f"momentum/{name}"].view(-1)
        momentum.mul_(self.outer_momentum).add_(mean)
        mean.copy_(start.sub_(momentum, alpha=self.outer_lr))


class MovesStart(mw.DiLoCo):
    """Goes on with the outer weights and keeps those of the round before."""

    def end_round(self, name, mean, kept):
        before = kept[f"start/{name}"].clone()
        super().end_round(name, mean, kept)
        kept[f"start/{name}"].copy_(before)


@pytest.mark.parametrize(
    ("fault", "step"), [(WrongSign, 1), (NoMomentum, 3), (PlainMomentum, 1), (MovesStart, 3)]
)
def test_a_wrong_outer_step_is_noticed_in_the_round_that_shows_it(fault: type[mw.DiLoCo], step: int):
    analyzed, plan = site_plan("one rank each", fault(sync_every=2))
    verdict = verdict_of(case_of(analyzed, plan), 4)
    assert not verdict.passed
    assert (verdict.first_difference.step, verdict.first_difference.quantity) == (step, "parameter")


def test_a_count_over_all_sites_is_noticed():
    analyzed, plan = site_plan("ddp", ROUNDS)

    def counts_globally(actions):
        return [
            replace(each, transfer=replace(each.transfer, axes=("outer", *each.transfer.axes)))
            if each.kind == "TOKEN_COUNT"
            else each
            for each in actions
        ]

    verdict = verdict_of(case_of(analyzed, edited(plan, counts_globally)), 2)
    assert not verdict.passed
    assert verdict.first_difference.quantity in ("gradient", "loss")


@pytest.mark.parametrize(("inner", "share"), [("one rank each", 1), ("zero 3", 2)])
def test_the_outer_state_takes_8_bytes_per_parameter_in_the_shards_of_a_site(inner: str, share: int):
    precision = mw.PrecisionConfig()
    _, plan = site_plan(inner, ROUNDS, precision=precision)
    totals = sum(state_bytes(plan, rank).strategy_states - 32 for rank in range(share))
    assert totals == 8 * NUMEL


def resumed_plan(rounds: mw.Strategy) -> Plan:
    mesh, strategies, _ = INNER["zero 3"]
    return mw.make_plan(ANALYZED, tiny_job(optimizer=ADAMW), mesh, (*strategies, rounds), 1)


def test_a_run_resumes_in_the_middle_of_a_round_with_its_outer_state(tmp_path: Path):
    plan = resumed_plan(mw.DiLoCo(sync_every=3))
    straight = trained(plan, tmp_path, range(7), lambda done: done in (3, 4))
    for step in (3, 4):
        assert is_equal(trained(plan, tmp_path, range(step, 7)), straight), step


def test_an_outer_state_that_is_not_saved_is_noticed(tmp_path: Path):
    plan = resumed_plan(mw.DiLoCo(sync_every=3))
    straight = trained(plan, tmp_path, range(7), lambda done: done == 3)
    resumed = trained(plan, tmp_path, range(3, 7), leaves_out="state/diloco/momentum/")
    assert not is_equal(resumed, straight)


def test_rounds_begin_at_the_parameters_of_a_checkpoint_that_has_no_outer_state(tmp_path: Path):
    averaged, stepped = resumed_plan(mw.LocalSGD(sync_every=3)), resumed_plan(mw.DiLoCo(sync_every=3))
    trained(averaged, tmp_path, range(4), lambda done: done in (3, 4))
    after = trained(stepped, tmp_path, range(3, 3))
    own = trained(averaged, tmp_path, range(3, 3))
    for taken, saved in zip(after, own, strict=True):
        starts = {
            name.removeprefix("diloco/start/"): each for name, each in taken.items() if "/start/" in name
        }
        full = {name: saved[name].view(-1) for name in starts}
        assert any(each.numel() for each in starts.values())
        assert all(set(each.tolist()) <= set(full[name].tolist()) for name, each in starts.items())
    with pytest.raises(PlanError, match="has not where it began"):
        trained(stepped, tmp_path, range(4, 5))


def test_a_round_begins_at_parameters_that_were_given_to_the_ranks():
    _, plan = site_plan("one rank each", ROUNDS)

    def body(world: World) -> bool:
        executor = executor_of(ANALYZED, plan, world)
        executor.step(samples_of(plan, world.rank, 0))
        values = {name: torch.full_like(each, 0.5) for name, each in executor.gather_parameters().items()}
        executor.load_parameters({f"model/{name}": value for name, value in values.items()})
        starts = [
            tensor
            for key, tensor in executor.state.strategy_tensors.of("diloco").items()
            if key.startswith("start/")
        ]
        executor.close()
        assert len(starts) == len(ANALYZED.model_spec.trainable)
        return all((each == 0.5).all() for each in starts)

    assert all(run_on_threads(body, plan.mesh))
