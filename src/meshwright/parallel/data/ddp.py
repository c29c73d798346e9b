"""Distributed data parallel (DDP): every rank keeps all weights, gradients are summed while backward still runs.

Why it works: each rank's gradient is a summand of the true one (see `batch`), so one all-reduce per gradient makes all
replicas equal, and equal replicas that take equal steps stay equal. The gradients of the last layers are complete
first, so they travel while the earlier layers still compute. Small blocks are coalesced into buckets of a stated size,
because a message has a fixed cost; nothing is sent while micro-batches accumulate. Per bucket there is one REDUCE (sum
gradients over the ranks along the axis).

    compute   F0 F1 F2 LOSS B2 PACK(2) B1 PACK(1)  B0 PACK(0)            CLIP STEP
    wire                                   REDUCE(2, 1)     REDUCE(0)
    gradients P -> I along the axis: the move table says all_reduce

    sent per rank and step = 2 (n-1)/n * S          S: bytes of the trainable parameters in the reduction dtype
                                                    n: ranks along the axis x ranks that have other tokens of its samples

Cost: 2 (n-1)/n S bytes (`algorithm` may name one that sends more, in fewer rounds); memory of weights, gradients and moments
unchanged. A bucket is the home of its gradients: one contiguous buffer, made once, into which the first micro-batch's
gradients are copied and later ones are added. Parameters that a step does not reach are packed as zeros, so no rank waits for a
gradient that never comes.
Limits: weights, gradients and moments must fit on every rank (ZeRO shards them). With links slower than backward, the
reduction is exposed: accumulate more micro-batches, or compress.
Paper: Li et al. 2020, "PyTorch Distributed", arXiv 2006.15704 (bucketing and overlap, sections 3.2.2-3.2.3).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

from meshwright.comm.algorithms.size_rule import Rule
from meshwright.comm.algorithms.size_rule import faults as algorithm_faults
from meshwright.parallel.data.batch_split import DATA_AXES, SUMMED_AXES, alike_fault
from meshwright.plan.job.errors import Fault, nearest
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import NBYTES
from meshwright.plan.sharding.param_sharding import Bundle
from meshwright.plan.sharding.placement import I, R
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Hold, Program, Transfer
from meshwright.plan.step.single_device import Backwards, awaiting, first_reader, gradient, steps
from meshwright.plan.strategy import Handler, Phase, Runtime, Strategy


@dataclass(frozen=True)
class Replicate(Strategy):
    """Whole copies of the weights along `axis`; gradients travel in buckets of about `bucket_mb` MiB.

    `algorithm` says how a bucket is summed: a name of comm/algorithms, such as "ring", or a rule by the size of the message, such
    as "doubling <= 64 KiB, else ring".
    """

    name: ClassVar[str] = "replicate"
    phase: ClassVar[Phase] = "store"
    axis: str = "dp_replicate"
    bucket_mb: float = 25.0
    algorithm: str = "backend"

    def check(self, job: Job, space: Space) -> Iterator[Fault]:
        yield from replica_faults(self.name, self.axis, self.algorithm, space)
        if not 0 < self.bucket_mb < inf:
            text = f"buckets of {self.bucket_mb} MiB"
            yield Fault(text, "write a size above 0; 25 is a good start", "strategies.replicate.bucket_mb")

    def place(self, space: Space) -> Space:
        axes = space.with_theirs(self.axis)
        return space.with_homes(lambda home: replace(home, grad=home.grad.with_place(axes, I)))

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        buckets = coalesce(space.bundles(), self.bucket_mb * 2**20 / NBYTES[job.precision.reduce])
        return program.edit(lambda actions: self._reduced(actions, buckets, space, job))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        return {"REDUCE": runtime.start}

    def _reduced(self, actions: list[Action], buckets: Iterable[Sequence[Bundle]], space: Space, job: Job) -> list[Action]:
        """`actions` with all buckets: once, or for every micro-batch, where each is stepped with alone."""
        alone, behind = steps(actions), dict[int, list[Action]]()  # what stands behind which action
        found, ends, axes = Backwards(actions), list[_End](), space.with_theirs(self.axis)
        for number, bucket in enumerate(buckets):
            for micro in alone or (None,):
                places = [found.of(bundle, space.anatomy.visits, micro) for bundle in bucket]
                ends.append(self._reduce(actions, places, behind, str(number), bucket, axes, job, micro))
        done = [each for i, action in enumerate(actions) for each in (action, *behind.get(i, ()))]
        for end in ends:
            done = end.of(done)
        return done

    def _reduce(
        self,
        actions: Sequence[Action],
        places: Sequence[Sequence[int]],
        behind: dict[int, list[Action]],
        name: str,
        bucket: Sequence[Bundle],
        axes: tuple[str, ...],
        job: Job,
        micro: int | None,
    ) -> "_End":
        """One bucket, summed over `axes`: each bundle is packed right after its own backward (`places`), while it is in cache.

        The whole leaves after the last backward. A bucket of another dtype takes finished sums only, and is unpacked.
        """
        casts = job.precision.reduce != job.precision.parameters
        tensors = tuple(name for bundle in bucket for name in bundle.names)
        numel = sum(bundle.numel for bundle in bucket)
        held = Hold(f"bucket({name})", numel * NBYTES[job.precision.reduce])
        packs = list[Action]()
        for bundle, own in zip(bucket, places, strict=True):
            at = own[-1 if casts else 0]
            grads = () if casts else (gradient(bundle),)
            takes = () if packs else (held,)
            pack = Action("PACK", bundle.name, micro, waits=(actions[at].name,), tensors=bundle.names, takes=takes, frees=grads)
            packs.append(pack)
            behind.setdefault(at, []).append(pack)
        last = max(own[-1] for own in places)
        waits = tuple(dict.fromkeys((*(pack.name for pack in packs), actions[last].name)))
        algorithm = Rule.parse(self.algorithm).pick(held.nbytes)
        transfer = Transfer("all_reduce", axes, held.nbytes, algorithm, job.precision.reduce)
        reduce = Action("REDUCE", name, micro, lane="wire", waits=waits, tensors=tensors, transfer=transfer)
        behind.setdefault(last, []).append(reduce)
        if not casts:
            return _End(reduce, held.name, tuple(map(gradient, bucket)))
        return _End(Action("UNPACK", name, micro, waits=(reduce.name,), tensors=tensors, frees=(held.name,)))


def coalesce(bundles: Sequence[Bundle], limit: float) -> list[list[Bundle]]:
    """`bundles` in runs of at most `limit` elements, in order; a bundle above the limit is a run of its own.

    Slices of unlike sizes are in runs of their own: behind them nothing would lie alike on ranks that have other slices.
    """
    runs: list[list[Bundle]] = []
    for bundle in bundles:
        if runs and runs[-1][-1].uneven == bundle.uneven and sum(other.numel for other in runs[-1]) + bundle.numel <= limit:
            runs[-1].append(bundle)
        else:
            runs.append([bundle])
    return runs


def replica_faults(name: str, axis: str, algorithm: str, space: Space, axes: tuple[str, ...] = SUMMED_AXES) -> Iterator[Fault]:
    """What is wrong with keeping whole copies along `axis`, which may be one of `axes`."""
    if axis not in axes:
        yield Fault(f"weights cannot be replicated along '{axis}'", nearest(axis, DATA_AXES), f"strategies.{name}.axis")
    elif axis not in space.summed_axes:
        yield alike_fault("copies", axis, f"strategies.{name}")
    elif any(home.flat for home in space.homes):
        text = f"{name} keeps whole copies along {axis}, and zero cuts the weights into shards"
        cut = any(axis in home.flat for home in space.homes)
        more = "" if cut else f', and write across = "{axis}" in the strategy zero'
        yield Fault(text, f"remove {name}{more}", f"strategies.{name}")
    else:
        yield from _apart_faults(name, axis, space)
    ranks = space.mesh.extent(space.with_theirs(axis)) if axis in axes else 1
    yield from algorithm_faults(algorithm, ranks, f"strategies.{name}.algorithm")


def _apart_faults(name: str, axis: str, space: Space) -> Iterator[Fault]:
    """Copies along two axes would be summed one axis after the other: two messages where one does."""
    copied = [home for home in space.homes if home.weight.trainable]
    whole = [each for each in SUMMED_AXES if any((h.layout.place(each), h.grad.place(each)) == (R, I) for h in copied)]
    others = [each for each in whole if each != axis]
    if others:
        text, ranks = (
            f"weights are kept whole along {others[0]} already, and now along {axis} too",
            space.mesh.extent((*others, axis)),
        )
        fix = f"make it one axis: mesh.{others[0]} = {ranks}, mesh.{axis} = 1"
        tokens = [each for each in (*others, axis) if each in space.token_axes]
        if tokens:
            fix = f"keep one of them, along an axis of samples if there is one: it sums over {' and '.join(tokens)} too"
        yield Fault(text, fix, f"strategies.{name}.axis")


@dataclass(frozen=True)
class _End:
    """How a bucket ends: who looks at the sums waits for `awaited`; STEP frees the bucket `held` in place of `grads`."""

    awaited: Action
    held: str = ""
    grads: tuple[str, ...] = ()

    def of(self, actions: list[Action]) -> list[Action]:
        """`actions`, with this end."""
        awaited, ended = self.awaited, list[Action]()
        if awaited.kind == "UNPACK":
            actions.insert(first_reader(actions, awaited.micro), awaited)
        for action in awaiting(actions, (awaited.name,), awaited.micro):
            if action.kind == "STEP" and action.micro == awaited.micro and self.held:
                kept = tuple(name for name in action.frees if name not in self.grads)
                action = replace(action, frees=(*kept, self.held))
            ended.append(action)
        return ended
