"""Streaming DiLoCo equals its definition; fragments meet at offsets; a save keeps what is under way."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.comm_volume import min_max_sent_nbytes
from meshwright.comm.collectives.group import World
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Period
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.report.terminal.memory_and_sent_bytes import rounds_text
from meshwright.run.checkpoint.distributed_checkpoint import load_tensors
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.messages import planned_messages
from meshwright.verifier.static_checks import static_checks
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
from tests.tiny_model import case_of, edited, executor_of, tiny_job, verdict_of

STREAMING = mw.StreamingDiLoCo(sync_every=2, fragments=2, delay=1, mixing=0.25)
INT4 = mw.Int4Compression(axis="outer")
NUMEL = sum(param.numel for param in ANALYZED.model_spec.trainable)


def short_run(steps: int) -> mw.TrainConfig:
    return mw.TrainConfig(steps=steps, batch=12, clip=0.5)


@pytest.mark.parametrize(
    ("inner", "rounds"),
    [
        ("one rank each", STREAMING),
        ("zero 2", STREAMING),
        ("ddp", mw.StreamingDiLoCo(sync_every=2, fragments=2)),
        ("zero 3", mw.StreamingDiLoCo(sync_every=3, fragments=3, delay=2, mixing=0.5)),
        ("stages and shards", STREAMING),
        ("slices", STREAMING),
        ("zero 1", mw.StreamingDiLoCo(sync_every=2, delay=1)),
    ],
)
def test_every_rank_equals_the_definition_in_every_step_to_the_last(inner: str, rounds: mw.StreamingDiLoCo):
    steps = 2 * rounds.sync_every + rounds.delay + 1
    check_plan(inner, rounds, steps, train=short_run(steps))


@pytest.mark.parametrize("codec", [INT4, mw.Int8Compression(axis="outer", error_feedback=False)])
def test_codes_may_carry_what_is_under_way(codec: mw.Strategy):
    mesh, inner, micro_batch = INNER["zero 2"]
    job = tiny_job(train=short_run(6))
    plan = mw.make_plan(ANALYZED, job, mesh, (*inner, STREAMING, codec), micro_batch)
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(ANALYZED, plan), 6)
    assert verdict.passed, verdict


def test_one_fragment_without_delay_is_diloco_action_for_action():
    for inner in ("zero 2", "stages"):
        plans = [site_plan(inner, each(sync_every=3))[1] for each in (mw.DiLoCo, mw.StreamingDiLoCo)]
        assert plans[0].program == plans[1].program
        assert plans[0].for_rank(0).states == plans[1].for_rank(0).states


def test_blocks_are_strided_over_fragments_that_meet_at_even_offsets():
    rounds = mw.StreamingDiLoCo(sync_every=6, fragments=3, delay=1)
    job, found = tiny_job(), dict[str, int]()
    for param in ANALYZED.model_spec.trainable:
        found[param.block_calls[0]] = rounds.fragment_of(param.name, ANALYZED.model_spec)
    assert found == {"embed": 0, "layers.0": 1, "layers.1": 2, "layers.2": 0, "head": 1}
    times = [
        [[step + 1 for step in range(20) if each.ends_with(step)] for each in rounds.periods(number, job)]
        for number in range(3)
    ]
    assert times == [
        [[2, 8, 14, 20], [3, 9, 15, 20]],
        [[4, 10, 16, 20], [5, 11, 17, 20]],
        [[6, 12, 18, 20], [7, 13, 19, 20]],
    ]


class OtherOrder(mw.StreamingDiLoCo):
    """Averages the fragments in the opposite order."""

    def fragment_of(self, name, model_spec):
        return self.fragments - 1 - super().fragment_of(name, model_spec)


class LateByOne(mw.StreamingDiLoCo):
    """Goes on with an average a step too late."""

    def periods(self, fragment, job):
        begins, ends = super().periods(fragment, job)
        return begins, replace(ends, offset=ends.offset + 1)


class MixesTwice(mw.StreamingDiLoCo):
    """Mixes into the outer weights themselves, and a second time into the parameters."""

    def end_round(self, name, mean, kept):
        before = kept[f"start/{name}"].clone().view(-1)
        super().end_round(name, mean, kept)
        kept[f"start/{name}"].view(-1).lerp_(before, self.mixing)
        mean.copy_(kept[f"start/{name}"].view(-1))


class TakesTheParameters(mw.StreamingDiLoCo):
    """Sends the parameters in place of the way that they went."""

    def begin_average(self, name, stepped, kept):
        return


@pytest.mark.parametrize(
    ("fault", "step"), [(OtherOrder, 2), (LateByOne, 2), (MixesTwice, 2), (TakesTheParameters, 2)]
)
def test_a_wrong_stream_is_noticed_in_the_step_that_shows_it(fault: type[mw.StreamingDiLoCo], step: int):
    analyzed, plan = site_plan("one rank each", fault(sync_every=4, fragments=2, delay=1, mixing=0.25))
    verdict = verdict_of(case_of(analyzed, plan), 5)
    assert not verdict.passed
    assert (verdict.first_difference.step, verdict.first_difference.quantity) == (step, "parameter")


def test_a_wait_for_what_begins_in_another_step_is_a_fault_of_the_plan():
    _, plan = site_plan("one rank each", STREAMING)

    def waits_within_the_step(actions):
        return [
            replace(each, waits=each.previous_waits, previous_waits=()) if each.previous_waits else each
            for each in actions
        ]

    problems = [str(each) for each in static_checks(edited(plan, waits_within_the_step))]
    assert any("END_ROUND(head) runs in step 2 and waits for OUTER_REDUCE(head)" in each for each in problems)


@pytest.mark.parametrize(("inner", "share"), [("ddp", 1), ("zero 2", 3), ("stages", 1)])
def test_a_step_sends_a_fragment_at_most_and_all_together_what_diloco_sends(inner: str, share: int):
    rounds = mw.StreamingDiLoCo(sync_every=6, fragments=3, delay=1)
    _, plan = site_plan(inner, rounds)
    _, at_once = site_plan(inner, mw.DiLoCo(sync_every=6))

    def sent(plan: Plan, rank: int, step: int) -> float:
        actions = (action for action in plan.for_rank(rank).actions if action.runs_in(step))
        moves = (move for action in actions for move in action.transfers if "outer" in move.axes)
        return sum(min_max_sent_nbytes(move, plan.mesh)[1] for move in moves)

    for rank in range(plan.mesh.world_size):
        steps = [sent(plan, rank, step) for step in range(20)]
        assert sum(steps[6:12]) == sum(steps[:6]) == pytest.approx(sent(at_once, rank, 5))
        assert [step for step in range(12) if steps[step] and step % 2 == 0] == []
        assert steps[19] == sent(at_once, rank, 19), "the last step of the run averages all"
    sizes = [0, 0, 0]
    for param in ANALYZED.model_spec.trainable:
        sizes[rounds.fragment_of(param.name, ANALYZED.model_spec)] += param.numel
    k = plan.num_sites
    if inner != "stages":
        largest = max(sent(plan, 0, step) for step in range(19))
        assert largest == pytest.approx(2 * (k - 1) / k * 8 * max(sizes) / share, rel=0.1)
        assert largest < 0.6 * sent(at_once, 0, 5)


def test_the_ledger_has_in_each_step_what_the_program_states():
    _, plan = site_plan("zero 2", STREAMING, train=short_run(6))

    def body(world: World) -> list[list[tuple[str, int]]]:
        world.ledger.is_recording = True
        executor, found = executor_of(ANALYZED, plan, world), []
        for step in range(6):
            world.ledger.entries.clear()
            executor.step(samples_of(plan, world.rank, step))
            entries = [each for each in world.ledger.entries if "outer" in each.axes]
            found.append([(each.action, each.nbytes) for each in entries])
        executor.close()
        return found

    for rank, steps in enumerate(run_on_threads(body, plan.mesh)):
        for step, found in enumerate(steps):
            planned = planned_messages(plan.for_rank(rank), step=step)
            assert found == [(each.action, each.nbytes) for each in planned if "outer" in each.axes]
        assert all(steps), "a fragment begins in every step"


def test_what_is_under_way_takes_4_bytes_per_parameter_more():
    precision = mw.PrecisionConfig()
    _, plan = site_plan("zero 3", STREAMING, precision=precision)
    totals = sum(state_bytes(plan, rank).strategy_states - 32 for rank in range(2))
    assert totals == 12 * NUMEL
    _, prompt = site_plan("zero 3", mw.StreamingDiLoCo(sync_every=2, fragments=2), precision=precision)
    assert sum(state_bytes(prompt, rank).strategy_states - 32 for rank in range(2)) == 8 * NUMEL

    def body(world: World) -> int:
        executor = executor_of(ANALYZED, plan, world)
        executor.step(samples_of(plan, world.rank, 0))
        found = executor.memory_by_category()["strategy_states"]
        executor.close()
        return found

    for rank, found in enumerate(run_on_threads(body, plan.mesh)):
        assert found == state_bytes(plan, rank).strategy_states


def resumed_plan(rounds: mw.Strategy, steps: int = 9) -> Plan:
    mesh, strategies, _ = INNER["zero 3"]
    job = tiny_job(optimizer=ADAMW, train=short_run(steps))
    return mw.make_plan(ANALYZED, job, mesh, (*strategies, rounds), 1)


RESUMED = mw.StreamingDiLoCo(sync_every=4, fragments=2, delay=3, mixing=0.5)


def test_a_run_resumes_after_any_step_with_what_is_under_way(tmp_path: Path):
    plan = resumed_plan(RESUMED)
    straight = trained(plan, tmp_path, range(9), lambda done: done in (3, 8, 9))
    under_way = [
        load_tensors(tmp_path / f"step-{done:08d}")[0]["state/diloco/under_way"].tolist()
        for done in (3, 8, 9)
    ]
    assert under_way == [[1, 0], [1, 1], [0, 0]]
    for done in (3, 8):
        assert is_equal(trained(plan, tmp_path, range(done, 9)), straight), done
    for left_out in ("state/diloco/sent/", "state/diloco/under_way"):
        assert not is_equal(trained(plan, tmp_path, range(8, 9), leaves_out=left_out), straight), left_out


def test_a_save_is_of_the_sum_however_late_it_arrives(tmp_path: Path):
    plan = resumed_plan(RESUMED)
    trained(plan, tmp_path, range(3), lambda done: done == 2)
    saved = load_tensors(tmp_path / "step-00000002")[0]
    sums = {name: saved[f"state/diloco/sent/{name}"] for name in saved_names(RESUMED, 0)}
    starts = {name: saved[f"state/diloco/start/{name}"] for name in sums}
    for name, total in sums.items():
        values = [saved[f"{site}model/{name}"] for site in ("", "site.1/", "site.2/")]
        way = sum(starts[name].double() - each.double() for each in values)
        torch.testing.assert_close(total.double(), way, rtol=1e-9, atol=1e-12)
    assert all(not saved[f"state/diloco/sent/{name}"].any() for name in saved_names(RESUMED, 1))


def saved_names(rounds: mw.StreamingDiLoCo, fragment: int) -> list[str]:
    names = [param.name for param in ANALYZED.model_spec.trainable]
    return [name for name in names if rounds.fragment_of(name, ANALYZED.model_spec) == fragment]


def test_a_checkpoint_goes_on_under_another_delay_and_other_fragments_are_refused(tmp_path: Path):
    trained(resumed_plan(RESUMED), tmp_path, range(3), lambda done: done == 3)
    for changed in (replace(RESUMED, delay=1), mw.DiLoCo(sync_every=4)):
        after = trained(resumed_plan(changed, 6), tmp_path, range(3, 6))
        own = {name for name in after[0] if "/" not in name}
        for rank in after:
            assert all(torch.equal(rank[name], after[0][name]) for name in own), "the last step ends all"
    with pytest.raises(PlanError, match="state/diloco/under_way has the shape"):
        trained(resumed_plan(replace(RESUMED, fragments=4)), tmp_path, range(3, 4))
    fewer = mw.make_plan(ANALYZED, tiny_job(train=short_run(9)), mw.Mesh(outer=2), (RESUMED,))
    with pytest.raises(PlanError, match="of the middle of a round of 3 sites"):
        trained(fewer, tmp_path, range(3, 4))


def test_parameters_that_are_given_end_what_is_under_way_and_sites_are_evaluated_after_the_last_step():
    _, plan = site_plan("one rank each", STREAMING, train=short_run(4))

    def body(world: World) -> list[int]:
        executor, found = executor_of(ANALYZED, plan, world), []
        kept = executor.state.strategy_tensors.of("diloco")
        sums = [each for each in plan.for_rank(world.rank).actions if each.kind == "OUTER_REDUCE"]
        begun = {each.name for each in sums if each.runs_in(1)}
        for step in range(4):
            if step == 2:
                with pytest.raises(PlanError, match="evaluate in the middle of a round") as refused:
                    executor.check_sites_agree("evaluate")
                assert "after step 4" in str(refused.value)
                assert set(executor.state.carried_works) == begun, "it runs on beside the next step"
                executor.state_dict()
                assert not executor.state.carried_works, "a save waits until it has arrived"
            executor.step(samples_of(plan, world.rank, step))
            found.append(int(kept["under_way"].sum()))
        executor.check_sites_agree("evaluate")
        kept["under_way"].fill_(1)
        executor.load_parameters({f"model/{name}": v for name, v in executor.gather_parameters().items()})
        found.append(int(kept["under_way"].sum()))
        executor.close()
        return found

    assert run_on_threads(body, plan.mesh) == [[1, 1, 1, 0, 0]] * 3


@pytest.mark.parametrize(
    ("changes", "job", "told", "fix"),
    [
        ({"fragments": 6, "sync_every": 8}, {}, "6 fragments of 5 blocks", "at most 5"),
        ({"fragments": 3, "sync_every": 2}, {}, "3 fragments, each at a step of its own", "at most 2"),
        ({"delay": 4, "sync_every": 4}, {}, "ends 4 steps after it began", "less than 4"),
        ({"mixing": 0.5, "sync_every": 4}, {}, "nothing at delay = 0", "set mixing = 0"),
        (
            {"fragments": 2},
            {"evaluate": mw.EvalConfig(every=10, hold_out=12)},
            "evaluation every 10",
            "evaluate.every = 0",
        ),
    ],
)
def test_what_no_stream_can_do_is_refused_with_a_repair(changes: dict, job: dict, told: str, fix: str):
    rounds = mw.StreamingDiLoCo(**{"sync_every": 10, **changes})
    with pytest.raises(PlanError, match=told) as refused:
        mw.make_plan(ANALYZED, tiny_job(**job), mw.Mesh(outer=3), (rounds,))
    assert any(fix in each.fix for each in refused.value.diagnostics)


def test_wrong_fields_and_sites_of_a_data_centre_are_refused_with_a_repair():
    for changes in ({"mixing": 1.0}, {"mixing": -0.1}, {"fragments": 0}, {"delay": -1}):
        with pytest.raises(PlanError, match=f"strategies.diloco.{next(iter(changes))}"):
            mw.StreamingDiLoCo(**changes)
    near = mw.LocalSGD("site", sync_every=1)
    with pytest.raises(PlanError, match="beside rounds over site are not yet supported"):
        mw.make_plan(ANALYZED, tiny_job(), mw.Mesh(outer=2, site=2), (near, STREAMING))


def test_the_plan_tells_the_most_and_the_mean_that_a_step_sends():
    _, plan = site_plan("zero 2", mw.StreamingDiLoCo(sync_every=4, fragments=2, delay=1))
    assert plan.program.period == Period(20, run_steps=20)
    text = rounds_text(plan)["rounds"]
    assert "average each of 2 fragments every 4 steps" in text
    assert "and go on with it 1 steps later" in text
    assert "in the last step of the run" in text
