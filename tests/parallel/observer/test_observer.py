"""Observers: ranks that see the weights of a version, and whose answers come to all workers."""

from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.parallel.observer.observations import AnswerForm
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.job.job import OptimizerConfig, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import peak_nbytes, state_bytes
from meshwright.report.terminal.action_table import plan_summary
from meshwright.run.checkpoint.distributed_checkpoint import load_tensors
from meshwright.run.checkpoint.resume import state_changes
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.messages import issued_messages, planned_messages
from meshwright.verifier.static_checks import static_checks
from tests.parallel.observer.observer_plans import (
    ANSWERS,
    STORES,
    Seen,
    observer,
    observer_plan,
    run,
)
from tests.parallel.server.server_plans import samples_of
from tests.tiny_model import analyzed_model, case_of, executor_of, tiny_job, verdict_of

GRID = [(2, 1, 2), (3, 2, 1), (1, 1, 4)]  # workers, observers, micro-batch


def same(one: Seen, other: Seen) -> bool:
    """Whether two ranks have the same bits in all steps."""
    assert len(one.answers) == len(other.answers)
    for mine, theirs in zip(one.answers, other.answers, strict=True):
        assert [(each.version, each.observer) for each in mine] == [
            (each.version, each.observer) for each in theirs
        ]
        for a, b in zip(mine, theirs, strict=True):
            assert a.tensors.keys() == b.tensors.keys()
            if not all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors):
                return False
    return all(map(torch.equal, one.weights, other.weights))


@pytest.mark.parametrize(("workers", "observers", "micro_batch"), GRID)
@pytest.mark.parametrize("store", STORES)
def test_it_equals_one_device_and_observers_see_its_weights(
    store: str, workers: int, observers: int, micro_batch: int
):
    plan = observer_plan(store, workers, micro_batch, observer(observers=observers))
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed_model(), plan), 3)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("option", ["tied", "frozen", "spare"])
def test_observers_see_tied_and_frozen_weights_and_those_that_no_forward_reaches(option: str):
    plan = observer_plan("zero 1", 3, 2, model={option: True})
    verdict = verdict_of(case_of(analyzed_model(**{option: True}), plan), 2)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    "beside", [mw.ActivationOffload(), mw.MemoryBudget(), mw.ActivationCheckpointing(), mw.ChunkedLoss()]
)
def test_workers_may_save_activations_otherwise(beside: Strategy):
    strategies = (mw.BatchSplit(), observer(), STORES["zero 1"], beside)
    plan = mw.make_plan(analyzed_model(), tiny_job(), mw.Mesh(dp_replicate=3), strategies, 2)
    verdict = verdict_of(case_of(analyzed_model(), plan), 2)
    assert verdict.passed, str(verdict)


def test_observers_along_another_axis_see_the_weights_of_shards_there():
    plan = observer_plan(mw.ZeRO("dp_shard", stage=1), 3, 2, observer(axis="dp_shard"))
    verdict = verdict_of(case_of(analyzed_model(), plan), 2)
    assert verdict.passed, str(verdict)


def test_observers_see_the_parameters_in_their_dtype():
    beside = observer(answers=("flat:bfloat16", "rows:int64"))
    precision = PrecisionConfig(parameters="bfloat16", compute="bfloat16", reduce="float32")
    rank = run(observer_plan("zero 1", 3, 2, beside, precision=precision), range(2))[0]
    assert all(
        torch.equal(answers[0].tensors["flat"], weights)
        for answers, weights in zip(rank.answers, rank.weights, strict=True)
    )


@pytest.mark.parametrize("store", STORES)
def test_observers_see_the_bits_of_a_worker_at_that_version(store: str):
    ranks = run(observer_plan(store, 3, 2, observer(every=2, observers=2)), range(5))
    for rank in ranks[:3]:
        assert same(rank, ranks[0])
        for step, answers in enumerate(rank.answers):
            version = (step + 1) // 2 * 2
            assert [(each.version, each.observer) for each in answers] == [(version, 0), (version, 1)][
                : 2 * (version > 0)
            ]
            assert all(torch.equal(each.tensors["flat"], rank.weights[version - 1]) for each in answers)
    assert not any(answers for rank in ranks[3:] for answers in rank.answers)


def test_each_observer_answers_with_a_length_of_its_own_in_the_order_of_observers():
    ranks = run(observer_plan("ddp", 2, 2, observer(observers=3)), range(3))
    lengths = [[len(each.tensors["rows"]) for each in answers] for answers in ranks[0].answers]
    assert len({tuple(each) for each in lengths}) == 3
    for step, row in enumerate(lengths):
        assert len(set(row)) == 3
        # what an observer has counted are the bytes of what all workers take as its answer
        flat = ranks[0].weights[step].numel()
        assert [rank.counts[step]["answer"] for rank in ranks[2:]] == [8 * (flat + each) for each in row]


def test_a_forward_runs_on_an_observer_and_the_last_to_answer_keeps_its_place():
    ranks = run(observer_plan("zero 1", 2, 2, observer("logits", observers=3)), range(2))
    for answers in ranks[1].answers:
        assert [each.tensors["flat"].shape for each in answers] == [(2, 5, 13)] * 3
        assert [each.tensors["rows"].shape for each in answers] == [(0, 3)] * 3
        assert [each.observer for each in answers] == [0, 1, 2]
    assert same(ranks[0], ranks[1])


