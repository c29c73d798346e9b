"""Actions, refusals and bounds that offload to host memory and to disk share.

Both step group by group, once per step, with an optimizer that computes every element by itself. Around the
STEP of a group they add some of

    FETCH_STATES     copies optimizer states and masters of a group into a buffer on the device
    READ_STATES      reads them from the file of the rank into a buffer on the host
    READ_PARAM       reads a shard of weights from the file into a buffer on the host, before each use
    OFFLOAD_GRAD     copies the summed gradients of a group to the host
    FETCH_PARAM      copies weights to the device: what the host has stepped, or a shard before its all-gather
    OFFLOAD_STATES   copies states and masters back to the host after STEP, and frees the buffer
    WRITE_STATES     writes them back into the file after STEP, and frees the buffer
    WRITE_PARAM      writes a shard of stepped weights into the file
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from meshwright.plan.hardware.memory_tiers import MemoryTier
from meshwright.plan.hardware.streams import COPY, StreamName
from meshwright.plan.job.errors import Diagnostic, PlanError, format_nbytes
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.memory.model_states import GroupStates
from meshwright.plan.step.program import Action, Allocation, Program, Transfer
from meshwright.plan.step.single_device_program import stepped_microbatches

_STREAM_OF_KIND: Mapping[str, StreamName] = {
    "FETCH_STATES": "copy_in",
    "FETCH_PARAM": "copy_in",
    "OFFLOAD_STATES": "copy_out",
    "OFFLOAD_GRAD": "copy_out",
    "READ_STATES": "disk",
    "READ_PARAM": "disk",
    "WRITE_STATES": "disk",
    "WRITE_PARAM": "disk",
}


def copy_of_group(
    kind: str,
    step: Action,
    nbytes: int,
    waits: Iterable[str],
    allocations: tuple[Allocation, ...] = (),
    frees: tuple[str, ...] = (),
) -> Action:
    """Returns the copy of `nbytes` of the parameter group that `step` updates, or uses."""
    return Action(
        kind,
        step.subject,
        step.microbatch,
        stream=_STREAM_OF_KIND[kind],
        waits=tuple(waits),
        tensors=step.tensors,
        transfer=Transfer(COPY, (), nbytes, dtype="uint8"),
        allocations=allocations,
        frees=frees,
    )


def host_step(step: Action, group: GroupStates, frees: Iterable[str]) -> Action:
    """Returns `step` on the host, whose memory it passes through; it frees `frees` too."""
    passes = group.grad_nbytes + 2 * (group.master_nbytes + group.state_nbytes) + group.rounded_nbytes
    transfer = Transfer(COPY, (), passes, dtype="uint8")
    return replace(step, stream="host", transfer=transfer, frees=(*step.frees, *frees))


def whole_matrix_diagnostics(sharding: ShardingPlan, strategy: str) -> Iterator[Diagnostic]:
    """Yields an optimizer that reads whole matrices, which `strategy` does not move."""
    trained = (each for each in sharding.param_shardings if each.param.trainable)
    matrix = next((each for each in trained if each.shard_alignment == "matrix"), None)
    if matrix is not None:
        text = f"the optimizer of {matrix.param.name} reads whole matrices, and states move in pieces"
        fix = f'use an optimizer of elements (optimizer.name = "adamw"), or remove {strategy}'
        yield Diagnostic(text, fix, f"strategies.{strategy}")


def other_owner_diagnostics(sharding: ShardingPlan, strategy: str, tier: MemoryTier) -> Iterator[Diagnostic]:
    """Yields one rank that updates for others, and another strategy that keeps states in another tier than
    `tier`, that of `strategy`.
    """
    if sharding.primary_rank_axes:
        text = "one rank updates for all others (data_parallel_master), and its states are not offloaded"
        yield Diagnostic(text, "use ddp or zero in place of data_parallel_master", f"strategies.{strategy}")
    if sharding.tiers.optimizer_states != tier:
        text = f"{strategy} keeps optimizer states in the tier '{tier}', and another strategy in "
        text += f"'{sharding.tiers.optimizer_states}'"
        yield Diagnostic(text, "keep one of offload and disk_offload", "strategies")


def refuse_updates_within(actions: Sequence[Action], strategy: str) -> None:
    """Raises PlanError for a plan that updates after every microbatch."""
    if stepped_microbatches(actions):
        text = f"the plan updates after every microbatch, and {strategy} moves states once per step"
        fix = f"use a schedule that updates once per step (1f1b), or remove {strategy}"
        raise PlanError(text, fix=fix, location=f"strategies.{strategy}")


def host_buffer_nbytes(program: Program) -> int:
    """Returns the bytes of what the actions of `program` allocate on the host."""
    buffers = {
        each.name: each.nbytes
        for role in program.roles
        for action in role.actions
        for each in action.allocations
        if each.tier == "host"
    }
    return sum(buffers.values())


def refuse_above(needed: int, bound: float | None, key: str, what: str, strategy: str) -> None:
    """Raises PlanError if a rank needs more bytes of `what` than `bound` GB, the option `key`; None: any."""
    if bound is not None and needed > bound * 2**30:
        text = f"a rank needs {format_nbytes(needed)} of {what}, and {key} = {bound:g} allows less"
        least = f"{1.01 * needed / 2**30:.3g}"
        fix = f"set {key} = {least} or more, or shard the states over more ranks (zero)"
        raise PlanError(text, fix=fix, location=f"strategies.{strategy}.{key}")
