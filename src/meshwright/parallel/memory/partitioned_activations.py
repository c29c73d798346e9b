"""Partitioned activations: along tp, each rank keeps a part of the inputs that checkpointed blocks keep.

Why it works: tensor parallelism shards matrices, and between blocks all ranks along `tp` have the same
residual stream. With activation checkpointing every block keeps its input, so all ranks keep the same
tensors. It is enough that each keeps one part of them; an all-gather makes the whole input again before the
block runs a second time. This is the P_a of ZeRO-R. Sequence parallelism needs none of it: there ranks have
slices anyway.

    tp = 3, the block call v keeps x       rank 0        rank 1        rank 2
    F_CHECKPOINTED(v)                      x             x             x
    PARTITION_ACTIVATIONS(x)               x[0]          x[1]          x[2]
    ...                                    what else runs, with x / 3 on each rank
    GATHER_ACTIVATIONS(x)                  x             x             x         all-gather
    RECOMPUTE(v)  B(v)

    PARTITION_ACTIVATIONS    copies the part of this rank, and frees the input
    GATHER_ACTIVATIONS       all-gathers the parts, `prefetch` backwards before its own

    t ranks along tp, an input of n elements of w bytes
        kept         ceil(n / t) w         instead of n w; the last part is padded
        all-gather   ceil(n / t) w         from each rank, once per input and microbatch

Parts are of the flat tensor: they need no dim that t divides. The bits are those of the plan without it,
because all ranks have the same bits. With `activation_offload` the part is what leaves for the host.

Cost: the bytes above: as many as an all-gather of sequence parallelism, for each block once. The copy of the
part. Time: none, if the gather of a block overlaps with the backward before it.
Limits: the inputs that are partitioned are those that `activation_offload` may copy: outputs of checkpointed
block calls that one other takes, and nothing else holds. Refused without tensor parallelism, without
activation checkpointing, where residual streams are in slices along tp, and in models that write in place
into what blocks return.
Paper: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC20,
arXiv 1910.02054 (section 6.1).
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from meshwright.comm.backends.fake import CompletedWork
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.parallel.memory.tiers.kept_tensor_copies import InputLeaves
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.field_constraints import at_least, one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.memory.activation_copies import (
    GATHER,
    PARTITION,
    ActivationMove,
    BackwardPlaces,
    insert_moves,
    num_calls_between,
)
from meshwright.plan.step.memory.kept_inputs import (
    KeptInput,
    checkpointed_calls,
    kept_inputs,
    split_kept_inputs,
)
from meshwright.plan.step.memory.memory_names import kept_part_name
from meshwright.plan.step.memory.recomputed_segments import refuse_dropped_inputs
from meshwright.plan.step.program import Action, Allocation, Program, Transfer
from meshwright.plan.step.single_device_program import CHECKPOINTED_FORWARD
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

if TYPE_CHECKING:
    from meshwright.engine.runtime.rank_state import RankState

LOCATION = "strategies.partitioned_activations"
AXIS = "tp"
Key = tuple[str, int | None]  # value and microbatch


@dataclass(frozen=True)
class PartitionedActivations(Strategy):
    """Keeps, on each rank along `axis`, a part of the inputs that checkpointed block calls keep.

    They are gathered `prefetch` backwards before their own.
    """

    name: ClassVar[str] = "partitioned_activations"
    phase: ClassVar[StrategyPhase] = "storage"  # before activation_offload, which copies the parts
    needs_stage_boundaries: ClassVar[bool] = True
    axis: str = field(default=AXIS, metadata=one_of(AXIS))
    prefetch: int = field(default=1, metadata=at_least(0))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        if sharding.mesh.size(self.axis) == 1:
            text = f"mesh.{self.axis} = 1: there are no other ranks with the same residual stream"
            fix = f"set mesh.{self.axis} to 2 or more, or use activation_offload in its place"
            yield Diagnostic(text, fix, LOCATION)

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        if sharding.mesh.size(self.axis) > 1 and self.axis in sharding.residual_layout.axes_with("S"):
            text = f"the residual stream is in slices along {self.axis} already, and so is what blocks keep"
            fix = "remove partitioned_activations, or the strategy that shards the residual stream"
            yield Diagnostic(text, fix, LOCATION)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        edited = program.edit(lambda actions: self._partition(actions, view, job))
        if edited == program and view.plan.mesh.pp == 1:
            text = "no block keeps an input that all ranks hold and that nothing else needs"
            fix = "add activation_checkpointing with at least three blocks in a row, or remove "
            raise PlanError(text, fix=f"{fix}partitioned_activations", location=LOCATION)
        return edited

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        return _Partitions(runtime.state).handlers

    def _partition(self, actions: list[Action], view: RankView, job: Job) -> list[Action]:
        if not checkpointed_calls(actions):
            return actions
        refuse_dropped_inputs(actions, self.name)
        inputs = {
            block_call: [each for each in found if self.axis in each.replicated_axes]
            for block_call, found in kept_inputs(actions, view, job, self.name).items()
        }
        places = BackwardPlaces.of(actions)
        moves = list[ActivationMove]()
        kept: dict[int | None, list[KeptInput]] = {}
        for index, forward in enumerate(actions):
            if forward.kind != CHECKPOINTED_FORWARD or not inputs.get(forward.subject):
                continue
            key = forward.subject, forward.microbatch
            gather_at = places.fetch_index(key, index, self.prefetch)
            if num_calls_between(actions, index, gather_at) <= self.prefetch + 1:
                continue  # its backward follows at once
            reader = places.starts[places.numbers[key]]
            for each in inputs[forward.subject]:
                moves.append(ActivationMove(*self._pair(forward, each, view), index, gather_at, (reader,)))
                kept.setdefault(forward.microbatch, []).append(each)
        return insert_moves(split_kept_inputs(actions, kept), moves)

    def _pair(self, forward: Action, kept: KeptInput, view: RankView) -> tuple[Action, Action]:
        num_ranks, microbatch = view.plan.mesh.size(self.axis), forward.microbatch
        nbytes = -(-kept.numel // num_ranks) * kept.value.itemsize
        whole, part = kept.allocation(microbatch), Allocation(kept_part_name(kept.name, microbatch), nbytes)
        partition = Action(
            PARTITION,
            kept.name,
            microbatch,
            waits=(forward.name,),
            tensors=(kept.name,),
            allocations=(part,),
            frees=(whole.name,),
        )
        gather = replace(
            partition,
            kind=GATHER,
            stream="comm",
            waits=(partition.name,),
            transfer=Transfer("all_gather", (self.axis,), nbytes, dtype=kept.value.dtype),
            allocations=(replace(whole, nbytes=nbytes * num_ranks),),
            frees=(part.name,),
        )
        return partition, gather


@dataclass(eq=False)
class _PartitionedLeaf:
    """A leaf whose data is the part of this rank, with what it is when it is whole."""

    leaf: weakref.ref[torch.Tensor]
    size: torch.Size
    stride: tuple[int, ...]


class _Partitions:
    """Partitions and gathers the inputs of checkpointed block calls of one rank."""

    def __init__(self, state: "RankState") -> None:
        self._state, actions = state, state.plan.actions
        partitions = [action for action in actions if action.kind == PARTITION]
        self._forwards = {action.name: action for action in actions if action.kind == CHECKPOINTED_FORWARD}
        self._names: dict[Key, list[str]] = {}  # of the values that a block call keeps
        for action in partitions:
            forward = self._forwards[action.waits[0]]
            self._names.setdefault((forward.subject, forward.microbatch), []).append(action.subject)
        self._leaves = InputLeaves(action.subject for action in partitions)
        self._kept: dict[Key, _PartitionedLeaf] = {}
        calls = [*(call for call, _ in self._names), *self._leaves.producers]
        for block in dict.fromkeys(map(block_of, calls)):
            state.patches.wrap_forward(block, partial(self._run, block))
        self.handlers: dict[str, Handler] = {PARTITION: self.partition, GATHER: self.gather}

    def _run(self, block: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a block; notes the inputs that it keeps."""
        action = self._forwards.get(self._state.current_action)
        if action is None or block_of(action.subject) != block or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        inputs = tree_tensors((args, kwargs))
        names = self._names.get((action.subject, action.microbatch), [])
        for name, leaf in self._leaves.find(names, action.microbatch, inputs).items():
            kept = _PartitionedLeaf(weakref.ref(leaf), leaf.shape, leaf.stride())
            self._kept[name, action.microbatch] = kept
        outputs = forward(*args, **kwargs)
        self._leaves.note_outputs(action, inputs, outputs)
        return outputs

    @torch.no_grad()
    def partition(self, action: Action) -> None:
        """Keeps the part of this rank, as the data of the leaf."""
        kept = self._kept.get((action.subject, action.microbatch))
        leaf = None if kept is None else kept.leaf()
        if leaf is None:  # a forward may leave blocks out
            return
        group = self._state.world.group((AXIS,))
        with torch._C.DisableTorchFunction():
            flat = leaf.detach().as_strided((leaf.numel(),), (1,), 0)
            part_numel = -(-flat.numel() // group.size)
            part = flat.new_zeros(part_numel)
            mine = flat[group.index * part_numel : (group.index + 1) * part_numel]
            part[: mine.numel()].copy_(mine)
            leaf.data = part

    @torch.no_grad()
    def gather(self, action: Action) -> None:
        """Starts to gather the parts into the leaf."""
        kept = self._kept.pop((action.subject, action.microbatch), None)
        leaf = None if kept is None else kept.leaf()
        if kept is None or leaf is None:
            self._state.issue(action, CompletedWork())
            return
        group = self._state.world.group((AXIS,))
        with torch._C.DisableTorchFunction():
            part = leaf.detach()
            gathered = part.new_empty(group.size * part.numel())
            leaf.data = gathered.as_strided(kept.size, kept.stride, 0)
            self._state.issue(action, group.all_gather(gathered, part, action=action.name))
