"""Int8 gradients with error feedback: what `ddp` sums travels as codes of one byte, with a scale per block.

Why it works: each rank adds what its codes lost to its next gradient, so nothing is lost for good. All ranks
decode the same codes in the same order, so replicas stay equal to the last bit.

    gradient + residual -> codes, scales -> all_gather -> sum; residual = what the codes lost (placement P)

Cost: (n - 1) (1 + 4 / block) bytes per element in place of 8 (n - 1) / n; a residual of the gradients' size.
Limits: gradients that are all-reduced; lossy. Paper: Seide et al. 2014, "1-bit stochastic gradient descent".
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import Layout, P
from meshwright.plan.step.program import Action, Program
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase
from meshwright.plan.strategy_state import StateSpec


@dataclass(frozen=True)
class Int8Gradients(Strategy):
    """Sends the sums of gradients along `axis` as int8, with one scale per `block` elements."""

    name: ClassVar[str] = "int8_gradients"
    phase: ClassVar[StrategyPhase] = "comm"
    exact: ClassVar[bool] = False
    axis: str = "dp_replicate"
    block: int = 256

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        if any(each.flat_shard_axes for each in sharding.param_shardings):
            text = "gradients that are all-reduced are coded, and zero scatters them"
            yield Diagnostic(text, 'use the strategy "ddp", or remove it', f"strategies.{self.name}")

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        return program.edit(lambda actions: list(map(self._coded, actions)))

    def states(self, view: RankView, job: Job) -> Iterable[StateSpec]:
        for each in (each for each in view.param_shardings if each.param.trainable):
            layout = Layout().with_placement(view.plan.param_sum_axes(each, self.axis), P)
            yield StateSpec("residual", param=each.param.name, dtype=job.precision.reduce, layout=layout)

    def tolerance(self, sharding: ShardingPlan) -> float:
        return 0.1

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        runtime.wrap("REDUCE", lambda handler: lambda action: self._sum(action, handler, runtime))
        return {}

    def _coded(self, action: Action) -> Action:
        transfer = action.transfer
        if action.kind != "REDUCE" or transfer is None or self.axis not in transfer.axes:
            return action
        num_blocks = -(-transfer.nbytes // FLOAT_NBYTES[transfer.dtype] // self.block)
        codes = replace(transfer, collective="all_gather", nbytes=num_blocks * self.block, dtype="int8")
        scales = replace(codes, nbytes=num_blocks * FLOAT_NBYTES[transfer.dtype], dtype=transfer.dtype)
        return replace(action, transfer=replace(transfer, carried_by=(codes, scales)))

    def _sum(self, action: Action, handler: Handler, runtime: Runtime) -> None:
        if action.transfer is None or not action.transfer.carried_by:
            handler(action)
            return
        total = runtime.state.operand(action).input.view(-1)
        gradients, residuals = runtime.state.operand_by_param(action), runtime.tensors
        for name, gradient in gradients.items():
            gradient += residuals[f"residual/{name}"].view(-1)
        blocks = torch.nn.functional.pad(total, (0, -len(total) % self.block)).view(-1, self.block)
        scales = (blocks.abs().amax(1, keepdim=True) / 127).clamp_min(1e-30)
        codes = (blocks / scales).round().to(torch.int8)
        total -= (codes * scales).view(-1)[: len(total)]
        for name, lost in gradients.items():
            residuals[f"residual/{name}"].view(-1).copy_(lost)
        group = runtime.state.world.group(action.transfer.axes)
        sent = [(each, each.new_empty(group.size, *each.shape)) for each in (codes, scales)]
        works = [group.all_gather(every, own, action=action.name) for own, every in sent]
        for work in works:
            work.wait()
        total.copy_((sent[0][1] * sent[1][1]).sum(0).view(-1)[: len(total)])
        runtime.state.issue(action, works[-1])
