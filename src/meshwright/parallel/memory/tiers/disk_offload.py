"""Disk offload: optimizer states and masters rest in a file; the host steps them in buffers (ZeRO-Infinity).

Why it works: a step reads and writes the 12 bytes of states of each element once, at its end, group by group
in a known order. So a fast disk can stream them: while the host steps one parameter group, the disk writes
the group before it and reads those behind it. What the host has to hold is `num_buffers` of the largest
group, however large the model is. The arithmetic is that of `offload` with step_on = "host": where the same
kernels step, every bit is equal to the plan without it.

    num_buffers = 2, groups 0 to 3: a buffer is read, stepped and written, then it takes another group
    compute    B ....   LOCAL_NORM CLIP
    disk       READ(0) READ(1)         WRITE(0)  READ(2)  WRITE(1)  READ(3)  WRITE(2)           WRITE(3)
    copy_out                   GRAD(0)   GRAD(1)
    host                         STEP(0)   STEP(1)            STEP(2)            STEP(3)
    copy_in                             PARAM(0)  PARAM(1)           PARAM(2)           PARAM(3)

    READ_STATES      reads masters and optimizer states of a group from the file into a buffer of the host
    OFFLOAD_GRAD     copies the summed gradients of the group to the host
    FETCH_PARAM      copies the stepped weights to the device
    WRITE_STATES     writes masters and optimizer states back, and frees the buffer

    bytes of a rank per step, N elements stepped, bf16 weights and gradients, fp32 masters and Adam states:
        disk         12 N read, 12 N written; and step counters (4 for each parameter), and the rest of the
                     last block (4096) of each group
        host link    2 N out, 2 N in
    device memory saved: 12 N. Host memory: num_buffers x (12 + 2 + 2) G for a largest group of G elements,
    and 4 G for the cast of its gradients

The first groups are read while the backward runs. The file has no name in `folder`: the system removes it
with the process that made it, however that ends, and no other run or rank can open it. It is allocated in
full at the start, so a full disk is found before the first step. It is never a checkpoint: checkpoints are
written from it and read into it, so a run continues without it, or with it, to the bit. A step that is left
out (loss guard, overflow) writes nothing. The first step of a run finds no optimizer states, so it reads
masters alone. `host_gb` and `disk_gb` bound what a rank may use: a plan that needs more is refused before
anything starts.
Cost: a step takes as long as the disk needs for both ways, if that is longer than what it overlaps with.
Limits: Linux. A buffer holds a whole parameter group: an embedding may be the largest; zero divides it by the
number of ranks. In the first step the states of one group more lie in host memory, where the optimizer makes
them. Summed gradients and weights stay on the device. A disk that fails while a checkpoint is saved is an
error as in a step; while initial values or full parameters are copied it ends the process with SIGBUS.
Refused are optimizers that read whole matrices (Muon, Adafactor) or step slices for other ranks, those that
the caller makes, updates within a step (PipeDream) and data_parallel_master.
Paper: Rajbhandari et al. 2021, "ZeRO-Infinity", arXiv 2104.07857 (section 6.3: states on NVMe, buffers).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import ClassVar

from meshwright.parallel.memory.tiers.offload_actions import (
    copy_of_group,
    host_buffer_nbytes,
    host_step,
    other_owner_diagnostics,
    refuse_above,
    refuse_updates_within,
    whole_matrix_diagnostics,
)
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.field_constraints import above, at_least, not_empty
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.memory.model_states import GroupStates, cast_nbytes, group_states
from meshwright.plan.step.program import Action, Allocation, Program, with_waits
from meshwright.plan.step.single_device_program import INPUT_GRAD_KINDS, step_by_group
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

FOLDER_FIX = "name a folder on a fast disk of each host, which exists there: folder = '/nvme/scratch'"
NUM_BUFFERS_FIX = "write num_buffers = 3: one is read, one stepped, one written"
HOST_GB_FIX = "write the GB of host memory that each rank may use, or remove host_gb"
DISK_GB_FIX = "write the GB of the disk that each rank may use, or remove disk_gb"


@dataclass(frozen=True)
class DiskOffload(Strategy):
    """Keeps optimizer states and master weights in a file of each rank in `folder`; the host steps them.

    They pass through `num_buffers` buffers, each as large as the largest parameter group. Each rank may use
    `host_gb` GB (2^30 bytes) of host memory, and `disk_gb` GB of the disk; None: no bound.
    """

    name: ClassVar[str] = "disk_offload"
    phase: ClassVar[StrategyPhase] = "comm"
    folder: str = field(default="", metadata=not_empty(FOLDER_FIX))
    num_buffers: int = field(default=3, metadata=at_least(1, NUM_BUFFERS_FIX))
    host_gb: float | None = field(default=None, metadata=above(0, fix=HOST_GB_FIX))
    disk_gb: float | None = field(default=None, metadata=above(0, fix=DISK_GB_FIX))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from whole_matrix_diagnostics(sharding, self.name)

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        trained = (each for each in sharding.param_shardings if each.param.trainable)
        owned = next((each for each in trained if each.owner_axes and each.shard_alignment != "matrix"), None)
        if owned is not None:
            text = f"one rank steps {owned.param.name} for others that have slices of it"
            fix = 'use an optimizer that steps any slice (optimizer.name = "adamw"), or remove disk_offload'
            yield Diagnostic(text, fix, "strategies.disk_offload")
        yield from other_owner_diagnostics(sharding, self.name, "disk")

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        tiers = replace(sharding.tiers, optimizer_states="disk", step="host", disk_folder=self.folder)
        return replace(sharding, tiers=tiers)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        states = {each.name: each for each in group_states(job, view)}

        def edit(actions: list[Action]) -> list[Action]:
            refuse_updates_within(actions, self.name)
            return _through_buffers(step_by_group(actions, view), self.num_buffers, states)

        edited = program.edit(edit)
        made = max((each.state_nbytes for each in states.values()), default=0)  # by the first step
        on_host = host_buffer_nbytes(edited) + cast_nbytes(job, states.values()) + made
        refuse_above(on_host, self.host_gb, "host_gb", "host memory", self.name)
        on_disk = sum(each.record_nbytes for each in states.values())
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
    fetch: Action
    write: Action

    @property
    def update(self) -> tuple[Action, ...]:
        """Those that take the place of its STEP."""
        return self.step, self.fetch, self.write


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
        waits = (read.name, copy_gradient.name, *(() if before is None else (before.fetch.name,)))
        stepped = replace(host_step(step, group, names["gradient"]), allocations=buffers["weight"])
        fetch = copy_of_group("FETCH_PARAM", step, group.update_nbytes, (step.name,), frees=names["weight"])
        # without a buffer of its own, the weights are copied out of the states
        read_by = (step.name,) if names["weight"] else (step.name, fetch.name)
        write = copy_of_group("WRITE_STATES", step, group.record_nbytes, read_by, frees=names["state"])
        found.append(_GroupActions(read, copy_gradient, with_waits(stepped, waits), fetch, write))
    return found


def _buffer_sizes(group: GroupStates) -> dict[str, int]:
    return {"state": group.record_nbytes, "gradient": group.grad_nbytes, "weight": group.rounded_nbytes}
