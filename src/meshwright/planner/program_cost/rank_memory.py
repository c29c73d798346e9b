"""Computes the bytes that a rank holds, exactly, from the layouts and the program of a plan.

    parameters          what is kept of the weights between their uses: all, or a shard with its padding
    gradients           the gradients of a step, until STEP
    master              master weights, if parameters have a narrower dtype or a rank has slices of them
    optimizer_states    what the optimizer keeps, step counters included
    strategy_states     what techniques keep from step to step, such as residuals (plan/strategy_state.py)
    buffers             memory of fixed size, used again and again: unsharded weights, messages, casts

    rank 0 of 4, ZeRO 3     [ w/4 ][ g/4 ][ m/4 ][ v/4 ]  + [ block ][ block ] + [ block ][ block ]
                            grows with the model            buffers: as large as the largest blocks

Activations, and the gradients of one block between its backward and the PACK after it, are transient;
`transient_nbytes` is their peak. Each function adds up one memory tier (plan/hardware/memory_tiers.py). What
the data decides (the rows that come to the experts of a rank) counts with the bytes that are expected, and in
a peak `at_most` with the most of any step.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from meshwright.plan.hardware.memory_tiers import MemoryTier
from meshwright.plan.plan import Plan, RankPlan
from meshwright.plan.step.memory.activation_copies import ACTIVATION_COPIES, ACTIVATION_PARTS
from meshwright.plan.step.memory.activation_files import ACTIVATION_FILE_KINDS
from meshwright.plan.step.memory.memory_names import are_new_states, is_activation_buffer, is_coded_sum
from meshwright.plan.step.memory.model_states import (
    GroupStates,
    cast_nbytes,
    group_states,
    param_update_nbytes,
)
from meshwright.plan.step.program import Action, Allocation
from meshwright.plan.step.single_device_program import ACTIVATION_KINDS
from meshwright.plan.strategy_state import local_state_nbytes

ACTIVATION_MOVES = (*ACTIVATION_COPIES, *ACTIVATION_PARTS, *ACTIVATION_FILE_KINDS)
TRANSIENT_KINDS = (*ACTIVATION_KINDS, *ACTIVATION_MOVES, "SHOW")


@dataclass(frozen=True)
class StateBytes:
    """The bytes that one rank holds in one memory tier, by category (see the module)."""

    parameters: int
    gradients: int
    master: int
    optimizer_states: int
    buffers: int
    strategy_states: int = 0

    @property
    def model_states(self) -> int:
        """The bytes that grow with the model: all but the buffers."""
        kept = self.parameters + self.master + self.optimizer_states + self.strategy_states
        return kept + self.gradients

    @property
    def total(self) -> int:
        """All bytes."""
        return self.model_states + self.buffers

    def as_dict(self) -> dict[str, int]:
        """Returns the bytes by category."""
        return asdict(self)


def state_bytes(plan: Plan, rank: int, tier: MemoryTier = "device") -> StateBytes:
    """Returns the bytes that `rank` of `plan` holds in `tier` after its first step.

    The optimizer states are those of the optimizers that the job names; nothing is known of an optimizer that
    the caller makes.
    """
    rank_plan = plan.for_rank(rank)
    return _state_bytes(rank_plan, list(group_states(plan.job, rank_plan.view)), tier)


def _state_bytes(plan: RankPlan, groups: Sequence[GroupStates], tier: MemoryTier) -> StateBytes:
    tiers = plan.sharding.tiers
    gradients, buffers = _gradient_and_buffer_nbytes(plan, tier)
    weights = sum(each.weight_nbytes for each in groups if each.weight_tier == tier)
    rounded = sum(each.rounded_nbytes for each in groups)
    strategy_states = sum(
        local_state_nbytes(spec, plan.view) for specs in plan.states.values() for spec in specs
    )
    has_states = tiers.optimizer_states == tier
    if tier == "disk" and has_states:  # the rest of the last block of each record
        records = sum(each.record_nbytes + each.weight_record_nbytes for each in groups)
        buffers += records - weights - sum(each.master_nbytes + each.state_nbytes for each in groups)
    return StateBytes(
        parameters=weights + (rounded if tier == "host" and has_states else 0),
        gradients=gradients,
        master=sum(each.master_nbytes for each in groups) if has_states else 0,
        optimizer_states=sum(each.state_nbytes for each in groups) if has_states else 0,
        buffers=buffers + (cast_nbytes(plan.job, groups) if tiers.step == tier else 0),
        strategy_states=strategy_states if tier == "device" else 0,
    )


def transient_nbytes(plan: Plan) -> int:
    """Returns the peak of the bytes that are transient within a step on the device, as far as blocks are
    known.
    """
    peak = 0
    for role in plan.program.roles:
        freed = {name for action in role.actions if action.kind == "STEP" for name in action.frees}
        live: dict[str, int] = {}
        for action in role.actions:
            if _is_transient(action) and action.kind != "LOSS":
                live |= {
                    allocation.name: allocation.nbytes
                    for allocation in action.allocations
                    if allocation.name not in freed and allocation.tier == "device"
                }
            peak = max(peak, sum(live.values()))
            for name in action.frees:
                live.pop(name, None)
    return peak


def peak_nbytes(plan: Plan, rank: int, tier: MemoryTier = "device", *, at_most: bool = False) -> int:
    """Returns the expected peak of the bytes that `rank` of `plan` holds in `tier` during a step, as far as
    blocks are known, or with `at_most` the peak of any step.

    That is what it keeps between steps, with buffers and sharded gradients, and the largest sum of transient
    tensors: unsharded gradients, activations, temporaries of the loss and of the optimizers that the job
    names. Scratch memory of single operations and receive buffers are not included.
    """
    return sum(peak_nbytes_by_category(plan, rank, tier, at_most=at_most).values())


def fullest_host(plan: Plan, ranks_per_host: int, tier: MemoryTier = "host") -> tuple[range, int]:
    """Returns the ranks of the host on which most is kept in host memory, or in another `tier` of the host,
    and the bytes of them together.

    Ranks are placed on hosts in order, `ranks_per_host` on each.
    """
    world = plan.mesh.world_size
    by_role = [(role.ranks, peak_nbytes(plan, role.ranks[0], tier)) for role in plan.program.roles]
    if not any(needed for _, needed in by_role):
        return range(min(ranks_per_host, world)), 0
    nbytes = {rank: needed for ranks, needed in by_role for rank in ranks}
    hosts = [range(first, min(first + ranks_per_host, world)) for first in range(0, world, ranks_per_host)]
    fullest = max(hosts, key=lambda ranks: sum(nbytes[rank] for rank in ranks))
    return fullest, nbytes_of_ranks(plan, fullest, (tier,))


def nbytes_of_ranks(plan: Plan, ranks: Iterable[int], tiers: Sequence[MemoryTier] = ("host",)) -> int:
    """Returns the bytes that `ranks` of `plan` hold in `tiers`, which are one memory, each rank at its
    peak.
    """
    return sum(sum(peak_nbytes_by_category(plan, rank, *tiers).values()) for rank in ranks)


def optimizer_work(plan: Plan, rank: int) -> tuple[int, int]:
    """Returns the elements that `rank` of `plan` steps, and the bytes of their optimizer states."""
    groups = list(group_states(plan.job, plan.rank_view(rank)))
    return sum(each.stepped_numel for each in groups), sum(each.state_nbytes for each in groups)


def peak_nbytes_by_category(
    plan: Plan, rank: int, *tiers: MemoryTier, at_most: bool = False
) -> dict[str, int]:
    """Returns the bytes of `peak_nbytes` by category, without those that are zero: of the device, or of
    `tiers`. Several of them are one memory, as device and host are on a CPU.

    The categories are parameters, master, optimizer_states, strategy_states, gradients, buffers, activations,
    and optimizer: the temporaries of STEP.
    """
    rank_plan, tiers = plan.for_rank(rank), tiers or ("device",)
    groups, peak = list(group_states(plan.job, rank_plan.view)), Counter[str]()
    states = [_state_bytes(rank_plan, groups, tier) for tier in tiers]
    steps_here = plan.sharding.tiers.step in tiers
    update = max(
        (
            param_update_nbytes(plan.job, *pair)
            for each in groups
            if steps_here
            for pair in each.stepped_params
        ),
        default=0,
    )
    if "host" in tiers and plan.sharding.tiers.optimizer_states == "disk":  # the first step makes them there
        update += max((each.state_nbytes for each in groups), default=0)
    transient_names = {
        allocation.name
        for action in rank_plan.actions
        for allocation in action.allocations
        if allocation.tier in tiers and _ends_in_step(action, allocation)
    }
    persistent = {
        allocation.name: allocation.max_nbytes if at_most else allocation.nbytes
        for action in rank_plan.actions
        for allocation in action.allocations
        if allocation.name not in transient_names and allocation.tier in tiers
    }
    live, coding = dict[str, int](), dict[str, int]()  # coded sums begin one after the other
    for action in rank_plan.actions:
        for each in action.allocations:
            if each.name in transient_names:
                place = coding if is_coded_sum(each.name) else live
                place[each.name] = each.max_nbytes if at_most else each.nbytes
        scratch = update if action.kind == "STEP" else 0
        codes = max(coding.values(), default=0)
        if sum(live.values()) + codes + scratch > peak.total():
            peak = Counter(optimizer=scratch, buffers=codes)
            for name, nbytes in live.items():
                peak[_category(name)] += nbytes
        for name in action.frees:
            (coding if name in coding else live).pop(name, None)
    for name, nbytes in persistent.items():
        peak["gradients" if name.startswith(("gradient(", "summed gradient")) else "buffers"] += nbytes
    peak["buffers"] += cast_nbytes(plan.job, groups) if steps_here else 0
    peak["buffers"] += sum(each.buffers for tier, each in zip(tiers, states, strict=True) if tier == "disk")
    kept = ("parameters", "master", "optimizer_states", "strategy_states")
    found = {
        **{name: peak[name] + sum(each.as_dict()[name] for each in states) for name in kept},
        **{name: peak[name] for name in ("gradients", "buffers", "activations", "optimizer")},
    }
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def _is_transient(action: Action) -> bool:
    return action.kind in TRANSIENT_KINDS or action.stream == "recv"


def _ends_in_step(action: Action, allocation: Allocation) -> bool:
    """Returns whether the memory is given back within each step; other memory lasts once it is there."""
    name = allocation.name
    if is_coded_sum(name) or are_new_states(name):
        return True
    return _is_transient(action) and not is_activation_buffer(name)


def _category(name: str) -> str:
    if name.startswith("gradient("):
        return "gradients"
    return "strategy_states" if are_new_states(name) else "activations"


def _gradient_and_buffer_nbytes(plan: RankPlan, tier: MemoryTier) -> tuple[int, int]:
    """Returns the bytes in `tier` of gradients, which STEP frees, and of buffers, the other allocations.

    Transient allocations are neither.
    """
    actions = plan.actions
    freed = {name for action in actions if action.kind == "STEP" for name in action.frees}
    gradients = {
        allocation.name: allocation.nbytes
        for action in actions
        for allocation in action.allocations
        if allocation.name in freed and allocation.tier == tier and not are_new_states(allocation.name)
    }
    allocated = {
        allocation.name: allocation.nbytes
        for action in actions
        if not _is_transient(action)
        for allocation in action.allocations
        if allocation.tier == tier and not _ends_in_step(action, allocation)
    }
    return sum(gradients.values()), sum(nbytes for name, nbytes in allocated.items() if name not in freed)
