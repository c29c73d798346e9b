"""Activation offload: what blocks keep for their backward rests on the host, or on disk, between the two.

Why it works: what a block keeps is read twice, by its forward and by its backward, and the rest of the model
runs in between. So it can leave the device behind the forward and come back ahead of the backward, on a
stream of its own, while other blocks compute. Nothing is computed twice, and every bit is the same. With
activation checkpointing a block keeps its input alone; then that is what leaves: the inputs of all blocks are
what checkpointing leaves on the device, and they grow with the number of layers.

    a block call that is ...   leaves behind its forward                       comes back ahead of
    checkpointed               its inputs, which it keeps                      RECOMPUTE
    not checkpointed           what autograd saves inside it, each storage     B (of a split backward I;
                               once, however many views of it are saved        it stays until W)

    prefetch = 1
    compute    F0  F1     F2     F3  LOSS  B3     B2          B1          B0
    copy_out       OFF0   OFF1
    copy_in                                FETCH1 (B3 runs)   FETCH0 (B2 runs)

    OFFLOAD_ACTIVATIONS    copies what the block call keeps to the host, and frees it on the device
    FETCH_ACTIVATIONS      copies it back, `prefetch` backwards before its own

    with a `folder` it goes on to a file of the rank there, through buffers of the host
    (plan/step/memory/activation_files.py)
    WRITE_ACTIVATIONS      writes the buffer behind the copy
    READ_ACTIVATIONS       reads it again, a backward ahead of FETCH_ACTIVATIONS

    bytes per microbatch: what leaves, once out and once in; with a folder as much written and read, in whole
                          blocks of 4096 for each block call
    device memory         the kept activations of prefetch + 1 block calls, in place of all; and of those that
                          stay: the last prefetch + 1, whose backward follows at once, unless `blocks` names
                          them. Pipelines: of all microbatches in flight, those leave
    host memory           what has left: the sum over block calls and microbatches in flight; with a folder
                          that is on disk, and the host holds 4 x the most that one block call keeps

Left on the device: parameters and buffers, what the block takes and returns where the saved activations leave
(the next block, or the one before, holds it too), and the inputs of a checkpointed block call that are no
output of another checkpointed one (embedded tokens of an embedding that is not checkpointed, masks), that
several use, that glue computes with, or that another pipeline stage has sent. `host_gb` bounds the host
memory of each rank: a plan that needs more is refused before anything starts.

Cost: no bytes sent to other ranks. Time: none, if a block computes longer than its copies take, and the disk
moves as much meanwhile; some microseconds per saved tensor. The bytes of inputs are exact; those inside of
blocks are as measured in a trial (`activation_checkpointing`), and those of experts as expected.
The file is made in full at the start, without a name: the system removes it with the process. A step that
keeps more than the plan expects (experts, longer sequences) makes it longer, or ends with the error of a
full disk. `disk_offload` may use the same folder.
Limits: refused are block calls whose saved activations `gist` encodes, `memory_budget` with block calls that
it offloads itself, and inputs of checkpointed blocks in
models that write in place into what blocks return. Tensors that a user's autograd function keeps by itself,
not by save_for_backward, stay. A write in place into a saved tensor is an error, as it is without.
Paper: Rhu et al. 2016, "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network
Design", MICRO, arXiv 1602.08124 (section III); Rajbhandari et al. 2021, "ZeRO-Infinity", arXiv 2104.07857
(section 5.2: checkpoints of activations on the CPU, and on NVMe).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from meshwright.parallel.memory.gist import is_encoded
from meshwright.parallel.memory.tiers.kept_tensor_copies import KeptTensorCopies
from meshwright.parallel.memory.tiers.kept_tensor_file import KeptTensorFile
from meshwright.plan.hardware.memory_tiers import MemoryTier
from meshwright.plan.job.errors import Diagnostic, PlanError, format_nbytes
from meshwright.plan.job.field_constraints import above, at_least
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.block_patterns import matches_any, unmatched_patterns
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.memory.activation_copies import (
    GATHER,
    PARTITION,
    BackwardPlaces,
    LeavingActivations,
    num_calls_between,
    with_activation_copies,
)
from meshwright.plan.step.memory.activation_files import activation_nbytes, through_file
from meshwright.plan.step.memory.kept_inputs import (
    KeptInput,
    checkpointed_calls,
    kept_inputs,
    split_kept_inputs,
)
from meshwright.plan.step.memory.memory_names import output_name
from meshwright.plan.step.memory.recomputed_segments import refuse_dropped_inputs
from meshwright.plan.step.program import Action, Allocation, Program
from meshwright.plan.step.single_device_program import (
    CHECKPOINTED_FORWARD,
    FORWARD_KINDS,
    WEIGHT_GRAD_KINDS,
)
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

LOCATION = "strategies.activation_offload"
FOLDER_FIX = 'name a folder on a fast disk of each host, which exists there: folder = "/nvme/scratch"'
DISK_GB_FIX = "write the GB of the disk that the activations of each rank may use, or remove disk_gb"
HOST_GB_FIX = "write the GB of host memory that the activations of each rank may use, or remove host_gb"
Key = tuple[str, int | None]  # block call and microbatch


@dataclass(frozen=True)
class ActivationOffload(Strategy):
    """Keeps activations of the block calls that match one of `blocks` on the host until their backward;
    without `blocks`, of all but those whose backward follows at once.

    They come back `prefetch` backwards before their own. Each rank may use `host_gb` GB (2^30 bytes) of host
    memory for them; None: no bound. With a `folder` they go on to a file of each rank there, of at most
    `disk_gb` GB, and only buffers stay in host memory.
    """

    name: ClassVar[str] = "activation_offload"
    phase: ClassVar[StrategyPhase] = "comm"  # once it is known which block calls run again
    needs_stage_boundaries: ClassVar[bool] = True
    blocks: tuple[str, ...] = ()
    prefetch: int = field(default=1, metadata=at_least(0))
    host_gb: float | None = field(default=None, metadata=above(0, fix=HOST_GB_FIX))
    folder: str = ""
    disk_gb: float | None = field(default=None, metadata=above(0, fix=DISK_GB_FIX))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        block_calls = sharding.model_spec.block_calls
        yield from unmatched_patterns(self.blocks, sharding.model_spec, f"{LOCATION}.blocks")
        if len(block_calls) == 1:
            text = f"the model runs as one block, '{block_calls[0]}', whose backward follows its forward at "
            text += "once: nothing can leave in between"
            yield Diagnostic(text, "declare its layers as blocks: Model(blocks=[...])", f"{LOCATION}.blocks")
        if self.disk_gb is not None and not self.folder:
            text, fix = f"disk_gb = {self.disk_gb:g} bounds a file, and no folder is named for it", FOLDER_FIX
            yield Diagnostic(text, fix, f"{LOCATION}.disk_gb")

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        tiers = replace(sharding.tiers, activations="disk" if self.folder else "host")
        if self.folder:
            tiers = tiers.in_folder(self.folder, f"{LOCATION}.folder")
        return replace(sharding, tiers=tiers)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        edited = program.edit(lambda actions: self._offload(actions, view, job))
        if edited == program and view.plan.mesh.pp == 1:
            text = "nothing leaves the device: the backward of every block follows within "
            text += f"{self.prefetch + 1} others, or what it keeps has to stay"
            fix = "set prefetch = 0, name other `blocks`, or remove activation_offload"
            raise PlanError(text, fix=fix, location=LOCATION)
        edited = edited.edit(through_file) if self.folder else edited
        self._refuse_above(edited, "host", self.host_gb)
        self._refuse_above(edited, "disk", self.disk_gb)
        return edited

    def _refuse_above(self, program: Program, tier: MemoryTier, bound_gb: float | None) -> None:
        """Raises PlanError if a rank needs more of `tier` than it may use."""
        needed, key = max(activation_nbytes(role.actions, tier) for role in program.roles), f"{tier}_gb"
        if bound_gb is not None and needed > bound_gb * 2**30:
            where = "host memory" if tier == "host" else "the disk"
            text = f"the activations of a rank need {format_nbytes(needed)} of {where}, and {key} = "
            text += f"{bound_gb:g} allows less"
            fix = f"set {key} = {1.01 * needed / 2**30:.3g} or more, or name fewer `blocks`"
            raise PlanError(text, fix=fix, location=f"{LOCATION}.{key}")

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        state = runtime.state
        return KeptTensorFile(state).handlers if self.folder else KeptTensorCopies(state).handlers

    def _offload(self, actions: list[Action], view: RankView, job: Job) -> list[Action]:
        refuse_dropped_inputs(actions, self.name)
        inputs: Mapping[str, list[KeptInput]] = {}
        if any(map(self._is_selected, checkpointed_calls(actions))):
            inputs = kept_inputs(actions, view, job, self.name)
        chosen = self._choose_forwards(actions, inputs)
        kept: dict[int | None, list[KeptInput]] = {}
        for forward in (actions[index] for index in chosen if actions[index].kind == CHECKPOINTED_FORWARD):
            kept.setdefault(forward.microbatch, []).extend(inputs.get(forward.subject, ()))
        actions = split_kept_inputs(actions, kept)
        finder, leaving = _LeavingFinder.of(actions, self.prefetch), list[LeavingActivations]()
        for index in chosen:
            forward = actions[index]
            if forward.kind == CHECKPOINTED_FORWARD:
                leaving.append(finder.inputs(index, inputs.get(forward.subject, ())))
            else:
                _refuse_encoded(forward, view)
                leaving.append(finder.saved(index))
        return with_activation_copies(actions, [each for each in leaving if each.nbytes])

    def _choose_forwards(
        self, actions: Sequence[Action], inputs: Mapping[str, Sequence[KeptInput]]
    ) -> list[int]:
        """Returns the indices of the forwards that something leaves behind."""
        places, found = BackwardPlaces.of(actions), list[int]()
        for index, action in enumerate(actions):
            if action.kind not in FORWARD_KINDS or not self._is_selected(action.subject):
                continue
            if action.kind == CHECKPOINTED_FORWARD and action.subject not in inputs:
                continue
            fetch = places.fetch_index((action.subject, action.microbatch), index, self.prefetch)
            if self.blocks or num_calls_between(actions, index, fetch) > self.prefetch + 1:
                found.append(index)
        return found

    def _is_selected(self, block_call: str) -> bool:
        return not self.blocks or matches_any(block_call, self.blocks)


def saved_activations(
    actions: Sequence[Action], block_calls: Collection[str], prefetch: int = 1
) -> list[LeavingActivations]:
    """Returns what leaves of `block_calls` that do not run again: what autograd saves inside them. It comes
    back `prefetch` backwards before their own.
    """
    finder = _LeavingFinder.of(actions, prefetch)
    forwards = (index for index, action in enumerate(actions) if action.kind == "F")
    found = (finder.saved(index) for index in forwards if actions[index].subject in block_calls)
    return [each for each in found if each.nbytes]


@dataclass(frozen=True)
class _LeavingFinder:
    """Finds what leaves behind a forward, and where it has to be back.

    `indices` are those of the actions by name, `freed` what the last backward of a block call frees.
    """

    actions: Sequence[Action]
    prefetch: int
    places: BackwardPlaces
    indices: Mapping[str, int]
    freed: Mapping[Key, frozenset[str]]

    @classmethod
    def of(cls, actions: Sequence[Action], prefetch: int) -> "_LeavingFinder":
        freed = {
            (action.subject, action.microbatch): frozenset(action.frees)
            for action in actions
            if action.kind in WEIGHT_GRAD_KINDS
        }
        indices = {action.name: index for index, action in enumerate(actions)}
        return cls(actions, prefetch, BackwardPlaces.of(actions), indices, freed)

    def saved(self, index: int) -> LeavingActivations:
        """Returns what the forward at `index` allocates and its backward frees, without its output."""
        forward = self.actions[index]
        key = forward.subject, forward.microbatch
        output = output_name(forward.subject, forward.microbatch or 0)
        allocations = tuple(
            each for each in forward.allocations if each.name in self.freed[key] and each.name != output
        )
        fetch = self.places.fetch_index(key, index, self.prefetch)
        return LeavingActivations(forward, index, fetch, (self._reader(key),), allocations)

    def inputs(self, index: int, inputs: Sequence[KeptInput]) -> LeavingActivations:
        """Returns the inputs that the forward at `index` keeps: whole, or the part that this rank keeps."""
        forward = self.actions[index]
        key, microbatch = (forward.subject, forward.microbatch), forward.microbatch
        behind, readers, allocations = index, {self._reader(key)}, list[Allocation]()
        for each in inputs:
            part = self.indices.get(Action(PARTITION, each.name, microbatch).name)
            if part is None:
                allocations.append(each.allocation(microbatch))
            else:
                behind = max(behind, part)
                readers.add(self.indices[Action(GATHER, each.name, microbatch).name])
                allocations += self.actions[part].allocations
        fetch = min(*readers, self.places.fetch_index(key, behind, self.prefetch))
        names = tuple(each.name for each in inputs)
        return LeavingActivations(forward, behind, fetch, tuple(sorted(readers)), tuple(allocations), names)

    def _reader(self, key: Key) -> int:
        return self.places.starts[self.places.numbers[key]]


def _refuse_encoded(forward: Action, view: RankView) -> None:
    if forward.subject in view.plan.encoded_calls or is_encoded(forward):
        text = f"gist encodes what autograd saves in '{forward.subject}', so that there is nothing to copy"
        fix = "name other blocks in one of both (`blocks`), or remove one of both"
        raise PlanError(text, fix=fix, location=LOCATION)
