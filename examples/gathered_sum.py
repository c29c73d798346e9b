"""Gathered sum: replicas of the weights whose gradients are summed by one all-gather and a local sum.

Why it works: a sum is the same wherever it is computed. Every rank gathers the summands of all ranks and adds
them in the order of the ranks, so all have the same bits, which no all-reduce in rounds promises by itself.

    compute   F B ...                         CLIP STEP
    comm             GATHER_SUM(w0) GATHER_SUM(w1)
    gradients P -> I along the axis: an all_reduce, carried by an all_gather

    sent per rank and step = (n - 1) S bytes        S: bytes of the trainable parameters, n: ranks

Cost: n / 2 times the bytes of a ring, in one round; n copies of the largest gradient while it is summed.
Limits: few ranks or small models; weights, gradients and optimizer states must fit on every rank.
Paper: none; it is the all-gather that `naive_ddp` (Li et al. 2020, arXiv 2006.15704) would use for one round.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from meshwright.parallel.data.ddp import replicate_gradients
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.grad_dependencies import first_grad_reader, last_backward, with_grad_waits
from meshwright.plan.step.program import Action, Program, Transfer
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase


@dataclass(frozen=True)
class GatheredSum(Strategy):
    """Full replicas of the weights along `axis`; one all-gather per gradient, after the last backward."""

    name: ClassVar[str] = "gathered_sum"
    phase: ClassVar[StrategyPhase] = "storage"
    axis: str = "dp_replicate"

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        if self.axis not in sharding.grad_sum_axes:
            text = f"the ranks along {self.axis} read the same samples, so there is nothing to sum"
            fix = f'put batch_split with axis = "{self.axis}" before it'
            yield Diagnostic(text, fix, f"strategies.{self.name}.axis")

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        return replicate_gradients(sharding, self.axis)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        return program.edit(lambda actions: self._insert_sums(actions, view, job.precision.parameters))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        return {"GATHER_SUM": lambda action: self._sum(action, runtime)}

    def _insert_sums(self, actions: list[Action], view: RankView, dtype: str) -> list[Action]:
        end, sums = first_grad_reader(actions, None), []
        waits = (last_backward(actions[:end]).name,)
        for each in (each for each in view.param_shardings if each.param.trainable):
            axes, param = view.plan.param_sum_axes(each, self.axis), each.param
            nbytes = param.numel * FLOAT_NBYTES[dtype]
            carrier = Transfer("all_gather", axes, nbytes, dtype=dtype)
            transfer = Transfer("all_reduce", axes, nbytes, dtype=dtype, carried_by=(carrier,))
            action = Action("GATHER_SUM", param.name, None, "comm", waits, (param.name,), transfer)
            sums.append(action)
        return [*actions[:end], *sums, *with_grad_waits(actions[end:], [each.name for each in sums], None)]

    def _sum(self, action: Action, runtime: Runtime) -> None:
        if action.transfer is None:
            return
        gradient = runtime.state.operand(action).input
        group = runtime.state.world.group(action.transfer.axes)
        summands = gradient.new_empty(group.size, *gradient.shape)
        work = group.all_gather(summands, gradient, action=action.name)
        work.wait()
        gradient.copy_(summands.sum(0))
        runtime.state.issue(action, work)
