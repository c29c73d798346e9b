"""Disk offload: optimizer states, masters and shards of weights rest in a file (ZeRO-Infinity).

Why it works: a step reads and writes the 12 bytes of states of each element once, at its end, group by group
in a known order. So a fast disk can stream them: while the host steps one parameter group, the disk writes
the group before it and reads those behind it. What the host has to hold is `num_buffers` of the largest
group, however large the model is. With "weights" in `what` the shards of ZeRO-3 rest there as well: they are
read ahead of each all-gather. The arithmetic is that of `offload` with step_on = "host": where the same
kernels step, every bit is equal to the plan without it.

    num_buffers = 2, groups 0 to 3: a buffer is read, stepped and written, then it takes another group
    compute    B ....   LOCAL_NORM CLIP
    disk       READ(0) READ(1)         WRITE(0)  READ(2)  WRITE(1)  READ(3)  WRITE(2)           WRITE(3)
    copy_out                   GRAD(0)   GRAD(1)
    host                         STEP(0)   STEP(1)            STEP(2)            STEP(3)
    copy_in                             PARAM(0)  PARAM(1)           PARAM(2)           PARAM(3)

    weights on disk, num_buffers = 2, uses 0 to 2 of shards
    disk       READ_PARAM(0) (1)                   READ_PARAM(2)                             WRITE_PARAM
    copy_in                      FETCH_PARAM(0)                   FETCH_PARAM(1)
    comm                                    UNSHARD(0)                      UNSHARD(1)
    compute                                      F(0)                            F(1)   ...

    READ_STATES      reads masters and optimizer states of a group from the file into a buffer of the host
    READ_PARAM       reads the shard of weights of a group into a buffer of the host, before each use
    OFFLOAD_GRAD     copies the summed gradients of the group to the host
    FETCH_PARAM      copies weights to the device: what was stepped, or a shard before its all-gather
    WRITE_PARAM      writes the stepped shard, where weights rest on disk
    WRITE_STATES     writes masters and optimizer states back, and frees the buffer

    bytes of a rank per step, N elements stepped, bf16 weights and gradients, fp32 masters and Adam states,
    u uses of a gathered group:
        disk         12 N read, 12 N written; and step counters (4 for each parameter), and the rest of the
                     last block (4096) of each group
          weights    2 u N read, 2 N written, likewise whole blocks of each group
        host link    2 N out, 2 N in; with weights 2 u N in
    device memory saved: 12 N; with weights 2 N more. Host memory: num_buffers x (12 + 2 + 2) G for a largest
    group of G elements, and 4 G for the cast of its gradients; with weights num_buffers x 2 G more

The first groups are read while the backward runs, behind the last weights that it needs. The file has no name
in `folder`: the system removes it with the process that made it, however that ends, and no other run or rank
can open it. It is allocated in full at the start, so a full disk is found before the first step. It is never
a checkpoint: checkpoints are written from it and read into it, so a run continues without it, or with it, to
the bit. A step that is left out (loss guard, overflow) writes nothing. The first step of a run finds no
optimizer states, so it reads masters alone. `host_gb` and `disk_gb` bound what a rank may use: a plan that
needs more is refused before anything starts.
Cost: a step takes as long as the disk needs for both ways, if that is longer than what it overlaps with; with
weights, a block takes as long as the read of its shard, if that is longer. The first read of a step hides
behind nothing, and with num_buffers = 1 no read does. Where no master is wider than its weight, the file has
the weights twice: as they are stepped, and as they are gathered.
Limits: Linux. A buffer holds a whole parameter group: an embedding may be the largest; zero divides it by the
number of ranks. In the first step the states of one group more lie in host memory, where the optimizer makes
them. Summed gradients stay on the device, and weights that no strategy stores in shards. A disk that fails
while a checkpoint is saved, or an evaluation reads weights, is an error as in a step; while initial values or
full parameters are copied it ends the process with SIGBUS.
Refused are optimizers that read whole matrices (Muon, Adafactor) or step slices for other ranks, those that
the caller makes, updates within a step (PipeDream) and data_parallel_master.
Paper: Rajbhandari et al. 2021, "ZeRO-Infinity", arXiv 2104.07857 (section 6.3: states on NVMe, buffers).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import ClassVar, Literal, get_args

from meshwright.parallel.memory.tiers.offload_actions import (
    copy_of_group,
    host_buffer_nbytes,
    host_step,
    other_owner_diagnostics,
    refuse_above,
    refuse_updates_within,
    whole_matrix_diagnostics,
)
from meshwright.plan.hardware.memory_tiers import FILE_BLOCK_NBYTES
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.field_constraints import above, at_least, not_empty, one_of
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.flat_param import round_up
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.memory.model_states import GroupStates, cast_nbytes, group_states
from meshwright.plan.step.program import Action, Allocation, Program, with_waits
from meshwright.plan.step.single_device_program import INPUT_GRAD_KINDS, step_by_group
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

KindOnDisk = Literal["optimizer_states", "weights"]
FOLDER_FIX = "name a folder on a fast disk of each host, which exists there: folder = '/nvme/scratch'"
NUM_BUFFERS_FIX = "write num_buffers = 3: one is read, one stepped, one written"
HOST_GB_FIX = "write the GB of host memory that each rank may use, or remove host_gb"
DISK_GB_FIX = "write the GB of the disk that each rank may use, or remove disk_gb"


@dataclass(frozen=True)
class DiskOffload(Strategy):
    """Keeps `what` in a file of each rank in `folder`: optimizer states with master weights, which the host
    steps, and "weights", the shards of ZeRO-3.

    They pass through `num_buffers` buffers, each as large as the largest parameter group. Each rank may use
    `host_gb` GB (2^30 bytes) of host memory, and `disk_gb` GB of the disk; None: no bound.
    """

    name: ClassVar[str] = "disk_offload"
    phase: ClassVar[StrategyPhase] = "comm"
    folder: str = field(default="", metadata=not_empty(FOLDER_FIX))
    num_buffers: int = field(default=3, metadata=at_least(1, NUM_BUFFERS_FIX))
    what: tuple[KindOnDisk, ...] = field(
        default=("optimizer_states",), metadata=one_of(*get_args(KindOnDisk))
    )
    host_gb: float | None = field(default=None, metadata=above(0, fix=HOST_GB_FIX))
    disk_gb: float | None = field(default=None, metadata=above(0, fix=DISK_GB_FIX))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        if "optimizer_states" not in self.what:
            text = f"what = {list(self.what)} leaves out optimizer_states, the largest part"
            yield Diagnostic(text, 'add "optimizer_states" to what', "strategies.disk_offload.what")
        yield from whole_matrix_diagnostics(sharding, self.name)

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        trained = (each for each in sharding.param_shardings if each.param.trainable)
        owned = next((each for each in trained if each.owner_axes and each.shard_alignment != "matrix"), None)
        if owned is not None:
            text = f"one rank steps {owned.param.name} for others that have slices of it"
            fix = 'use an optimizer that steps any slice (optimizer.name = "adamw"), or remove disk_offload'
            yield Diagnostic(text, fix, "strategies.disk_offload")
        if "weights" in self.what and not any(each.is_stored_sharded for each in sharding.param_shardings):
            text = "weights are gathered from shards on disk, and no strategy stores shards"
            fix = "use zero with stage = 3, or remove weights from what"
            yield Diagnostic(text, fix, "strategies.disk_offload.what")
        yield from other_owner_diagnostics(sharding, self.name, "disk")

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        tiers = sharding.tiers.in_folder(self.folder, "strategies.disk_offload.folder")
        tiers = replace(tiers, optimizer_states="disk", step="host")
        tiers = replace(tiers, weights="disk") if "weights" in self.what else tiers
        return replace(sharding, tiers=tiers)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        states = {each.name: each for each in group_states(job, view)}

        group_of = {name: group.name for group in view.all_param_groups for name in group.names}

        def edit(actions: list[Action]) -> list[Action]:
            refuse_updates_within(actions, self.name)
            if "weights" in self.what:
                shards = {name: states[group].weight_record_nbytes for name, group in group_of.items()}
                actions = _read_before_use(actions, self.num_buffers, shards)
            return _through_buffers(step_by_group(actions, view), self.num_buffers, states)

        edited = program.edit(edit)
        made = max((each.state_nbytes for each in states.values()), default=0)  # by the first step
        on_host = host_buffer_nbytes(edited) + cast_nbytes(job, states.values()) + made
        refuse_above(on_host, self.host_gb, "host_gb", "host memory", self.name)
        on_disk = sum(each.record_nbytes + each.weight_record_nbytes for each in states.values())
        refuse_above(on_disk, self.disk_gb, "disk_gb", "disk", self.name)
        return edited

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        disk = runtime.state.disk
        if disk is None:
            text, fix = "the plan keeps no state on disk", "make the plan with disk_offload"
            raise PlanError(text, fix=fix, location="strategies.disk_offload")
        runtime.wrap("STEP", disk.with_states_in_memory)
        return disk.handlers


@dataclass(frozen=True)
class _GroupActions:
    """The actions of one parameter group, in the order in which they become possible."""

    read: Action
    copy_gradient: Action
    step: Action
    copy_weights: Action
    write: Action

    @property
    def update(self) -> tuple[Action, ...]:
        """Those that take the place of its STEP."""
        return self.step, self.copy_weights, self.write


def _read_before_use(
    actions: Sequence[Action], num_buffers: int, shard_nbytes: Mapping[str, int]
) -> list[Action]:
    """Returns `actions` with a read of each shard of weights ahead of the copy into its full parameter.

    `shard_nbytes` are what a read moves, by parameter. Behind a copy its buffer takes the shard of a later
    use; this read comes before the next copy, because whatever is started later waits for it.
    """
    copies = [action for action in actions if action.kind == "FETCH_PARAM"]
    sizes = [shard_nbytes[copy.tensors[0]] for copy in copies]
    num_buffers, largest = min(num_buffers, len(copies)), max(sizes, default=0)
    reads, moved = list[Action](), dict[str, list[Action]]()
    for number, (copy, nbytes) in enumerate(zip(copies, sizes, strict=True)):
        buffer = Allocation(f"host parameter buffer {number % num_buffers}", largest, tier="host")
        waits = () if number < num_buffers else (copies[number - num_buffers].name,)
        reads.append(copy_of_group("READ_PARAM", copy, nbytes, waits, allocations=(buffer,)))
    for number, copy in enumerate(copies):
        begin = number + num_buffers - 1 if number else 0
        read, (buffer,) = reads[number], reads[number].allocations
        fetch = replace(with_waits(copy, (read.name,)), frees=(*copy.frees, buffer.name))
        moved[copy.name] = [*reads[begin : number + num_buffers], fetch]
    return [each for action in actions for each in moved.get(action.name, (action,))]


def _through_buffers(
    actions: Sequence[Action], num_buffers: int, states: Mapping[str, GroupStates]
) -> list[Action]:
    """Returns `actions` with the states of each group in a buffer of the host during its STEP alone."""
    steps = [action for action in actions if action.kind == "STEP"]
    groups = _group_actions(steps, min(num_buffers, len(steps)), states)
    first_use = groups[:num_buffers]  # of a buffer; each group frees it for one that comes later
    later = dict(zip_longest((each.step.name for each in groups), groups[num_buffers:]))
    by_step = {each.step.name: each for each in groups}
    begin = next((at for at, action in enumerate(actions) if action.kind in INPUT_GRAD_KINDS), 0)
    # a disk reads in order, and a backward waits for the weights
    begin = max([begin, *(at + 1 for at, action in enumerate(actions) if action.kind == "READ_PARAM")])
    found = list[Action]()
    for at, action in enumerate(actions):
        if at == begin:
            found += [each.read for each in first_use]
        if action.name not in by_step:
            found.append(action)
        else:
            found += by_step[action.name].update
            following = later[action.name]
            found += [] if following is None else [following.read, following.copy_gradient]
        if action.kind == "CLIP":
            found += [each.copy_gradient for each in first_use]
    return found


def _group_actions(
    steps: Sequence[Action], num_buffers: int, states: Mapping[str, GroupStates]
) -> list[_GroupActions]:
    sizes = [_buffer_sizes(states[step.subject]) for step in steps]
    largest = {name: max(each[name] for each in sizes) for name in (sizes[0] if sizes else ())}
    found = list[_GroupActions]()
    for number, step in enumerate(steps):
        group, slot = states[step.subject], number % num_buffers
        buffers = {
            name: (Allocation(f"host {name} buffer {slot}", nbytes, tier="host"),) if nbytes else ()
            for name, nbytes in largest.items()
        }
        names = {name: tuple(each.name for each in held) for name, held in buffers.items()}
        before = found[number - num_buffers] if number >= num_buffers else None  # it had these buffers
        read = copy_of_group(
            "READ_STATES",
            step,
            group.record_nbytes,
            () if before is None else (before.write.name,),
            allocations=buffers["state"],
        )
        copy_gradient = copy_of_group(
            "OFFLOAD_GRAD",
            step,
            group.grad_nbytes,
            ("CLIP()", *(() if before is None else (before.step.name,))),
            allocations=buffers["gradient"],
        )
        waits = (read.name, copy_gradient.name, *(() if before is None else (before.copy_weights.name,)))
        stepped = replace(host_step(step, group, names["gradient"]), allocations=buffers["weight"])
        kind, nbytes = "FETCH_PARAM", group.update_nbytes
        if group.weight_tier == "disk":
            kind, nbytes = "WRITE_PARAM", group.weight_record_nbytes
        copy_weights = copy_of_group(kind, step, nbytes, (step.name,), frees=names["weight"])
        # without a buffer of its own, the weights are copied out of the states
        read_by = (step.name,) if names["weight"] else (step.name, copy_weights.name)
        write = copy_of_group("WRITE_STATES", step, group.record_nbytes, read_by, frees=names["state"])
        found.append(_GroupActions(read, copy_gradient, with_waits(stepped, waits), copy_weights, write))
    return found


def _buffer_sizes(group: GroupStates) -> dict[str, int]:
    weight = group.rounded_nbytes
    weight = round_up(weight, FILE_BLOCK_NBYTES) if group.weight_tier == "disk" else weight
    return {"state": group.record_nbytes, "gradient": group.grad_nbytes, "weight": weight}
