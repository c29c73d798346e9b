"""The memory of distributed experts: what plan expects, and the most, which no route exceeds."""

from collections.abc import Iterator

import pytest

import meshwright as mw
from benchmarks.experts.expert_memory import DENSE, EVEN, ONE_RANK, Case, measure
from meshwright.comm.collectives.group import World
from meshwright.parallel.expert import dispatch
from meshwright.plan.step.program import RuntimeSize
from meshwright.planner.program_cost.rank_memory import peak_nbytes
from meshwright.testing.ranks import ProcessPool, run_on_threads
from meshwright.verifier.messages import count_problems
from meshwright.verifier.static_checks import static_checks
from tests.parallel.expert.mixture_model import (
    TOKENS,
    analyzed_mixtral,
    batch_of,
    expert_strategies,
    sgd_job,
)

EP_3 = mw.Mesh(ep=3)


def plan_of(
    choice: tuple[int, ...] = (), load: float = 1.6, mesh: mw.Mesh = EP_3, *more: mw.Strategy
) -> mw.Plan:
    over = tuple(axis for axis in ("ep", "tp") if mesh.size(axis) > 1)
    strategies = (mw.ExpertParallel(over, load), *expert_strategies(*more, over=over)[1:])
    return mw.make_plan(analyzed_mixtral(5, choice), sgd_job(), mesh, strategies, 2)


def sizes(plan: mw.Plan, rank: int, count: str) -> set[tuple[int, int]]:
    """The rows that are expected, and the most, of allocations whose count begins with `count`."""
    found: Iterator[RuntimeSize] = (
        each.runtime_size
        for action in plan.for_rank(rank).actions
        for each in action.allocations
        if each.runtime_size is not None
    )
    return {(each.expected_rows, each.max_rows) for each in found if each.count.startswith(count)}


def test_the_most_is_of_a_chunk_and_of_all_rows():
    tokens = 2 * TOKENS  # of one rank in a microbatch
    for rank, num_experts in enumerate([2, 2, 1]):
        pairs = 3 * tokens * 2 * num_experts / 5
        (saved,) = sizes(plan_of(), rank, "saved pairs")
        assert saved == (int(pairs), min(-(-pairs * 1.6 // 1), 3 * tokens * min(2, num_experts)))
        (rows,) = sizes(plan_of(), rank, "saved rows")
        assert rows == (0, 3 * tokens if 3 * tokens * min(2, num_experts) > pairs * 1.6 else 0)
        (more,) = sizes(plan_of(), rank, "more pairs")
        assert more == (0, 3 * tokens * min(2, num_experts) - int(pairs))
    assert sizes(plan_of(load=3), 0, "saved rows") == {(0, 0)}
    assert not static_checks(plan_of())


def test_ranks_with_the_same_tokens_have_at_most_a_chunk_of_them():
    tokens = 2 * TOKENS  # all ranks have them
    for rank, num_experts in enumerate([2, 2, 1]):
        plan, pairs = plan_of(mesh=mw.Mesh(tp=3)), tokens * 2 * num_experts / 5
        (saved,) = sizes(plan, rank, "saved pairs")
        assert saved == (int(pairs), min(-(-pairs * 1.6 // 1), tokens * min(2, num_experts)))
        (rows,) = sizes(plan, rank, "saved rows")
        assert rows == (0, tokens)
        assert not sizes(plan, rank, "rows to experts")
        assert peak_nbytes(plan, rank) < peak_nbytes(plan, rank, at_most=True)


def test_a_lower_load_lowers_the_most_and_leaves_what_is_expected():
    plans = [plan_of(load=load) for load in (1, 1.6, 3)]
    assert len({peak_nbytes(plan, 0) for plan in plans}) == 1
    most = [peak_nbytes(plan, 0, at_most=True) for plan in plans]
    assert peak_nbytes(plans[0], 0) < most[0] < most[1] < most[2]


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (EP_3, ()),
        (mw.Mesh(pp=2, ep=2), (mw.Pipeline(schedule="zb_v"),)),
        (mw.Mesh(ep=2), (mw.ActivationCheckpointing(),)),
        (mw.Mesh(tp=3), ()),
        (mw.Mesh(ep=2, tp=2), (mw.ActivationCheckpointing(),)),
    ],
    ids=["ep", "zb_v", "recomputed", "over tp", "over ep and tp"],
)
def test_ranks_count_no_more_than_the_plan_has_memory_for(mesh: mw.Mesh, strategies: tuple[mw.Strategy, ...]):
    plan = plan_of((0, 1), 1.6, mesh, *strategies)
    assert not static_checks(plan)
    assert not any(problems_of(plan))


@pytest.mark.parametrize("mesh", [EP_3, mw.Mesh(tp=3)], ids=["ep", "over tp"])
def test_a_rank_that_computes_at_once_what_the_plan_has_no_memory_for_is_named(
    mesh: mw.Mesh, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dispatch, "chunk_size", lambda *_: 10**6)
    first, *others = problems_of(plan_of((0, 1), 1.6, mesh))
    assert any("rows of 'saved pairs(model.layers.0, 0, 0)' were counted" in text for _, text in first)
    assert not any(others)


def problems_of(plan: mw.Plan) -> list[list[tuple[str, str]]]:
    def body(world: World) -> list[tuple[str, str]]:
        with mw.parallelize(analyzed_mixtral(5, (0, 1)), plan, world=world) as trainer:
            trainer.step(trainer.local_batch(batch_of(12)))
            return list(count_problems(plan.for_rank(world.rank), world.ledger.counts))

    return run_on_threads(body, plan.mesh)


def test_peaks_are_those_expected_and_never_above_the_most():
    with ProcessPool(2, shared_memory=False) as pool:
        for rank in measure(pool, Case("Mixtral", "ep 2", EVEN)):
            assert rank["of_expected"] == pytest.approx(1, abs=0.1), rank
        bounded, _ = measure(pool, Case("Mixtral", "ep 2", ONE_RANK))
        at_once, _ = measure(pool, Case("Mixtral", "ep 2", ONE_RANK, checkpoint_load=2))
        over_tp, _ = measure(pool, Case("Mixtral", "over tp 2", ONE_RANK))
        dense, _ = measure(pool, Case(DENSE, "ep 2", ONE_RANK))
        dense_at_once, _ = measure(pool, Case(DENSE, "ep 2", ONE_RANK, checkpoint_load=4))
    for each in (bounded, at_once, over_tp, dense, dense_at_once):
        assert each["of_at_most"] <= 1, each
    assert bounded["measured"] < bounded["expected"] < at_once["measured"]
    assert dense["measured"] < dense_at_once["measured"]
