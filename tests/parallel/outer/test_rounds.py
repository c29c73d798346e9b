"""What holds for all rounds: bytes, memory, what a step tells, what is refused, and checkpoints."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.comm_volume import min_max_sent_nbytes
from meshwright.comm.collectives.group import World
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.run.checkpoint.distributed_checkpoint import load_tensors
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.messages import planned_messages
from meshwright.verifier.static_checks import static_checks
from tests.parallel.outer.site_plans import (
    ADAMW,
    ANALYZED,
    INNER,
    is_equal,
    samples_of,
    site_plan,
    trained,
)
from tests.tiny_model import case_of, executor_of, tiny_job, verdict_of

LOCAL = mw.LocalSGD(sync_every=3)
NUMEL = sum(param.numel for param in ANALYZED.model_spec.trainable)


@pytest.mark.parametrize(("inner", "share"), [("one rank each", 1), ("ddp", 1), ("zero 2", 3)])
def test_a_round_sends_2_k_1_k_n_over_the_sites_and_nothing_between(inner: str, share: int):
    _, plan = site_plan(inner, LOCAL)
    k, rank = plan.num_sites, plan.for_rank(0)

    def sent(step: int) -> float:
        actions = (action for action in rank.actions if action.runs_in(step))
        moves = (move for action in actions for move in action.transfers if "outer" in move.axes)
        return sum(min_max_sent_nbytes(move, plan.mesh)[1] for move in moves)

    padded = sum(
        8 * (flat.shard_numel if (flat := rank.view.flat_param_specs.get(group.name)) else group.numel)
        for group in rank.view.param_groups
    )
    assert padded == pytest.approx(8 * NUMEL / share, rel=0.05)
    assert sent(2) == pytest.approx(2 * (k - 1) / k * (padded + 40))
    assert sent(0) == sent(1) == sent(3) == 0
    assert sent(19) == sent(2), "the last step of the run ends a round"


@pytest.mark.parametrize("on_disk", [False, True])
def test_activations_may_leave_the_device_within_a_step(on_disk: bool, tmp_path: Path):
    leaving = mw.ActivationOffload(prefetch=0, folder=str(tmp_path) if on_disk else "")
    plan = mw.make_plan(ANALYZED, tiny_job(), mw.Mesh(outer=3), (leaving, LOCAL), 2)
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(ANALYZED, plan), 7)  # two rounds
    assert verdict.passed, verdict


def test_the_ledger_has_what_the_program_states_in_a_round_and_between():
    _, plan = site_plan("zero 2", LOCAL)

    def body(world: World) -> list[list[str]]:
        world.ledger.is_recording = True
        executor, found = executor_of(ANALYZED, plan, world), []
        for step in range(4):
            world.ledger.entries.clear()
            executor.step(samples_of(plan, world.rank, step))
            found.append([each.action for each in world.ledger.entries if "outer" in each.axes])
        executor.close()
        return found

    for steps in run_on_threads(body, plan.mesh):
        assert [len(each) for each in steps] == [0, 0, len(steps[2]), 0]
        assert steps[2] == [
            each.action for each in planned_messages(plan.for_rank(0), step=2) if "outer" in each.axes
        ]


@pytest.mark.parametrize("inner", ["one rank each", "zero 2"])
def test_a_rank_holds_what_the_plan_says(inner: str):
    _, plan = site_plan(inner, LOCAL, optimizer=ADAMW)

    def body(world: World) -> dict[str, int]:
        executor = executor_of(ANALYZED, plan, world)
        for step in range(3):
            executor.step(samples_of(plan, world.rank, step))
        found = executor.memory_by_category()
        executor.close()
        return found

    for rank, found in enumerate(run_on_threads(body, plan.mesh)):
        expected = state_bytes(plan, rank)
        assert found["buckets"] == expected.buffers
        assert found["strategy_states"] == expected.strategy_states == 32


def test_a_step_tells_of_its_site_and_the_end_of_a_round_of_all():
    _, plan = site_plan("ddp", LOCAL)

    def body(world: World) -> list[mw.Metrics]:
        executor = executor_of(ANALYZED, plan, world)
        stops = world.rank == 5  # a rank of the last site wishes to stop in the first step
        found = [
            executor.step(samples_of(plan, world.rank, step), stop=stops and not step) for step in range(4)
        ]
        executor.close()
        return found

    ranks = run_on_threads(body, plan.mesh)
    assert ranks[0] == ranks[1] != ranks[2] == ranks[3]
    for steps in ranks:
        assert [each.stop_requested for each in steps] == [False, False, True, False]
        assert [each.round is None for each in steps] == [True, True, False, True]
    rounds = {steps[2].round for steps in ranks}
    sites = [ranks[rank][:3] for rank in (0, 2, 4)]
    (told,) = rounds
    assert told.tokens == sum(each.tokens for steps in sites for each in steps)
    assert told.samples == 3 * 12
    weighted = sum(each.loss * each.tokens for steps in sites for each in steps)
    assert told.loss == pytest.approx(weighted / told.tokens, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"guard": mw.LossGuard(action="skip")}, "guard.action"),
        ({"train": mw.TrainConfig(steps=20, batch=12, noise_scale=True)}, "train.noise_scale"),
        ({"precision": mw.PrecisionConfig(compute="float16")}, "the loss scale of float16"),
        ({"evaluate": mw.EvalConfig(every=4, hold_out=12)}, "a multiple of 3"),
        ({"batch": 13}, "13 samples does not divide by 3 data-parallel ranks"),
    ],
)
def test_a_job_whose_decisions_are_of_all_ranks_is_refused_by_name(changes: dict, told: str):
    with pytest.raises(PlanError) as refused:
        mw.make_plan(ANALYZED, tiny_job(**changes), mw.Mesh(outer=3), (LOCAL,))
    assert told in str(refused.value)
    assert all(each.fix for each in refused.value.diagnostics)


@pytest.mark.parametrize(
    ("mesh", "strategies", "told"),
    [
        (mw.Mesh(dp_replicate=3), (mw.BatchSplit(), mw.DDP(), LOCAL), "mesh.outer is 1"),
        (mw.Mesh(outer=3), (LOCAL, mw.LocalSGD(sync_every=5)), "listed twice"),
        (mw.Mesh(outer=3), (mw.Offload(), LOCAL), "rest off the device"),
        (mw.Mesh(outer=3, pp=2), (mw.PipeDream(), LOCAL), "several updates old"),
        (
            mw.Mesh(outer=3, dp_replicate=2),
            (mw.BatchSplit(), mw.DDP(), mw.Int8Compression(), LOCAL),
            "remove compress",
        ),
        (
            mw.Mesh(outer=3, dp_replicate=2),
            (mw.BatchSplit(), mw.DataParallelMaster(), LOCAL),
            "one rank steps for all others",
        ),
    ],
)
def test_what_does_not_go_with_rounds_is_refused_by_name(mesh: mw.Mesh, strategies: tuple, told: str):
    with pytest.raises(PlanError) as refused:
        mw.make_plan(
            ANALYZED, tiny_job(train=mw.TrainConfig(steps=20, batch=12, clip=0.0)), mesh, strategies, 2
        )
    assert told in str(refused.value)
    assert all(each.fix for each in refused.value.diagnostics)


def resumed_plan(inner: str, sites: int) -> Plan:
    mesh, strategies, _ = INNER[inner]
    job = tiny_job(optimizer=ADAMW)
    return mw.make_plan(ANALYZED, job, replace(mesh, outer=sites), (*strategies, LOCAL), 1)


@pytest.mark.parametrize("inner", ["one rank each", "server", "zero 3"])
def test_a_run_resumes_in_the_middle_of_a_round_bit_for_bit(inner: str, tmp_path: Path):
    plan = resumed_plan(inner, 3)
    straight = trained(plan, tmp_path, range(7), lambda done: done in (2, 3, 4))
    assert is_equal(straight, straight)
    for step in (2, 3, 4):
        assert is_equal(trained(plan, tmp_path, range(step, 7)), straight), step


def test_other_sites_take_up_the_end_of_a_round_and_not_its_middle(tmp_path: Path):
    before = trained(resumed_plan("one rank each", 3), tmp_path, range(4), lambda done: done in (3, 4))
    assert not torch.equal(before[0]["head.weight"], before[1]["head.weight"])
    more, fewer = (resumed_plan("zero 3", sites) for sites in (6, 2))
    for plan in (more, fewer):
        taken = trained(plan, tmp_path, range(3, 3))
        assert all(torch.equal(each["head.weight"], taken[0]["head.weight"]) for each in taken)
        trained(plan, tmp_path, range(3, 5))
        with pytest.raises(PlanError, match=r"middle of a round of 3 sites(?s:.*)mesh.outer = 3"):
            trained(plan, tmp_path, range(4, 5))
    alone = mw.make_plan(ANALYZED, tiny_job(optimizer=ADAMW), mw.Mesh(), ())
    trained(alone, tmp_path, range(3, 4))
    with pytest.raises(PlanError, match="the plan has 1"):
        trained(alone, tmp_path, range(4, 5))


def test_sites_that_differ_are_not_evaluated_and_keep_their_names_under_another_period(tmp_path: Path):
    _, plan = site_plan("one rank each", LOCAL)
    _, other = site_plan("one rank each", mw.LocalSGD(sync_every=1))
    trained(plan, tmp_path, range(1), lambda done: done == 1)

    def body(world: World) -> list[str]:
        executor = executor_of(ANALYZED, other, world)
        executor.load_state_dict(load_tensors(tmp_path / "step-00000001")[0], 1)
        with pytest.raises(PlanError, match="evaluate in the middle of a round") as refusal:
            executor.evaluate([samples_of(other, world.rank, 1)])
        assert "step that ends a round" in refusal.value.diagnostics[0].fix
        own = list(executor.state_dict())
        executor.step(samples_of(other, world.rank, 1))
        assert executor.evaluate([samples_of(other, world.rank, 1)]).loss > 0
        shared = list(executor.state_dict())
        executor.close()
        return [name for name in own if "model/" in name] + [name for name in shared if "model/" in name]

    first, second, third = run_on_threads(body, other.mesh)
    assert first[: len(first) // 2] == first[len(first) // 2 :] == second[len(second) // 2 :]
    assert second[: len(second) // 2] == [f"site.1/{name}" for name in first[: len(first) // 2]]
    assert len(third) == len(first)


def test_evaluations_that_no_multiple_of_a_round_allows_have_a_repair_that_does():
    rounds, evaluate = mw.LocalSGD(sync_every=4, warmup_steps=2), mw.EvalConfig(every=8, hold_out=2)
    with pytest.raises(PlanError, match="multiple of 4, and warmup_steps too"):
        site_plan("one rank each", rounds, evaluate=evaluate)
    site_plan("one rank each", mw.LocalSGD(sync_every=4, warmup_steps=4), evaluate=evaluate)
