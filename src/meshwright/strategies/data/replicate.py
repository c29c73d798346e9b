"""Distributed data parallel (DDP): every rank keeps all weights, gradients are summed while backward still runs.

Why it works: each rank's gradient is a summand of the true one (see `batch`), so one all-reduce per gradient makes all
replicas equal, and equal replicas that take equal steps stay equal. The gradients of the last layers are complete
first, so they travel while the earlier layers still compute. Small blocks are coalesced into buckets of a stated size,
because a message has a fixed cost; nothing is sent while micro-batches accumulate.

    compute   F0 F1 F2 LOSS B2 PACK(2) B1 PACK(1) B0 PACK(0)          CLIP STEP
    wire                          REDUCE(2) REDUCE(1) REDUCE(0)
    gradients P -> I along the axis: the move table says all_reduce

    sent per rank and step = 2 (n-1)/n * S          S: bytes of the trainable parameters in the reduction dtype

Cost: 2 (n-1)/n S bytes; memory of weights, gradients and moments unchanged. A bucket is the home of its gradients: one
contiguous buffer, made once, into which the first micro-batch's gradients are copied and later ones are added. Parameters
that a step does not reach are packed as zeros, so no rank waits for a gradient that never comes.
Limits: weights, gradients and moments must fit on every rank (ZeRO shards them). With links slower than backward, the
reduction is exposed: accumulate more micro-batches, or compress.
Paper: Li et al. 2020, "PyTorch Distributed", arXiv 2006.15704 (bucketing and overlap, sections 3.2.2-3.2.3).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from meshwright.core.anatomy import NBYTES
from meshwright.core.errors import Fault, nearest
from meshwright.core.job import Job
from meshwright.core.layout import I
from meshwright.core.program import Action, Hold, Program, Transfer, index_of_last, with_waits
from meshwright.core.space import Bundle, Space
from meshwright.core.steps import gradient
from meshwright.core.strategy import Handler, Phase, Runtime, Strategy
from meshwright.strategies.data.batch import DATA_AXES


@dataclass(frozen=True)
class Replicate(Strategy):
    """Whole copies of the weights along `axis`; gradients travel in buckets of about `bucket_mb` MiB."""

    name: ClassVar[str] = "replicate"
    phase: ClassVar[Phase] = "store"
    axis: str = "dp_replicate"
    bucket_mb: float = 25.0
    algorithm: str = "backend"

    def check(self, job: Job, space: Space) -> Iterator[Fault]:
        yield from replica_faults(self.name, self.axis, self.algorithm, space)
        if self.bucket_mb <= 0:
            text = f"buckets of {self.bucket_mb} MiB"
            yield Fault(text, "write a size above 0; 25 is a good start", "strategies.replicate.bucket_mb")

    def place(self, space: Space) -> Space:
        return space.with_homes(lambda home: replace(home, grad=home.grad.with_place(self.axis, I)))

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        buckets = coalesce(space.bundles(), self.bucket_mb * 2**20 / NBYTES[job.precision.parameters])
        for number, bucket in enumerate(buckets):
            program = program.edit(lambda actions, n=number, b=bucket: self._reduce(actions, str(n), b, space, job))
        return program

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        return {"REDUCE": runtime.start}

    def _reduce(self, actions: list[Action], name: str, bucket: Sequence[Bundle], space: Space, job: Job) -> list[Action]:
        """`actions` with the PACK and REDUCE of one bucket, right after the backwards that complete it."""
        last = bucket[-1].last or space.anatomy.visits[0]
        after = [i for i, action in enumerate(actions) if action.kind == "B" and action.subject == last]
        casts = job.precision.reduce != job.precision.parameters
        tensors = tuple(weight.name for bundle in bucket for weight in bundle.weights)
        numel = sum(bundle.numel for bundle in bucket)
        held = Hold(f"bucket({name})", numel * NBYTES[job.precision.reduce])
        grads = tuple(map(gradient, bucket))
        pack_at, reduce_at = (after[-1] if casts else after[0]), after[-1]
        pack = Action("PACK", name, waits=(actions[pack_at].name,), tensors=tensors, takes=(held,), frees=() if casts else grads)
        transfer = Transfer("all_reduce", (self.axis,), held.nbytes, self.algorithm, job.precision.reduce)
        waits = tuple(dict.fromkeys((pack.name, actions[reduce_at].name)))
        reduce = Action("REDUCE", name, lane="wire", waits=waits, tensors=tensors, transfer=transfer)
        actions.insert(reduce_at + 1, reduce)
        actions.insert(pack_at + 1, pack)
        if not casts:
            return _end(actions, reduce.name, held.name, grads)
        unpack = Action("UNPACK", name, waits=(reduce.name,), tensors=tensors, frees=(held.name,))
        actions.insert(index_of_last(actions, "CLIP") or 0, unpack)
        return _end(actions, unpack.name, "", ())


def coalesce(bundles: Sequence[Bundle], limit: float) -> list[list[Bundle]]:
    """`bundles` in runs of at most `limit` elements, in order; a bundle above the limit is a run of its own."""
    runs: list[list[Bundle]] = []
    for bundle in bundles:
        if runs and sum(other.numel for other in runs[-1]) + bundle.numel <= limit:
            runs[-1].append(bundle)
        else:
            runs.append([bundle])
    return runs


def replica_faults(name: str, axis: str, algorithm: str, space: Space) -> Iterator[Fault]:
    """What is wrong with keeping whole copies along `axis`."""
    if axis not in DATA_AXES:
        yield Fault(f"weights cannot be replicated along '{axis}'", nearest(axis, DATA_AXES), f"strategies.{name}.axis")
    elif axis not in space.data_axes:
        text = f"the copies along {axis} would all see the same samples: nothing splits the batch there"
        yield Fault(text, f'add [[strategies]] name = "batch", axis = "{axis}"', f"strategies.{name}")
    if algorithm != "backend":
        yield Fault(
            f"there is no all-reduce algorithm '{algorithm}'", nearest(algorithm, ["backend"]), f"strategies.{name}.algorithm"
        )


def _end(actions: list[Action], awaited: str, held: str, grads: tuple[str, ...]) -> list[Action]:
    """`actions` with CLIP waiting for `awaited`, and STEP freeing the bucket `held` in place of `grads`."""
    ended = []
    for action in actions:
        if action.kind == "CLIP":
            action = with_waits(action, (awaited,))
        if action.kind == "STEP" and held:
            kept = tuple(name for name in action.frees if name not in grads)
            action = replace(action, frees=(*kept, held))
        ended.append(action)
    return ended
