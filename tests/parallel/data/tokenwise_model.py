"""Strategies that shard tokens without attention support, for models whose blocks process each token by
itself.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from meshwright.plan.job.job import Job
from meshwright.plan.sharding.param_sharding import ParamSharding
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sequence_sharding import SequenceSharding
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import P, R, S
from meshwright.plan.step.program import Action, Program, Transfer
from meshwright.plan.step.single_device_program import COUNT_NBYTES
from meshwright.plan.strategy_interface import Strategy, StrategyPhase

NBYTES = {"TOKEN_COUNT": COUNT_NBYTES, "LOSS_SUM": 8}


@dataclass(frozen=True)
class TokenSharding(Strategy):
    """Shards the tokens of every sample along `axis`; blocks must process each token by itself."""

    name: ClassVar[str] = "token_sharding"
    phase: ClassVar[StrategyPhase] = "shard"
    needs_sequence_info: ClassVar[bool] = True
    axis: str = "cp"

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        sharded = replace(
            sharding.with_batch_placement(self.axis, S(1)),
            sequence_sharding=SequenceSharding(sharding.mesh.size(self.axis)),
        )
        return sharded.map_param_shardings(self._with_partial_grads)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        return program.edit(lambda actions: [self._reduced_over_axis(action) for action in actions])

    def _with_partial_grads(self, param_sharding: ParamSharding) -> ParamSharding:
        return replace(
            param_sharding,
            layout=param_sharding.layout.with_placement(self.axis, R),
            grad_layout=param_sharding.grad_layout.with_placement(self.axis, P),
        )

    def _reduced_over_axis(self, action: Action) -> Action:
        if action.kind not in NBYTES:
            return action
        axes = (*(action.transfer.axes if action.transfer else ()), self.axis)
        return replace(
            action, stream="comm", transfer=Transfer("all_reduce", axes, NBYTES[action.kind], dtype="float64")
        )


@dataclass(frozen=True)
class ReducesOver(Strategy):
    """Reduces gradients over `axes` only, whatever the data-parallel strategy planned."""

    name: ClassVar[str] = "reduces_over"
    phase: ClassVar[StrategyPhase] = "comm"
    axes: tuple[str, ...] = ()

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        return program.edit(lambda actions: [self._with_axes(action) for action in actions])

    def _with_axes(self, action: Action) -> Action:
        if action.kind != "REDUCE" or action.transfer is None:
            return action
        return replace(action, transfer=replace(action.transfer, axes=self.axes))
