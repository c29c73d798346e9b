"""Random plans: reproducible by seed and number; planted faults get the right outcome, never a match."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from benchmarks.random_plans import random_plans
from benchmarks.random_plans.combinations import (
    Reviewed,
    Row,
    count_pairs,
    count_reasons,
    reason_of,
    violations,
)
from benchmarks.random_plans.random_draws import MAX_RANKS, TECHNIQUES, Draw, draw
from benchmarks.random_plans.random_plans import plan_or_refusal, result, try_plan
from meshwright.parallel import STRATEGIES
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Program
from meshwright.plan.strategy_interface import Strategy, StrategyPhase

DDP_PLAN = Draw(
    0, 0, "llama", Mesh(dp_replicate=2), (BatchSplit(), DDP()), num_microbatches=1, micro_batch=1, clip=0.5
)
LIMITS = Reviewed(seed=0, count=2, pairs=1, share=1.0, exceptions={}, refusals=())


@dataclass(frozen=True)
class PlantedFault(Strategy):
    """A strategy with a planted fault: it refuses without a repair ("mute") or for an unknown reason ("new"),
    sleeps, or breaks the program.
    """

    name: ClassVar[str] = "planted_fault"
    phase: ClassVar[StrategyPhase] = "comm"
    fault: str = ""

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        if self.fault == "sleeps":
            time.sleep(1.0)
        yield from {"mute": [Diagnostic("bad", "")], "new": [Diagnostic("the moon is full", "wait")]}.get(
            self.fault, []
        )

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        if self.fault != "breaks":
            return program
        return program.edit(lambda actions: [action for action in actions if action.kind != "REDUCE"])


def with_planted_fault(fault: str) -> Draw:
    return replace(DDP_PLAN, strategies=(*DDP_PLAN.strategies, PlantedFault(fault=fault)))


def row(outcome: str, *techniques: str, reasons: tuple[str, ...] = (), perturbation: str = "") -> Row:
    return {
        "outcome": outcome,
        "techniques": list(techniques),
        "reasons": list(reasons),
        "perturbation": perturbation,
        "case": outcome,
    }


def test_a_plan_follows_from_its_seed_and_number():
    assert [draw(3, number) for number in range(40)] == [draw(3, number) for number in range(40)]
    assert draw(3, 1) != replace(draw(4, 1), seed=3)
    assert all(
        1 < draw(3, number).mesh.world_size <= MAX_RANKS or draw(3, number).perturbation
        for number in range(200)
    )


def test_every_technique_is_drawn_except_those_that_are_not_exact():
    found = {name for number in range(1500) for name in draw(3, number).techniques}
    assert found <= set(TECHNIQUES)
    kinds = {TECHNIQUES[name] for name in found}
    others = {"compress", "quantized_weights", "compress_activations"}  # benchmarks/compression draws them
    others |= {"local_sgd", "diloco", "stale_server"}
    others |= {"embedding_host"}  # of ranks of its own, beside ddp alone: tests/parallel/embedding
    others |= {"observer"}  # its function is a file: tests/parallel/observer
    others |= {"fp8"}  # torchao is an extra, and it is not exact: tests/parallel/precision
    others |= {"compile"}  # benchmarks/models/compiled_parity.py runs it
    exact = {name: modes for name, modes in STRATEGIES.items() if name not in others}
    strategies = {f"{name} {mode}".strip() for name, modes in exact.items() for mode in modes}
    assert kinds | found >= strategies - {"batch_split", "pipedream"}


def test_a_correct_plan_matches_and_each_planted_fault_has_its_own_outcome(monkeypatch: pytest.MonkeyPatch):
    assert try_plan(DDP_PLAN)["outcome"] == "matched"
    assert try_plan(with_planted_fault("mute"))["outcome"] == "no repair"
    assert try_plan(with_planted_fault("new"))["outcome"] == "new reason"
    broken = try_plan(with_planted_fault("breaks"))
    assert broken["outcome"] == "crashed"
    assert "a plan was made" not in broken["case"]
    assert "REDUCE" in broken["message"] or "gradient" in broken["message"]
    select = random_plans.select_local_batch
    monkeypatch.setattr(
        random_plans,
        "select_local_batch",
        lambda batch, plan, rank: select(batch, plan, 0),
    )
    assert try_plan(DDP_PLAN)["outcome"] == "differs"


def test_a_run_beyond_the_limit_hangs_and_shows_its_stack():
    found = try_plan(with_planted_fault("sleeps"), 0.2)
    assert found["outcome"] == "hangs"
    assert "time.sleep(1.0)" in found["message"]


def test_a_refusal_has_a_reason_that_is_listed():
    found = plan_or_refusal(replace(DDP_PLAN, strategies=(BatchSplit(),)))
    assert isinstance(found, dict)
    assert (found["outcome"], found["reasons"]) == (
        "refused",
        ["samples split along an axis whose gradients no strategy reduces"],
    )
    assert reason_of("the moon is full") == ""


def test_a_pair_below_its_share_is_reported_and_a_perturbed_plan_counts_for_no_share():
    rows = [row("matched", "a", "b"), row("refused", "a", "b", reasons=("why",))]
    assert list(violations(count_pairs(rows), LIMITS)) == [
        "a + b: 1 of 2 plans are not refused; needed is a share of 1.0 (why)"
    ]
    assert list(violations(count_pairs(rows), replace(LIMITS, exceptions={"a + b": 0.5}))) == []
    assert list(violations(count_pairs([rows[0], {**rows[1], "perturbation": "with c"}]), LIMITS)) == []
    assert list(violations(count_pairs(rows[:1]), replace(LIMITS, pairs=2))) == [
        "1 pairs of techniques occur; needed are 2"
    ]
    assert list(violations(count_pairs(rows[:1]), replace(LIMITS, exceptions={"a + c": 0.5}))) == [
        "a + c: an exception for a pair that does not occur"
    ]


def test_the_result_holds_when_enough_match_and_nothing_else_happens():
    rows = [{**row("matched", "a", "b"), "error": 1e-16}] * 9 + [row("refused", "a", "c", reasons=("why",))]
    found = result(8, rows)
    assert (found.holds, found.median, found.detail["by_reason"]) == (True, 9, count_reasons(rows))
    assert found.detail["pairs"]["a + c"] == {"drawn": 1, "matched": 0, "refused": {"why": 1}}  # type: ignore[index]
    assert result(8, [*rows, row("crashed", "a")]).holds is False
    assert result(8, rows[5:]).holds is True
    assert result(8, [rows[0], rows[-1], rows[-1]]).holds is False
