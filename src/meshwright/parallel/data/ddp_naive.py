"""Data parallelism as lectures draw it: after the whole backward, each parameter's gradient is all-reduced, one by one.

Why it is here: it is the oracle for `replicate` (same sums, no buckets, no overlap), and the lesson: two lines that are
easy to trust, and what they cost. Every message pays its latency, and the wire is idle while backward runs.

    compute   F0 F1 LOSS B1 B0                                     CLIP STEP
    wire                        REDUCE(w0) REDUCE(w1) REDUCE(w2)

    sent per rank and step = 2 (n-1)/n * S, as in `replicate`, in as many messages as there are parameters

Cost: as `replicate`, with no overlap and no coalescing.
Limits: those of `replicate`; gradients travel in the parameters' dtype.
Paper: Li et al. 2020, "PyTorch Distributed", arXiv 2006.15704 (section 3.2.1, "A Naive Solution").
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from meshwright.comm.algorithms.size_rule import Rule
from meshwright.parallel.data.ddp import replica_faults
from meshwright.plan.job.errors import Fault
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import NBYTES
from meshwright.plan.sharding.placement import I
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Program, Transfer
from meshwright.plan.step.single_device import awaiting, first_reader, last_backward, steps
from meshwright.plan.strategy import Handler, Phase, Runtime, Strategy


@dataclass(frozen=True)
class Naive(Strategy):
    """Whole copies of the weights along `axis`; one all-reduce per parameter, after the last backward.

    `algorithm` says how each is summed: a name of comm/algorithms, or a rule by the size of the message.
    """

    name: ClassVar[str] = "naive"
    phase: ClassVar[Phase] = "store"
    axis: str = "dp_replicate"
    algorithm: str = "backend"

    def check(self, job: Job, space: Space) -> Iterator[Fault]:
        yield from replica_faults(self.name, self.axis, self.algorithm, space)
        if job.precision.reduce != job.precision.parameters:
            text = f"gradients travel in {job.precision.parameters} here, and precision.reduce is {job.precision.reduce}"
            yield Fault(text, 'use the strategy "replicate", or make the two dtypes equal', "precision.reduce")

    def place(self, space: Space) -> Space:
        axes = space.with_theirs(self.axis)
        return space.with_homes(lambda home: replace(home, grad=home.grad.with_place(axes, I)))

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        return program.edit(lambda actions: self._reduced(actions, space, job))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        return {"REDUCE": runtime.start}

    def _reduced(self, actions: list[Action], space: Space, job: Job) -> list[Action]:
        for micro in steps(actions) or (None,):  # each that is stepped with alone, or all of them
            actions = self._reduce_each(actions, space, job, micro)
        return actions

    def _reduce_each(self, actions: list[Action], space: Space, job: Job, micro: int | None) -> list[Action]:
        end = first_reader(actions, micro)
        reduces = []
        rule = Rule.parse(self.algorithm)
        for weight in (home.weight for home in space.homes if home.weight.trainable):
            nbytes = weight.numel * NBYTES[job.precision.parameters]
            transfer = Transfer("all_reduce", space.with_theirs(self.axis), nbytes, rule.pick(nbytes), job.precision.parameters)
            waits = (last_backward(actions[:end]).name,)
            tensors = (weight.name,)
            reduces.append(Action("REDUCE", weight.name, micro, lane="wire", waits=waits, tensors=tensors, transfer=transfer))
        return [*actions[:end], *reduces, *awaiting(actions[end:], [reduce.name for reduce in reduces], micro)]
