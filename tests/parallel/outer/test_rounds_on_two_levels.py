"""Rounds within data centres and rounds between them: definition, order, bytes, refusals, resume."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.comm_volume import min_max_sent_nbytes
from meshwright.comm.collectives.group import World
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.report.terminal.memory_and_sent_bytes import rounds_text
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.messages import planned_messages
from meshwright.verifier.reference import run_reference
from meshwright.verifier.static_checks import static_checks
from tests.parallel.outer.site_plans import (
    ADAMW,
    ANALYZED,
    SPLIT_SHARDS,
    is_equal,
    samples_of,
    trained,
)
from tests.tiny_model import case_of, edited, executor_of, tiny_job, verdict_of

BATCH = 24  # three samples for each of two data-parallel ranks in each of four sites
NEAR = mw.LocalSGD("site", sync_every=2)
FAR = mw.LocalSGD(sync_every=4)
WITHIN: dict[str, tuple[dict[str, int], tuple[Strategy, ...], int]] = {
    "one rank each": ({}, (), 2),
    "zero 3": ({"dp_shard": 2}, (SPLIT_SHARDS, mw.ZeRO(stage=3)), 1),
    "stages": ({"pp": 2}, (mw.Pipeline(),), 1),
}


def two_levels(inner: str, *rounds: Strategy, outer: int = 2, site: int = 3, **job: object) -> Plan:
    """The plan of an arrangement inside each of the sites of data centres."""
    sizes, strategies, micro_batch = WITHIN[inner]
    mesh = mw.Mesh(outer=outer, site=site, **sizes)
    return mw.make_plan(ANALYZED, tiny_job(BATCH, **job), mesh, (*strategies, *rounds), micro_batch)


@pytest.mark.parametrize(
    ("inner", "rounds", "sizes"),
    [
        ("one rank each", (NEAR, FAR), (2, 3)),
        ("one rank each", (NEAR, FAR), (3, 2)),
        ("zero 3", (NEAR, mw.DiLoCo(sync_every=4)), (2, 2)),
        ("stages", (mw.LocalSGD("site", sync_every=1), mw.DiLoCo(sync_every=2)), (2, 2)),
        ("one rank each", (NEAR, mw.DiLoCo(sync_every=4), mw.Int4Compression(axis="outer")), (2, 2)),
    ],
)
def test_every_rank_equals_the_definition_in_every_step(
    inner: str, rounds: tuple[Strategy, ...], sizes: tuple[int, int]
):
    plan = two_levels(inner, *rounds, outer=sizes[0], site=sizes[1])
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(ANALYZED, plan), 2 * plan.program.period.num_steps + 1)
    assert verdict.passed, verdict


def test_sites_agree_within_a_centre_before_all_do():
    plan = two_levels("one rank each", NEAR, FAR)
    sites = run_reference(case_of(ANALYZED, plan), 4).sites
    weights = [[site.steps[step].parameters["head.weight"] for site in sites] for step in range(4)]
    assert not torch.equal(weights[0][0], weights[0][1])
    assert torch.equal(weights[1][0], weights[1][2])
    assert torch.equal(weights[1][3], weights[1][5])
    assert not torch.equal(weights[1][0], weights[1][3])
    assert all(torch.equal(weights[3][0], each) for each in weights[3])


def test_short_rounds_as_long_as_long_ones_are_local_sgd_of_all_sites():
    flat = mw.make_plan(ANALYZED, tiny_job(BATCH), mw.Mesh(outer=6), (FAR,), 2)
    both = two_levels("one rank each", mw.LocalSGD("site", sync_every=4), FAR)
    ends = [run_reference(case_of(ANALYZED, plan), 4).sites[0].steps[-1].parameters for plan in (flat, both)]
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-12, atol=1e-14)


class SendsNothing(mw.LocalSGD):
    """Keeps its own parameters."""

    def end_round(self, name, mean, kept):
        mean.zero_()


@pytest.mark.parametrize(
    ("faulty", "step"),
    [((SendsNothing("site", sync_every=2), FAR), 1), ((NEAR, SendsNothing(sync_every=4)), 3)],
)
def test_a_wrong_mean_of_either_level_is_noticed_in_the_step_that_ends_its_round(
    faulty: tuple[Strategy, ...], step: int
):
    plan = two_levels("one rank each", *faulty)
    verdict = verdict_of(case_of(ANALYZED, plan), 8)
    assert not verdict.passed
    assert (verdict.first_difference.step, verdict.first_difference.quantity) == (step, "parameter")


def faults(change: Callable[[Action], Action]) -> list[str]:
    """What static checks find in a program whose actions have been changed."""
    plan = edited(two_levels("one rank each", NEAR, FAR), lambda actions: [change(each) for each in actions])
    return [each.problem for each in static_checks(plan)]


def test_levels_in_a_wrong_order_or_at_other_steps_are_found_before_a_run():
    def early(action: Action) -> Action:
        if action.kind not in ("PACK_ROUND", "AVERAGE"):
            return action
        return replace(action, waits=tuple(each for each in action.waits if "SITE" not in each))

    def uneven(action: Action) -> Action:
        period = replace(NEAR.period(tiny_job()), num_steps=3)
        return replace(action, period=period) if action.kind.endswith("_SITE") else action

    assert any("before AVERAGE_SITE" in each for each in faults(early))
    assert any("step 4 ends a round of all sites, and none of 3 steps" in each for each in faults(uneven))


@pytest.mark.parametrize("inner", ["one rank each", "zero 3"])
def test_links_between_centres_carry_one_copy_and_nothing_between_rounds(inner: str):
    plan = two_levels(inner, NEAR, FAR)
    rank = plan.for_rank(0)
    padded = sum(
        8 * (flat.shard_numel if (flat := rank.view.flat_param_specs.get(group.name)) else group.numel)
        for group in rank.view.param_groups
    )

    def sent(step: int, axis: str) -> float:
        actions = (action for action in rank.actions if action.runs_in(step) and action.tensors)
        moves = (move for action in actions for move in action.transfers if move.axes == (axis,))
        return sum(min_max_sent_nbytes(move, plan.mesh)[1] for move in moves)

    assert [sent(step, "outer") for step in range(4)] == [0, 0, 0, pytest.approx(2 * 1 / 2 * padded)]
    assert [sent(step, "site") for step in range(3)] == [0, pytest.approx(2 * 2 / 3 * padded), 0]
    assert sent(3, "site") == sent(1, "site")

    def body(world: World) -> list[list[str]]:
        world.ledger.is_recording = True
        executor, found = executor_of(ANALYZED, plan, world), []
        for step in range(4):
            world.ledger.entries.clear()
            executor.step(samples_of(plan, world.rank, step))
            found.append([e.action for e in world.ledger.entries if {"outer", "site"} & set(e.axes)])
        executor.close()
        return found

    for number, steps in enumerate(run_on_threads(body, plan.mesh)):
        for step, issued in enumerate(steps):
            planned = planned_messages(plan.for_rank(number), step=step)
            assert issued == [e.action for e in planned if {"outer", "site"} & set(e.axes)]
        assert not steps[0]
        assert all(each.startswith("AVERAGE_SITE") for each in steps[1])
    assert rounds_text(plan)["rounds over site"].startswith("3 of these sites meet every 2 steps")


def test_a_round_of_all_sites_tells_of_all_and_a_short_one_of_none():
    plan = two_levels("one rank each", NEAR, FAR)

    def body(world: World) -> list[mw.Metrics]:
        executor = executor_of(ANALYZED, plan, world)
        found = [
            executor.step(samples_of(plan, world.rank, step), stop=world.rank == 5 and not step)
            for step in range(4)
        ]
        executor.close()
        return found

    ranks = run_on_threads(body, plan.mesh)
    assert all([each.round is None for each in steps] == [True, True, True, False] for steps in ranks)
    assert all([each.stop_requested for each in steps] == [False, False, False, True] for steps in ranks)
    assert {steps[3].round.tokens for steps in ranks} == {sum(e.tokens for steps in ranks for e in steps)}


def test_a_run_resumes_between_a_short_and_a_long_round_bit_for_bit(tmp_path: Path):
    rounds = mw.LocalSGD("site", sync_every=2, optimizer_states="mean"), mw.DiLoCo(sync_every=4)
    plan = two_levels("zero 3", *rounds, site=2, optimizer=ADAMW)
    straight = trained(plan, tmp_path, range(6), lambda done: done in (2, 3, 4))
    for step in (2, 3, 4):
        assert is_equal(trained(plan, tmp_path, range(step, 6)), straight), step
    flat = mw.make_plan(ANALYZED, tiny_job(optimizer=ADAMW), mw.Mesh(outer=2), (mw.DiLoCo(sync_every=4),))
    assert len(trained(flat, tmp_path, range(4, 5))) == 2
    with pytest.raises(PlanError, match=r"middle of a round of 4 sites"):
        trained(flat, tmp_path, range(3, 4))


@pytest.mark.parametrize(
    ("rounds", "told", "fix"),
    [
        ((FAR, NEAR), "rounds over site are within those over outer", "list local_sgd over site first"),
        ((FAR,), "mesh.site is 3, and nothing averages these sites", 'local_sgd with axis = "site"'),
        ((NEAR, mw.LocalSGD(sync_every=5)), "step 5 ends a round of 5 steps over outer", "multiple of 2"),
        (
            (mw.LocalSGD("site", sync_every=2), mw.LocalSGD(sync_every=4, warmup_steps=1)),
            "step 1 ends a round",
            "",
        ),
        ((mw.DiLoCo("site", sync_every=2), FAR), "within those of diloco over site", "local_sgd with axis"),
        ((NEAR, mw.LocalSGD("site", sync_every=4), FAR), "listed twice", "keep one"),
    ],
)
def test_levels_that_do_not_fit_are_refused_with_a_repair(rounds: tuple[Strategy, ...], told: str, fix: str):
    with pytest.raises(PlanError, match=told) as refused:
        two_levels("one rank each", *rounds)
    assert any(fix in each.fix for each in refused.value.diagnostics)


def test_sites_of_one_data_centre_are_refused_with_a_repair():
    with pytest.raises(PlanError, match=r"mesh\.outer is 1") as refused:
        two_levels("one rank each", NEAR, outer=1)
    assert refused.value.diagnostics[0].fix == 'set mesh.outer = 3, mesh.site = 1 and axis = "outer"'
