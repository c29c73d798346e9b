"""Naive data parallelism: after the whole backward, each gradient is all-reduced, one by one.

Why it is here: it is the oracle for `ddp` (same sums, no buckets, no overlap), and a lesson: two lines that
are easy to trust, and their cost. Every message pays its latency, and the network is idle while backward
runs.

    compute   F0 F1 LOSS B1 B0                                     CLIP STEP
    comm                        REDUCE(w0) REDUCE(w1) REDUCE(w2)

    sent per rank and step = 2 (n-1)/n * S, as in `ddp`, in as many messages as there are parameters

Cost: that of `ddp`, without overlap and without coalescing.
Limits: those of `ddp`; gradients are sent in the dtype of the parameters.
Paper: Li et al. 2020, "PyTorch Distributed", arXiv 2006.15704 (section 3.2.1, "A Naive Solution").
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from meshwright.comm.allreduce.size_rule import SizeRule
from meshwright.parallel.data.batch_split import GRAD_SUM_AXIS
from meshwright.parallel.data.ddp import check_replicas, replicate_gradients
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.grad_dependencies import first_grad_reader, last_backward, with_grad_waits
from meshwright.plan.step.program import Action, Program, Transfer
from meshwright.plan.step.single_device_program import stepped_microbatches
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase


@dataclass(frozen=True)
class NaiveDDP(Strategy):
    """Full replicas of the weights along `axis`; one all-reduce per parameter, after the last backward.

    `algorithm` sums each: a name of comm/algorithms, or a rule by the size of the message.
    """

    name: ClassVar[str] = "naive_ddp"
    phase: ClassVar[StrategyPhase] = "storage"
    axis: str = field(default="dp_replicate", metadata=GRAD_SUM_AXIS)
    algorithm: str = "backend"

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from check_replicas(self.name, self.axis, self.algorithm, sharding)
        if job.precision.reduce != job.precision.parameters:
            text = (
                f"gradients are sent in {job.precision.parameters} here, and precision.reduce is "
                f"{job.precision.reduce}"
            )
            yield Diagnostic(text, 'use the strategy "ddp", or make the two dtypes equal', "precision.reduce")

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        return replicate_gradients(sharding, self.axis)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        return program.edit(lambda actions: self._insert_reduces(actions, view, job))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        return {"REDUCE": runtime.state.start_collective}

    def _insert_reduces(self, actions: list[Action], view: RankView, job: Job) -> list[Action]:
        for microbatch in stepped_microbatches(actions) or (
            None,
        ):  # each that is stepped with alone, or all of them
            actions = self._reduce_each(actions, view, job, microbatch)
        return actions

    def _reduce_each(
        self, actions: list[Action], view: RankView, job: Job, microbatch: int | None
    ) -> list[Action]:
        end = first_grad_reader(actions, microbatch)
        reduces = []
        rule = SizeRule.parse(self.algorithm)
        for param_sharding in view.param_shardings:
            weight, axes = param_sharding.param, view.plan.param_sum_axes(param_sharding, self.axis)
            if not weight.trainable or not axes:
                continue
            nbytes = weight.numel * FLOAT_NBYTES[job.precision.parameters]
            transfer = Transfer(
                "all_reduce",
                axes,
                nbytes,
                rule.algorithm_for(nbytes),
                job.precision.parameters,
            )
            waits = (last_backward(actions[:end]).name,)
            tensors = (weight.name,)
            reduces.append(
                Action(
                    "REDUCE",
                    weight.name,
                    microbatch,
                    stream="comm",
                    waits=waits,
                    tensors=tensors,
                    transfer=transfer,
                )
            )
        return [
            *actions[:end],
            *reduces,
            *with_grad_waits(actions[end:], [reduce.name for reduce in reduces], microbatch),
        ]
