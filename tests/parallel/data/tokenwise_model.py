"""Tokens of each sample on several ranks, and nothing that knows attention: blocks must look at one token at a time."""

from dataclasses import dataclass, replace
from typing import ClassVar

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.sequence_info import Deal
from meshwright.plan.sharding.param_sharding import Home
from meshwright.plan.sharding.placement import P, R, S
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Program, Transfer
from meshwright.plan.step.single_device import COUNT_NBYTES
from meshwright.plan.strategy import Phase, Strategy

NBYTES = {"COUNT": COUNT_NBYTES, "TALLY": 8}


@dataclass(frozen=True)
class Dealt(Strategy):
    """Deals the tokens of every sample out along `axis`; blocks must look at one token at a time."""

    name: ClassVar[str] = "dealt"
    phase: ClassVar[Phase] = "shard"
    by_token: ClassVar[bool] = True
    axis: str = "cp"

    def place(self, space: Space) -> Space:
        dealt = replace(space.with_tokens(self.axis, S(1)), deal=Deal(space.mesh.size(self.axis)))
        return dealt.with_homes(self._summed)

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        return program.edit(lambda actions: [self._told(action) for action in actions])

    def _summed(self, home: Home) -> Home:
        return replace(home, layout=home.layout.with_place(self.axis, R), grad=home.grad.with_place(self.axis, P))

    def _told(self, action: Action) -> Action:
        if action.kind not in NBYTES:
            return action
        axes = (*(action.transfer.axes if action.transfer else ()), self.axis)
        return replace(action, lane="wire", transfer=Transfer("all_reduce", axes, NBYTES[action.kind], dtype="float64"))


@dataclass(frozen=True)
class SumsOver(Strategy):
    """Has sums of gradients go over `axes` alone, whatever a store has said."""

    name: ClassVar[str] = "sums_over"
    phase: ClassVar[Phase] = "wire"
    axes: tuple[str, ...] = ()

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        return program.edit(lambda actions: [self._over(action) for action in actions])

    def _over(self, action: Action) -> Action:
        if action.kind != "REDUCE" or action.transfer is None:
            return action
        return replace(action, transfer=replace(action.transfer, axes=self.axes))
