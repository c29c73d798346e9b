"""Outputs of operations that checkpointed block calls keep beside their inputs, so that these do not run
again.

    outputs of the operations of a kind       held
    autograd saves them in the rerun          F_CHECKPOINTED .. B: they are a part of what RECOMPUTE saves
    others                                    F_CHECKPOINTED .. RECOMPUTE, which takes them

    F_CHECKPOINTED    its output, kept outputs
    RECOMPUTE         saved activations without those that are kept; it frees what autograd does not save

What a linear layer returns is saved by the activation function or the product that reads it, but not by a
sum: the last layer of an MLP is of the second kind.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.model_spec.op_sizes_and_memory import KEPT_OPS
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.memory.memory_names import kept_op_name, kept_saved_name, saved_activations_name
from meshwright.plan.step.program import Action, Allocation
from meshwright.plan.step.single_device_program import CHECKPOINTED_FORWARD, samples_per_microbatch


@dataclass(frozen=True)
class KeptOutputsMemory:
    """Bytes of the outputs that a block call keeps on a rank, in a microbatch: of those that autograd saves,
    and of the others by kind of operation. `flops_fraction` is their part of the operations of its forward.
    """

    saved_nbytes: int
    other_nbytes: Mapping[str, int]
    flops_fraction: Fraction

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return self.saved_nbytes + sum(self.other_nbytes.values())


def kept_outputs_memory(
    view: RankView, job: Job, num_samples: int, ops: Collection[str]
) -> dict[str, KeptOutputsMemory]:
    """Returns what the block calls of the rank keep of the kinds of operations `ops`; none for those without
    such operations.
    """
    share, width = view.work_share, FLOAT_NBYTES[job.precision.compute]
    head, flops = (
        share.chunked_head_call,
        dict(zip(view.model_spec.block_calls, view.model_spec.flops, strict=True)),
    )
    if head is not None and head.block_call in flops:
        flops[head.block_call] -= head.flops
    found = {}
    for block_call in view.model_spec.block_calls:
        parts = [
            (each, share.kept_fraction(each) * num_samples)
            for each in view.model_spec.kept_outputs
            if each.block_call == block_call and each.op in ops
        ]
        parts = [(each, amount) for each, amount in parts if amount]
        saved = sum(each.saved_nbytes(width) * amount for each, amount in parts)
        others = {
            op: round(
                sum((each.nbytes(width) - each.saved_nbytes(width)) * n for each, n in parts if each.op == op)
            )
            for op in KEPT_OPS
            if op in ops
        }
        kept_flops = min(flops[block_call], sum(each.flops for each, _ in parts))
        if parts:
            found[block_call] = KeptOutputsMemory(
                round(saved), others, Fraction(kept_flops, flops[block_call] or 1)
            )
    return found


def keep_outputs(
    actions: Sequence[Action], block_calls: Collection[str], ops: Collection[str], view: RankView, job: Job
) -> list[Action]:
    """Returns `actions` in which those of `block_calls` that are checkpointed keep the outputs of `ops`."""
    memory = kept_outputs_memory(view, job, samples_per_microbatch(actions, view.plan, job), ops)
    kept = {call: each for call, each in memory.items() if call in block_calls}

    def edit(action: Action) -> Action:
        mine, where = kept.get(action.subject), (action.subject, action.microbatch)
        if mine is None:
            return action
        saved, others = (
            saved_activations_name(*where),
            {op: kept_op_name(op, *where) for op in mine.other_nbytes},
        )
        if action.kind == CHECKPOINTED_FORWARD:
            held = [Allocation(kept_saved_name(*where), mine.saved_nbytes)]
            held += [Allocation(name, mine.other_nbytes[op]) for op, name in others.items()]
            return replace(action, allocations=(*action.allocations, *held))
        if action.kind == "RECOMPUTE":
            allocations = tuple(
                replace(each, nbytes=max(0, each.nbytes - mine.saved_nbytes)) if each.name == saved else each
                for each in action.allocations
            )
            flops = round(action.flops * (1 - mine.flops_fraction))
            frees = (*action.frees, *others.values())
            return replace(action, allocations=allocations, frees=frees, flops=flops)
        if saved in action.frees:
            return replace(action, frees=(*action.frees, kept_saved_name(*where)))
        return action

    return [edit(action) for action in actions]


def kept_ops(action: Action) -> tuple[str, ...]:
    """Returns the kinds of operations whose outputs `action` keeps, or takes as they were kept."""
    names = {*(each.name for each in action.allocations), *action.frees}
    return tuple(op for op in KEPT_OPS if kept_op_name(op, action.subject, action.microbatch) in names)
