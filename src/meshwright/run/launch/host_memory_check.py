"""Compares what a plan keeps in the memory and on the disk of a host with what is free, before ranks start.

    on an accelerator    host tier: what offload, disk_offload, activation_offload, memory_budget keep there
    on the CPU           device tier and host tier: both are the memory of the host
    disk tier            the files of the ranks, on the disk of the folder

`train`, `verify`, and every rank under torchrun or srun compare for all ranks of the host; `parallelize` for
its own rank, because the others may have begun to take theirs. What does not fit is refused with repairs that
were tried: each is a plan of the same job on the same ranks that fits, or a number of hosts that is enough.
Without the check the system kills a rank in the first step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from meshwright.device.device_memory import free_and_total_host_nbytes
from meshwright.device.local_device import local_platform
from meshwright.device.platforms import CPU
from meshwright.engine.params.rank_file import free_disk_nbytes
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.analysis.plan_for_model import check_plan_for_model
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.budgeted_chain import OFFLOAD
from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.plan.hardware.memory_tiers import MemoryTier
from meshwright.plan.job.errors import PlanError, format_nbytes
from meshwright.plan.plan import Plan
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import nbytes_of_ranks

MAX_REPAIRS = 2  # that are named
SAME_MEMORY: tuple[MemoryTier, ...] = ("host", "device")
TRIED_FOLDER = "folder on a fast local disk"


def check_ranks_fit_here(analyzed: AnalyzedModel, plan: Plan, ranks: Sequence[int]) -> None:
    """Raises PlanError if this host has less free memory than `ranks` of `plan` keep in it, or its disk less
    free space.
    """
    tiers = SAME_MEMORY if local_platform() == CPU else ("host",)
    check_host_memory(analyzed, plan, ranks, free_and_total_host_nbytes()[0], tiers)
    folder = plan.sharding.tiers.disk_folder
    if folder:
        check_disk_space(plan, ranks, free_disk_nbytes(folder))


def check_disk_space(plan: Plan, ranks: Sequence[int], free: int) -> None:
    """Raises PlanError if `ranks` of `plan` keep more than `free` bytes on the disk of their host."""
    needed = nbytes_of_ranks(plan, ranks, ("disk",))
    if needed > free:
        text = (
            f"{_who(ranks)} {format_nbytes(needed)} on the disk of '{plan.sharding.tiers.disk_folder}', and "
        )
        text += f"{format_nbytes(free)} are free"
        fix = f"free {format_nbytes(needed - free)} more, name a folder on a larger disk, or shard over more "
        fix += "hosts (zero)"
        strategy = "disk_offload" if plan.sharding.tiers.optimizer_states == "disk" else "activation_offload"
        raise PlanError(text, fix=fix, location=f"strategies.{strategy}.folder")


def check_host_memory(
    analyzed: AnalyzedModel, plan: Plan, ranks: Sequence[int], free: int, tiers: Sequence[MemoryTier]
) -> None:
    """Raises PlanError if `ranks` of `plan` keep more than `free` bytes in the memory of their host.

    `tiers` are the memory tiers that rest there.
    """
    needed = nbytes_of_ranks(plan, ranks, tiers)
    if needed <= free:
        return
    text = f"{_who(ranks)} {format_nbytes(needed)} of its memory, and {format_nbytes(free)} are free"
    if "device" in tiers:
        text += " (on the CPU, what a device holds is there too)"
    repairs = [*_fitting_changes(analyzed, plan, ranks, free, tiers), *_more_hosts(plan, ranks, free, tiers)]
    repairs = repairs[:MAX_REPAIRS] or [f"a host with {format_nbytes(needed)} of free memory"]
    raise PlanError(text, fix="; or ".join(repairs), location="host memory")


def _who(ranks: Sequence[int]) -> str:
    return (
        f"{len(ranks)} ranks of this host need" if len(ranks) > 1 else f"rank {ranks[0]} of this host needs"
    )


def _fitting_changes(
    analyzed: AnalyzedModel, plan: Plan, ranks: Sequence[int], free: int, tiers: Sequence[MemoryTier]
) -> Iterator[str]:
    """Yields the changes of `plan` that fit, each with what it needs."""
    for text, strategies, micro_batch in _changes(plan):
        try:
            other = plan.with_strategies(strategies, micro_batch)
            check_plan_for_model(other, analyzed)
        except PlanError:  # this strategy does not work with this model or job
            continue
        needed = nbytes_of_ranks(other, ranks, tiers)
        if needed <= free:
            yield f"{text}, which needs {format_nbytes(needed)}"


def _changes(plan: Plan) -> Iterator[tuple[str, tuple[Strategy, ...], int]]:
    """Yields changes of `plan` that may need less memory of the host, the cheapest in time first."""
    for old in plan.strategies:
        if isinstance(old, DDP):
            new = ZeRO(axis=old.axis, stage=1)
            text = f'name = "zero", axis = "{old.axis}", stage = 1 in place of ddp'
            yield text, _replaced(plan, old, new), plan.micro_batch
        elif isinstance(old, Offload):
            text = f'name = "disk_offload", with a {TRIED_FOLDER}, in place of offload'
            yield text, _replaced(plan, old, DiskOffload(folder=TRIED_FOLDER)), plan.micro_batch
        elif isinstance(old, MemoryBudget) and old.offers_offload:
            new = replace(old, choices=tuple(each for each in old.choices if each != OFFLOAD), host_gb=None)
            yield 'leave "offload" out of memory_budget.choices', _replaced(plan, old, new), plan.micro_batch
        elif isinstance(old, DiskOffload):
            for count in range(old.num_buffers - 1, 0, -1):
                new = replace(old, num_buffers=count)
                text = f"strategies.disk_offload.num_buffers = {count}"
                yield text, _replaced(plan, old, new), plan.micro_batch
    smaller = [size for size in range(1, plan.micro_batch) if plan.local_batch % size == 0]
    for size in reversed(smaller):
        yield f"micro_batch = {size}", plan.strategies, size
    if not any(isinstance(each, ActivationCheckpointing) for each in plan.strategies):
        added = (*plan.strategies, ActivationCheckpointing())
        yield 'add [[strategies]] name = "activation_checkpointing"', added, plan.micro_batch
    if not any(isinstance(each, (Offload, DiskOffload)) for each in plan.strategies):
        added = (*plan.strategies, DiskOffload(folder=TRIED_FOLDER))
        text = f'add [[strategies]] name = "disk_offload", with a {TRIED_FOLDER}'
        yield text, added, plan.micro_batch


def _replaced(plan: Plan, old: Strategy, new: Strategy) -> tuple[Strategy, ...]:
    return tuple(new if each == old else each for each in plan.strategies)


def _more_hosts(plan: Plan, ranks: Sequence[int], free: int, tiers: Sequence[MemoryTier]) -> Iterator[str]:
    """Yields the number of hosts like this one that hold `ranks`, if there is one."""
    for count in range(2, len(ranks) + 1):
        size = ceil(len(ranks) / count)
        parts = [ranks[first : first + size] for first in range(0, len(ranks), size)]
        if all(nbytes_of_ranks(plan, part, tiers) <= free for part in parts):
            yield f"start these ranks on {len(parts)} such hosts (torchrun, srun)"
            return
