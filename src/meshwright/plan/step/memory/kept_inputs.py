"""The inputs that checkpointed block calls keep, and that nothing else holds.

    value x: output of the checkpointed block call u, taken by the checkpointed block call v alone

    F_CHECKPOINTED(u)    F_CHECKPOINTED(v)    ...    RECOMPUTE(v) B(v)    RECOMPUTE(u) B(u)
      x is made            v keeps x                   x is read            x is freed, with its gradient

Between the forward of v and its second run nobody reads x, so it may leave the device, or be kept in parts.
A value is held by others, and stays, if several block calls take it, if glue computes with it, if the model
returns it, or if it crosses a stage boundary. Its memory is that of an output; `split_kept_inputs` makes it
an allocation of its own.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.stage_transfers import StageValue
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.stage_value_shards import StageValueShards
from meshwright.plan.step.memory.memory_names import kept_input_name, output_name
from meshwright.plan.step.program import Action, Allocation
from meshwright.plan.step.single_device_program import (
    CHECKPOINTED_FORWARD,
    FORWARD_KINDS,
    samples_per_microbatch,
)


@dataclass(frozen=True)
class KeptInput:
    """A value that a checkpointed block call keeps, and its elements on a rank, in a microbatch.

    `replicated_axes` are the axes along which ranks have slices of parameters and the same value.
    """

    value: StageValue
    numel: int
    replicated_axes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the value."""
        return self.value.name

    @property
    def nbytes(self) -> int:
        """Its bytes on a rank, in a microbatch."""
        return self.numel * self.value.itemsize

    def allocation(self, microbatch: int | None) -> Allocation:
        """Returns its memory on the device."""
        return Allocation(kept_input_name(self.name, microbatch), self.nbytes)


def checkpointed_calls(actions: Iterable[Action]) -> frozenset[str]:
    """Returns the block calls that are checkpointed."""
    return frozenset(action.subject for action in actions if action.kind == CHECKPOINTED_FORWARD)


def kept_inputs(
    actions: Sequence[Action], view: RankView, job: Job, strategy: str
) -> dict[str, list[KeptInput]]:
    """Returns what checkpointed block calls keep and nothing else holds, by block call.

    Raises PlanError, at the place of `strategy`, if that is not known.
    """
    checkpointed, boundaries = checkpointed_calls(actions), view.plan.model_spec.stage_boundaries
    location, fix = f"strategies.{strategy}", f"remove {strategy}"
    if boundaries is None:
        text = "blocks are checkpointed, and it is not known which tensors they take from each other: the "
        raise PlanError(f"{text}forward could not be followed", fix=fix, location=location)
    if view.plan.model_spec.writes_in_place:
        text = "blocks are checkpointed, and the model writes in place into what they return, so their "
        fix = f"write x = x + y for x += y there, or {fix}"
        raise PlanError(f"{text}inputs have to stay", fix=fix, location=location)
    stage_of = {call: number for number, each in enumerate(view.plan.stages) for call in each.block_calls}
    values = [
        value
        for value in boundaries.values
        if _is_held_once(value)
        and {value.producer, *value.consumers} <= checkpointed
        and stage_of.get(value.producer) == stage_of.get(value.consumers[0])
    ]
    shards, num_samples = StageValueShards(view, values), samples_per_microbatch(actions, view.plan, job)
    found: dict[str, list[KeptInput]] = {}
    for value in values:
        numel = prod(shards.local_shape(value, num_samples))
        kept = KeptInput(value, numel, shards.replicated_axes(value))
        found.setdefault(value.consumers[0], []).append(kept)
    return found


def _is_held_once(value: StageValue) -> bool:
    return (
        value.needs_grad
        and not value.op
        and not value.read_by_glue
        and len(value.consumers) == 1
        and value.consumers[0] != value.producer
    )


def split_kept_inputs(
    actions: Sequence[Action], kept: Mapping[int | None, Collection[KeptInput]]
) -> list[Action]:
    """Returns `actions` in which the inputs in `kept`, by microbatch, are allocations apart from the other
    outputs of the block call that makes them. Those that are apart already stay so.
    """
    parts: dict[tuple[str, int | None], list[Allocation]] = {}
    known = {each.name for action in actions for each in action.allocations}
    for microbatch, inputs in kept.items():
        for each in inputs:
            allocation = each.allocation(microbatch)
            if allocation.name not in known:
                parts.setdefault((each.value.producer, microbatch), []).append(allocation)

    def split(action: Action) -> Action:
        mine = parts.get((action.subject, action.microbatch), [])
        output = output_name(action.subject, action.microbatch or 0)
        if mine and action.kind in FORWARD_KINDS:
            less = sum(each.nbytes for each in mine)
            rest = tuple(
                replace(each, nbytes=max(0, each.nbytes - less)) if each.name == output else each
                for each in action.allocations
            )
            return replace(action, allocations=(*rest, *mine))
        if mine and output in action.frees:
            return replace(action, frees=(*action.frees, *(each.name for each in mine)))
        return action

    return [split(action) for action in actions]