@pytest.mark.parametrize("store", STORES)
def test_what_leaves_a_rank_is_the_law_at_the_end_of_a_period_and_nothing_between(store: str):
    workers, observers = 3, 2
    plan = observer_plan(store, workers, 2, observer(every=2, observers=observers))
    ranks = run(plan, range(4))
    groups = {each.name: each for each in plan.sharding.param_groups}
    padded = sum(8 * -(-group.numel // workers) * workers for group in groups.values())
    headers = AnswerForm.of(ANSWERS).header_nbytes * (workers + observers)
    assert headers == 8 * (1 + 9 * 2) * 5
    for number, rank in enumerate(ranks):
        for step, entries in enumerate(rank.entries):
            sent = sum(each.nbytes for each in entries if each.action.startswith(("SHOW", "ANSWER")))
            if step % 2 == 0:
                assert sent == 0
            elif number < workers:
                assert sent == observers * padded // workers + headers
            else:
                assert sent == workers * rank.counts[step]["answer"] + headers
            reduced = {each.group_size for each in entries if each.action.startswith(("REDUCE", "UNSHARD"))}
            assert reduced == ({workers} if number < workers else set())
            stated = planned_messages(plan.for_rank(number), counts=rank.counts[step], step=step)
            assert issued_messages(entries) == stated


@pytest.mark.parametrize("store", STORES)
def test_every_rank_holds_the_planned_bytes(store: str):
    adamw = OptimizerConfig("adamw", lr=0.01)
    plan = observer_plan(store, 2, 2, observer(), optimizer=adamw)

    def body(world: World) -> dict[str, int]:
        executor = executor_of(analyzed_model(), plan, world)
        for step in range(2):
            executor.step(samples_of(plan, world.rank, step))
        sizes = executor.memory_by_category()
        executor.close()
        return sizes

    for rank, sizes in enumerate(run_on_threads(body, plan.mesh)):
        assert sum(sizes.values()) == state_bytes(plan, rank).total
    numel = sum(-(-each.numel // 2) * 2 for each in plan.sharding.param_groups)
    assert state_bytes(plan, 2).total == 0
    assert peak_nbytes(plan, 2) == 8 * numel  # the weights, from SHOW to OBSERVE
    said = plan_summary(plan)["observers"]
    assert said.startswith(f"rank 2 sees the weights after every step, {format_nbytes(8 * numel)}")


@pytest.mark.parametrize(("store", "end"), [("ddp", 3), ("ddp", 4), ("zero 2", 3)])
def test_a_run_that_goes_on_between_two_periods_or_at_the_end_of_one_has_the_same_bits(
    store: str, end: int, tmp_path: Path
):
    plan = observer_plan(store, 2, 2, observer(every=2, observers=2))
    whole = run(plan, range(6))
    run(plan, range(end), folder=tmp_path)
    again = run(plan, range(end, 6), start=tmp_path / f"step-{end:08}")
    for found, expected in zip(again, whole, strict=True):
        later = Seen(*(each[end:] for each in expected))
        assert same(found, later)


def test_losses_are_evaluated_by_workers():
    def body(world: World, plan: Plan) -> float:
        executor = executor_of(analyzed_model(), plan, world)
        executor.step(samples_of(plan, world.rank, 0))
        found = executor.evaluate([samples_of(plan, world.rank, 1)]).loss
        executor.step(samples_of(plan, world.rank, 2))
        executor.close()
        return found

    plan = observer_plan("zero 2", 2, 2)
    alone = mw.make_plan(analyzed_model(), plan.job, mw.Mesh(), (), 2)
    (expected,) = run_on_threads(lambda world: body(world, alone), alone.mesh)
    assert run_on_threads(lambda world: body(world, plan), plan.mesh) == [pytest.approx(expected)] * 3


def test_an_observer_of_many_is_traced_without_memory_and_without_its_function():
    plan = observer_plan("zero 1", 12, 1, observer("raises", observers=3, every=2))
    traced = mw.trace(analyzed_model(), plan, [0, 11, 12, 14])
    assert traced.passed, str(traced)


def test_a_plan_without_observers_leaves_their_answers_out(tmp_path: Path):
    run(observer_plan(), range(2), folder=tmp_path)
    saved = tmp_path / "step-00000002"
    more = observer_plan("zero 1", 2, 2, observer(every=2, observers=2))
    alone = mw.make_plan(
        analyzed_model(), tiny_job(), mw.Mesh(dp_replicate=2), (mw.BatchSplit(), mw.DDP()), 2
    )
    kept, left = (run(plan, range(2, 3), start=saved)[0].answers for plan in (more, alone))
    assert ([(each.version, each.observer) for each in kept[0]], left[0]) == ([(2, 0)], ())
    shapes = {name: value.shape for name, value in load_tensors(saved)[0].items()}
    (text,) = state_changes(shapes, alone)
    assert "what observer keeps from step to step is in that checkpoint and is left out" in text
    assert state_changes(shapes, more) == []
