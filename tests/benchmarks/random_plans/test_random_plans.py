"""Plans by chance: drawn again by number, sorted by what becomes of them,
and nothing odd passes for a match.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from benchmarks.random_plans import random_plans
from benchmarks.random_plans.combinations import Reviewed, Row, of_pairs, reason_of, refused_by, short_of
from benchmarks.random_plans.random_draws import MOST_RANKS, TECHNIQUES, Draw, draw
from benchmarks.random_plans.random_plans import plan_or_refusal, result, tried
from meshwright.parallel import STRATEGIES
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.action import Program
from meshwright.plan.strategy import Strategy, StrategyPhase

COPIES = Draw(0, 0, "llama", Mesh(dp_replicate=2), (BatchSplit(), DDP()), micros=1, micro_batch=1, clip=0.5)
WANTED = Reviewed(seed=0, count=2, pairs=1, share=1.0, exceptions={}, refusals=())


@dataclass(frozen=True)
class Odd(Strategy):
    """Says what is wrong without a repair, or for a reason of its own; or falls asleep, or breaks the
    program.
    """

    name: ClassVar[str] = "odd"
    phase: ClassVar[StrategyPhase] = "comm"
    how: str = ""

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        if self.how == "sleeps":
            time.sleep(1.0)
        yield from {"mute": [Diagnostic("bad", "")], "new": [Diagnostic("the moon is full", "wait")]}.get(
            self.how, []
        )

    def rewrite(self, program: Program, sharding: ShardingPlan, job: Job) -> Program:
        if self.how != "breaks":
            return program
        return program.edit(lambda actions: [action for action in actions if action.kind != "REDUCE"])


def odd(how: str) -> Draw:
    return replace(COPIES, strategies=(*COPIES.strategies, Odd(how=how)))


def row(outcome: str, *techniques: str, reasons: tuple[str, ...] = (), spoilt: str = "") -> Row:
    return {
        "outcome": outcome,
        "techniques": list(techniques),
        "reasons": list(reasons),
        "spoilt": spoilt,
        "case": outcome,
    }


def test_a_plan_follows_from_its_seed_and_number():
    assert [draw(3, number) for number in range(40)] == [draw(3, number) for number in range(40)]
    assert draw(3, 1) != replace(draw(4, 1), seed=3)
    assert all(
        1 < draw(3, number).mesh.world_size <= MOST_RANKS or draw(3, number).spoilt for number in range(200)
    )


def test_every_technique_is_drawn_but_the_one_that_is_not_exact():
    found = {name for number in range(1500) for name in draw(3, number).techniques}
    assert found <= set(TECHNIQUES)
    kinds = {TECHNIQUES[name] for name in found}
    strategies = {f"{name} {mode}".strip() for name, modes in STRATEGIES.items() for mode in modes}
    assert kinds >= strategies - {"batch_split", "pipedream"}


def test_equal_plans_match_and_what_else_happens_is_told_apart(monkeypatch: pytest.MonkeyPatch):
    assert tried(COPIES)["outcome"] == "matched"
    assert tried(odd("mute"))["outcome"] == "no repair"
    assert tried(odd("new"))["outcome"] == "new reason"
    broken = tried(odd("breaks"))
    assert broken["outcome"] == "crashed"
    assert "a plan was made" not in broken["case"]
    assert "REDUCE" in broken["said"] or "gradient" in broken["said"]
    share = random_plans.select_local_batch
    monkeypatch.setattr(
        random_plans,
        "select_local_batch",
        lambda batch, plan, rank: share(batch, plan, 0),
    )
    assert tried(COPIES)["outcome"] == "differs"


def test_what_has_not_ended_in_time_hangs_and_says_where():
    found = tried(odd("sleeps"), 0.2)
    assert found["outcome"] == "hangs"
    assert "time.sleep(1.0)" in found["said"]


def test_a_refusal_has_a_reason_that_is_listed():
    found = plan_or_refusal(replace(COPIES, strategies=(BatchSplit(),)))
    assert isinstance(found, dict)
    assert (found["outcome"], found["reasons"]) == ("refused", ["sums that nobody takes"])
    assert reason_of("the moon is full") == ""


def test_a_pair_below_its_share_is_told_and_a_spoilt_plan_counts_for_no_share():
    rows = [row("matched", "a", "b"), row("refused", "a", "b", reasons=("why",))]
    assert list(short_of(of_pairs(rows), WANTED)) == [
        "a + b: 1 of 2 plans are not refused; needed is a share of 1.0 (why)"
    ]
    assert list(short_of(of_pairs(rows), replace(WANTED, exceptions={"a + b": 0.5}))) == []
    assert list(short_of(of_pairs([rows[0], {**rows[1], "spoilt": "with c"}]), WANTED)) == []
    assert list(short_of(of_pairs(rows[:1]), replace(WANTED, pairs=2))) == [
        "1 pairs of techniques meet; needed are 2"
    ]
    assert list(short_of(of_pairs(rows[:1]), replace(WANTED, exceptions={"a + c": 0.5}))) == [
        "a + c: an exception for two that never meet"
    ]


def test_the_result_holds_when_enough_match_and_nothing_else_happens():
    rows = [{**row("matched", "a", "b"), "error": 1e-16}] * 9 + [row("refused", "a", "c", reasons=("why",))]
    found = result(8, rows)
    assert (found.holds, found.median, found.detail["by_reason"]) == (True, 9, refused_by(rows))
    assert found.detail["pairs"]["a + c"] == {"drawn": 1, "matched": 0, "refused": {"why": 1}}  # type: ignore[index]
    assert result(8, [*rows, row("crashed", "a")]).holds is False
    assert result(8, rows[5:]).holds is True
    assert result(8, [rows[0], rows[-1], rows[-1]]).holds is False
