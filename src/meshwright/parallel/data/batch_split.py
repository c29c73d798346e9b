"""Data parallelism, the splitting half: each rank computes on its own share of the global batch.

Why it works: the loss of a step is a sum over tokens divided by one number, the count of valid tokens in the *global*
batch. A sum can be taken in parts. Each rank therefore divides its own sum by the global count, never by its own, and
the gradients of all ranks simply add up; nobody divides by a number of ranks. Taking the mean of per-rank means is
wrong as soon as ranks hold different numbers of valid tokens.

    global batch  [ s0 s1 s2 s3 s4 s5 ]        rank 0: s0 s1    rank 1: s2 s3    rank 2: s4 s5
    before   COUNT           F F F  LOSS  B B B  TALLY  STEP
    after    COUNT(all-reduce, beside the first F)  F F F  LOSS  B B B  TALLY(all-reduce)  STEP

    loss = sum_ranks sum_tokens l / sum_ranks count        weights I -> R, so their gradients are P

A loss that compares rows with each other (contrastive) is no such sum. Then all rows meet: before it comes one GATHER (rows
of an output or a target, from all ranks to all) per tensor that it takes, and every rank takes the same loss on all of them.

    after    COUNT  F F F  GATHER(facts) GATHER(output0) GATHER(output1)  LOSS  B B B  TALLY  STEP

Cost: two messages, of 32 and 8 bytes, per rank and step, and per GATHER n-1 times the bytes of a rank's rows; memory of
activations / n. A rank without data takes part with zero weight: its labels are ignored, its gradients are zero, and nobody
waits.
Limits: the global batch must divide by the ranks. The gradients stay pending sums: a storing strategy must add them up.
Paper: Dean et al. 2012, "Large Scale Distributed Deep Networks" (NeurIPS); Goyal et al. 2017, arXiv 1706.02677, section 3
(losses normalised by the total, not by the per-worker minibatch).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from meshwright.plan.job.errors import Fault, nearest
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.placement import S
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Program, Transfer, index_of_last, with_waits
from meshwright.plan.step.single_device import FACTS, FORWARDS, added_along
from meshwright.plan.strategy import Phase, Strategy

DATA_AXES = ("dp_replicate", "dp_shard")
SUMMED_AXES = (*DATA_AXES, "cp")  # where ranks may have other samples, or other tokens of them


@dataclass(frozen=True)
class Batch(Strategy):
    """Splits the samples of the global batch along `axis`."""

    name: ClassVar[str] = "batch"
    phase: ClassVar[Phase] = "shard"
    axis: str = "dp_replicate"

    def check(self, job: Job, space: Space) -> Iterator[Fault]:
        if self.axis not in DATA_AXES:
            yield Fault(f"samples cannot be split along '{self.axis}'", nearest(self.axis, DATA_AXES), "strategies.batch.axis")
        if space.anatomy.whole_batch:
            for column in (*space.anatomy.targets, *(column for column in space.anatomy.outputs if column.used)):
                yield from column.faults("loss")

    def place(self, space: Space) -> Space:
        split = space.with_tokens(self.axis, S(0))
        return split.with_homes(lambda home: home.used_apart(self.axis))

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        met = program.edit(lambda actions: [self._share(action) for action in self._met(actions, space, job)])
        return added_along(met, self.axis)

    def _met(self, actions: list[Action], space: Space, job: Job) -> list[Action]:
        """`actions` with the rows of all ranks gathered before a loss that needs the whole batch; once for all axes."""
        anatomy = space.anatomy
        if not anatomy.whole_batch or any(action.kind == "GATHER" for action in actions):
            return actions
        rows, at = job.train.batch // space.mesh.extent(space.data_axes), index_of_last(actions, "LOSS") or 0
        used = [column for column in anatomy.outputs if column.used]
        sizes = {FACTS: 8 * (1 + sum(not column.rows for column in used))}
        for column in (*anatomy.targets, *used):
            if column.rows:
                sizes[column.name] = rows * column.nbytes(job.precision.parameters)
        forward = next(action.name for action in reversed(actions) if action.kind in FORWARDS)
        gathers = [
            Action("GATHER", name, lane="wire", waits=(forward,), transfer=Transfer("all_gather", (), nbytes, dtype="uint8"))
            for name, nbytes in sizes.items()
        ]
        loss = with_waits(actions[at], [gather.name for gather in gathers])
        return [*actions[:at], *gathers, loss, *actions[at + 1 :]]

    def _share(self, action: Action) -> Action:
        if action.kind == "GATHER" and action.transfer is not None:
            return replace(action, transfer=replace(action.transfer, axes=(*action.transfer.axes, self.axis)))
        return action


def alike_fault(what: str, axis: str, where: str) -> Fault:
    """What is wrong with summing gradients along `axis`, for `what` there, where nothing divides samples or tokens."""
    if axis in DATA_AXES:
        text = f"the {what} along {axis} would all see the same samples: nothing splits the batch there"
        return Fault(text, f'add [[strategies]] name = "batch", axis = "{axis}"', where)
    text = f"the {what} along {axis} would all see the same tokens: nothing deals those of a sample out there"
    return Fault(text, f'add [[strategies]] name = "ring", axis = "{axis}"', where)
