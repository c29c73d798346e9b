"""Checks the copies between memory tiers in a list of actions.

A step waits for the copies of what it reads, a copy for what it copies, and a buffer is filled again only
when it was copied out; where the host steps beside the next step, copies wait for the step before.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from meshwright.plan.hardware.memory_tiers import MemoryTiers
from meshwright.plan.step.program import Action, transitive_waits
from meshwright.plan.step.single_device_program import PARAM_USE_KINDS
from meshwright.plan.step.tied_params import sums_grads

_COPIES_OF_STEPPED = ("OFFLOAD_STATES", "FETCH_PARAM")
_USES_OF_STEPPED = (*_COPIES_OF_STEPPED, "WRITE_STATES", "WRITE_PARAM")
_FILL_BUFFERS = ("FETCH_STATES", "READ_STATES", "READ_PARAM", "OFFLOAD_GRAD", "STEP")


def tier_copy_conflicts(tiers: MemoryTiers, actions: Sequence[Action]) -> Iterator[str]:
    """Yields steps that do not wait for the copies of what they read, copies that do not wait for what they
    copy, and buffers that are filled again before they are copied out.
    """
    if tiers.optimizer_states == "device":
        return
    by_kind: dict[str, list[Action]] = defaultdict(list)
    for action in actions:
        by_kind[action.kind].append(action)
    freed_by: dict[str, str] = {}
    last_use = max((i for i, action in enumerate(actions) if action.kind in PARAM_USE_KINDS), default=-1)

    def is_use(copy: Action) -> bool:
        return tiers.weights != "device" and "," in copy.subject

    def sharing(action: Action, kinds: Iterable[str]) -> list[str]:
        others = (each for kind in kinds for each in by_kind[kind])
        return [each.name for each in others if not set(action.tensors).isdisjoint(each.tensors)]

    for at, action in enumerate(actions):
        needed: list[str] = []
        if tiers.delay and action.kind in ("FETCH_PARAM", "OFFLOAD_GRAD"):
            step = Action("STEP", action.subject).name
            if step not in action.previous_waits:
                yield f"{action.name} does not wait for {step} of the step before"
        if tiers.delay and action.kind == "FETCH_PARAM" and at < last_use:
            yield f"{action.name} replaces weights before {actions[last_use].name} has used them"
        elif tiers.delay and action.kind == "FETCH_PARAM":
            continue
        if action.kind == "STEP":
            needed = sharing(action, ("FETCH_STATES", "READ_STATES", "OFFLOAD_GRAD"))
            if not sharing(action, _COPIES_OF_STEPPED) and (needed or tiers.step == "host"):
                yield f"{action.name} updates what no {' or '.join(_COPIES_OF_STEPPED)} copies to its tier"
            has_gradients = tiers.gradients == "host" or sharing(action, ("OFFLOAD_GRAD",))
            if tiers.step == "host" and not has_gradients:
                yield f"{action.name} reads gradients on the host, and no OFFLOAD_GRAD copies them"
            for kind in ("READ_STATES", "WRITE_STATES") if tiers.optimizer_states == "disk" else ():
                if not sharing(action, (kind,)):
                    yield f"{action.name} updates states on disk, and there is no {kind} of them"
            if sharing(action, ("READ_PARAM",)) and not sharing(action, ("WRITE_PARAM",)):
                yield f"{action.name} updates weights on disk, and there is no WRITE_PARAM of them"
        elif action.kind == "UNSHARD" or (action.kind == "FETCH_PARAM" and is_use(action)):
            yield from _missing_copies(tiers, action)
        elif action.kind in _USES_OF_STEPPED:
            needed = [Action("STEP", action.subject).name]
        elif action.kind == "OFFLOAD_GRAD":
            summed = (each for each in actions if sums_grads(each))
            needed = [each.name for each in summed if not set(action.tensors).isdisjoint(each.tensors)]
        if action.kind in _FILL_BUFFERS:
            needed += [freed_by[each.name] for each in action.allocations if each.name in freed_by]
        awaited = transitive_waits(actions, action) if needed else set[str]()
        yield from (f"{action.name} does not wait for {name}" for name in needed if name not in awaited)
        freed_by |= dict.fromkeys(action.frees, action.name)


def _missing_copies(tiers: MemoryTiers, action: Action) -> Iterator[str]:
    """Yields the copy of a shard that `action`, which gathers it or copies it on, does not wait for."""
    kinds = {"UNSHARD": "FETCH_PARAM"} if tiers.weights != "device" else {}
    kinds |= {"FETCH_PARAM": "READ_PARAM"} if tiers.weights == "disk" else {}
    if action.kind in kinds:
        copy = replace(action, kind=kinds[action.kind]).name
        if copy not in action.waits:
            yield f"{action.name} does not wait for {copy}"
