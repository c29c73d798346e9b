"""Distributed data parallel (DDP): every rank keeps all weights; backward overlaps the gradient all-reduce.

Why it works: each rank's gradient is a summand of the true one (see `batch_split`), so one all-reduce per
gradient makes all replicas equal, and equal replicas that take equal steps stay equal. The gradients of the
last layers are complete first, so they travel while earlier layers still compute. Small gradients are
coalesced into buckets of a given size, because a message has a fixed cost; nothing is sent while
microbatches accumulate. Each bucket has one REDUCE, which sums its gradients over the ranks along the axis.

    compute   F0 F1 F2 LOSS B2 PACK(2) B1 PACK(1)  B0 PACK(0)            CLIP STEP
    comm                                   REDUCE(2, 1)     REDUCE(0)
    gradients P -> I along the axis: all_reduce

    sent per rank and step = 2 (n-1)/n * S   S: bytes of the trainable parameters, reduction dtype
                                             n: ranks along the axis x ranks with other tokens of its samples

Cost: 2 (n-1)/n S bytes (`algorithm` may name one that sends more, in fewer rounds); memory of weights,
gradients and optimizer states unchanged. A bucket is one contiguous buffer, allocated once: the first
microbatch's gradients are copied into it and later ones are added. Parameters that a step does not reach
are packed as zeros, so no rank waits for a gradient that never comes. On accelerators each gradient begins at
a multiple of 128 bytes (`align_bytes`), and S counts the padding.
Limits: weights, gradients and optimizer states must fit on every rank (ZeRO shards them). If links are
slower than backward, the reduction is exposed: accumulate more microbatches, or compress.
Paper: Li et al. 2020, "PyTorch Distributed", arXiv 2006.15704 (bucketing and overlap, sections 3.2.2-3.2.3).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from meshwright.comm.allreduce.size_rule import SizeRule, rule_diagnostics
from meshwright.parallel.data.batch_split import GRAD_SUM_AXIS, same_data_diagnostic
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import above
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.sharding.mesh import GRAD_SUM_AXES, axes_with
from meshwright.plan.sharding.param_sharding import ParamGroup, ParamSharding
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import I, R
from meshwright.plan.step.grad_dependencies import BackwardIndex, first_grad_reader, with_grad_waits
from meshwright.plan.step.memory.memory_names import grad_name
from meshwright.plan.step.program import Action, Allocation, Program, Transfer
from meshwright.plan.step.single_device_program import stepped_microbatches
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase


@dataclass(frozen=True)
class DDP(Strategy):
    """Full replicas of the weights along `axis`; gradients are sent in buckets of about `bucket_mb` MiB.

    `algorithm` sums a bucket: a name of comm/algorithms, such as "ring", or a rule by the size of the
    message, such as "recursive_doubling <= 64 KiB, else ring".
    """

    name: ClassVar[str] = "ddp"
    phase: ClassVar[StrategyPhase] = "storage"
    axis: str = field(default="dp_replicate", metadata=GRAD_SUM_AXIS)
    bucket_mb: float = field(default=25.0, metadata=above(0))
    algorithm: str = "backend"

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from check_replicas(self.name, self.axis, self.algorithm, sharding)

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        return replicate_gradients(sharding, self.axis)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        max_numel = self.bucket_mb * 2**20 / FLOAT_NBYTES[job.precision.reduce]
        summed = [
            group
            for group in view.param_groups
            if group.name not in view.flat_param_specs
            and view.plan.param_sum_axes(group.param_shardings[0], self.axis)
        ]
        buckets = coalesce(summed, max_numel)
        return program.edit(lambda actions: self._insert_buckets(actions, buckets, view, job))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        return {"REDUCE": runtime.state.start_collective}

    def _insert_buckets(
        self, actions: list[Action], buckets: Iterable[Sequence[ParamGroup]], view: RankView, job: Job
    ) -> list[Action]:
        alone, behind = (
            stepped_microbatches(actions),
            dict[int, list[Action]](),
        )  # what stands behind which action
        found, ends = BackwardIndex(actions), list[_BucketEnd]()
        for number, bucket in enumerate(buckets):
            transfer = self._transfer(bucket, view, job)
            for microbatch in alone or (None,):
                places = [
                    found.completing(param_group, view.model_spec.block_calls, microbatch)
                    for param_group in bucket
                ]
                ends.append(
                    self._insert_bucket(
                        actions, places, behind, str(number), bucket, transfer, job, microbatch
                    )
                )
        done = [each for i, action in enumerate(actions) for each in (action, *behind.get(i, ()))]
        for end in ends:
            done = end.apply(done)
        return done

    def _transfer(self, bucket: Sequence[ParamGroup], view: RankView, job: Job) -> Transfer:
        axes = view.plan.param_sum_axes(bucket[0].param_shardings[0], self.axis)
        numel = sum(view.plan.packed_numel(param_group.params) for param_group in bucket)
        nbytes = numel * FLOAT_NBYTES[job.precision.reduce]
        algorithm = SizeRule.parse(self.algorithm).algorithm_for(nbytes)
        members = view.plan.sum_members(axes)
        return Transfer("all_reduce", axes, nbytes, algorithm, job.precision.reduce, member_indices=members)

    @staticmethod
    def _insert_bucket(
        actions: Sequence[Action],
        places: Sequence[Sequence[int]],
        behind: dict[int, list[Action]],
        name: str,
        bucket: Sequence[ParamGroup],
        transfer: Transfer,
        job: Job,
        microbatch: int | None,
    ) -> "_BucketEnd":
        casts = job.precision.reduce != job.precision.parameters
        tensors = tuple(name for param_group in bucket for name in param_group.names)
        held = Allocation(f"bucket({name})", transfer.nbytes)
        packs = list[Action]()
        for param_group, own in zip(bucket, places, strict=True):
            at = own[-1 if casts else 0]
            grads = () if casts else (grad_name(param_group),)
            takes = () if packs else (held,)
            pack = Action(
                "PACK",
                param_group.name,
                microbatch,
                waits=(actions[at].name,),
                tensors=param_group.names,
                allocations=takes,
                frees=grads,
            )
            packs.append(pack)
            behind.setdefault(at, []).append(pack)
        last = max(own[-1] for own in places)
        waits = tuple(dict.fromkeys((*(pack.name for pack in packs), actions[last].name)))
        reduce = Action(
            "REDUCE", name, microbatch, stream="comm", waits=waits, tensors=tensors, transfer=transfer
        )
        behind.setdefault(last, []).append(reduce)
        if not casts:
            return _BucketEnd(reduce, held.name, tuple(map(grad_name, bucket)))
        return _BucketEnd(
            Action("UNPACK", name, microbatch, waits=(reduce.name,), tensors=tensors, frees=(held.name,))
        )


def coalesce(param_groups: Sequence[ParamGroup], max_numel: float) -> list[list[ParamGroup]]:
    """Returns `param_groups` in consecutive buckets of at most `max_numel` elements; a larger group is a
    bucket of its own.

    Groups with uneven slices have buckets of their own: behind them, offsets would differ on ranks with other
    slices. So have groups that are summed along fewer axes, such as experts, and those that are summed as
    codes.
    """
    runs: list[list[ParamGroup]] = []
    for param_group in param_groups:
        if (
            runs
            and runs[-1][-1].is_uneven == param_group.is_uneven
            and _complete_axes(runs[-1][-1]) == _complete_axes(param_group)
            and _coded_along(runs[-1][-1]) == _coded_along(param_group)
            and sum(other.numel for other in runs[-1]) + param_group.numel <= max_numel
        ):
            runs[-1].append(param_group)
        else:
            runs.append([param_group])
    return runs


def _coded_along(param_group: ParamGroup) -> tuple[str, ...] | None:
    """The axes along which compressed parameters are sliced: codes of copies must be equal, and depend on all
    that lies in the bucket.
    """
    return param_group.sliced_axes if param_group.is_compressed else None


def _complete_axes(param_group: ParamGroup) -> set[str]:
    """The axes of samples and tokens along which a gradient is complete: each rank has another slice."""
    sliced = param_group.param_shardings[0].sliced_dims
    return {axis for axis in (*axes_with("samples"), *axes_with("tokens")) if axis in sliced}


def replicate_gradients(sharding: ShardingPlan, axis: str) -> ShardingPlan:
    """Returns `sharding` with every gradient whole on each rank along `axis`, and summed there."""

    def replicated(param_sharding: ParamSharding) -> ParamSharding:
        axes = sharding.param_sum_axes(param_sharding, axis)
        return replace(param_sharding, grad_layout=param_sharding.grad_layout.with_placement(axes, I))

    return sharding.map_param_shardings(replicated)


def check_replicas(name: str, axis: str, algorithm: str, sharding: ShardingPlan) -> Iterator[Diagnostic]:
    """Yields what is wrong with full replicas along `axis`."""
    if axis not in sharding.grad_sum_axes:
        yield same_data_diagnostic("replicas", axis, f"strategies.{name}")
    elif any(each.flat_shard_axes and not each.rows_on_servers for each in sharding.param_shardings):
        text = f"{name} keeps full replicas along {axis}, and zero shards the weights"
        cut = any(axis in param_sharding.flat_shard_axes for param_sharding in sharding.param_shardings)
        more = "" if cut else f', and write replicate_axis = "{axis}" in the strategy zero'
        yield Diagnostic(text, f"remove {name}{more}", f"strategies.{name}")
    else:
        yield from _check_single_axis(name, axis, sharding)
    ranks = sharding.mesh.group_size(sharding.sum_axes(axis))
    yield from rule_diagnostics(algorithm, ranks, f"strategies.{name}.algorithm")


def _check_single_axis(name: str, axis: str, sharding: ShardingPlan) -> Iterator[Diagnostic]:
    copied = [param_sharding for param_sharding in sharding.param_shardings if param_sharding.param.trainable]
    whole = [
        each
        for each in GRAD_SUM_AXES
        if any((h.layout.placement(each), h.grad_layout.placement(each)) == (R, I) for h in copied)
    ]
    others = [each for each in whole if each != axis]
    if others:
        text, ranks = (
            f"weights are kept whole along {others[0]} already, and now along {axis} too",
            sharding.mesh.group_size((*others, axis)),
        )
        fix = f"make it one axis: mesh.{others[0]} = {ranks}, mesh.{axis} = 1"
        tokens = [each for each in (*others, axis) if each in sharding.token_axes]
        if tokens:
            fix = (
                f"keep one of them, along an axis of samples if there is one: it sums over "
                f"{' and '.join(tokens)} too"
            )
        yield Diagnostic(text, fix, f"strategies.{name}.axis")


@dataclass(frozen=True)
class _BucketEnd:
    last_action: Action
    buffer: str = ""
    grads: tuple[str, ...] = ()

    def apply(self, actions: list[Action]) -> list[Action]:
        awaited, ended = self.last_action, list[Action]()
        if awaited.kind == "UNPACK":
            actions.insert(first_grad_reader(actions, awaited.microbatch), awaited)
        for action in with_grad_waits(actions, (awaited.name,), awaited.microbatch):
            if action.kind == "STEP" and action.microbatch == awaited.microbatch and self.buffer:
                kept = tuple(name for name in action.frees if name not in self.grads)
                action = replace(action, frees=(*kept, self.buffer))
            ended.append(action)
        return ended
