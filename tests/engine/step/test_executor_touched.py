"""The runtime that strategies use on a rank: a tensor shifted inside a block, forward and backward, is booked
under its action.

A tensor that is shifted within a block, forwards and backwards, is booked so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.program import Action, Program, Transfer
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy
from tests.tiny_model import TOKENS, WIDTH, analyzed_model, case_of, plan_of, verdict_of

AXIS, LAYER, RANKS = "dp_replicate", "layers.1", 3


class Round(torch.autograd.Function):
    """A tensor that travels round the ring until it is home; its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, runtime: Runtime, there: int, back: int) -> torch.Tensor:
        ctx.way = runtime, back
        return shifted_around_ring(tensor, runtime, there)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        runtime, back = ctx.way
        return shifted_around_ring(grads[0].contiguous(), runtime, back), None, None, None


def shifted_around_ring(tensor: torch.Tensor, runtime: Runtime, by: int) -> torch.Tensor:
    for _ in range(RANKS):
        coming = torch.empty_like(tensor)
        runtime.state.collectives.shift(coming, tensor, AXIS, offset=by).wait()
        tensor = coming
    return tensor


@dataclass(frozen=True)
class ShiftInBlock(Strategy):
    """Has the input of one layer travel `booked` times as the program says, `RANKS` times in truth."""

    name = "travel"
    phase = "memory"
    booked: int = RANKS
    back: int = -1

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        def change(actions: list[Action]) -> list[Action]:
            samples = job.train.batch // view.plan.mesh.world_size
            sent = (Transfer("shift", (AXIS,), samples * TOKENS * WIDTH * 8, dtype="float64"),) * self.booked
            met = [action.subject == LAYER and action.kind in ("F", "B") for action in actions]
            return [
                replace(action, inner_transfers=sent) if mine else action
                for action, mine in zip(actions, met, strict=True)
            ]

        return program.edit(change)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        def around(inner: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return inner(Round.apply(x, runtime, 1, self.back))

        runtime.state.patches.wrap_forward(LAYER, around)
        return {}


def plan_with(travel: ShiftInBlock) -> mw.Plan:
    return plan_of(analyzed_model(), RANKS, (BatchSplit(), DDP(), travel))


def test_a_shift_within_a_block_is_booked_under_its_action():
    plan = plan_with(ShiftInBlock())
    found = mw.trace(analyzed_model(), plan, range(RANKS))
    assert found.passed, found
    assert {"F(layers.1, 0)", "B(layers.1, 0)"} <= found.planned_nbytes.keys()
    verdict = verdict_of(case_of(analyzed_model(), plan))
    assert verdict.passed, verdict


@pytest.mark.parametrize("booked", [RANKS - 1, RANKS + 1])
def test_one_shift_more_or_less_than_the_program_says_is_named(booked: int):
    found = mw.trace(analyzed_model(), plan_with(ShiftInBlock(booked)), [1])
    assert not found.passed
    assert any("layers.1" in fault.problem and "shift of" in fault.problem for fault in found.diagnostics), (
        found
    )
