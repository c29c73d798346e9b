"""Which weights a micro-batch meets where ranks step more than once in a step: those after how many of its steps.

    STASH    keep a copy of the weights as they are, before they are stepped: a backward will need them
    LOAD_STASHED  have the kept weights in the model, for the backward of a micro-batch whose forward has met them
    LOAD_LATEST    have the newest ones there again; what nobody needs any more is let go of

    F0  F1  F2  B0  STASH  STEP(0)  F3  LOAD_STASHED  B1  LOAD_LATEST  STASH  STEP(1)      F0, F1, F2, B0 and B1 meet version 0, F3 version 1

All of it is read from the list of a rank. A backward that met other weights than its forward would be no gradient of anything.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.plan.step.action import Action
from meshwright.plan.step.single_device import FORWARD_KINDS, PARAM_USE_KINDS, stepped_microbatches


class ParamVersionUse(NamedTuple):
    """`action`, which uses weights, meets those that have been stepped `version` times."""

    action: Action
    version: int


def param_version_uses(actions: Sequence[Action]) -> Iterator[ParamVersionUse]:
    """Everything in the list of a rank that uses weights, and which."""
    newest, kept = 0, dict[str, int]()
    restored: int | None = None
    for action in actions:
        match action.kind:
            case "STEP":
                newest += 1
            case "STASH":
                kept[action.subject] = newest
            case "LOAD_STASHED":
                restored = kept.get(action.subject, newest)
            case "LOAD_LATEST":
                restored = None
        if action.kind in PARAM_USE_KINDS:
            yield ParamVersionUse(action, newest if restored is None else restored)


def forward_versions(actions: Sequence[Action]) -> dict[int, int]:
    """By micro-batch, which weights its forward meets on a rank that plays `actions`."""
    return {
        each.action.microbatch or 0: each.version
        for each in param_version_uses(actions)
        if each.action.kind in FORWARD_KINDS
    }


def staleness(actions: Sequence[Action]) -> int:
    """How many steps old the weights are, at most, at which a gradient was taken when it is stepped with."""
    known = forward_versions(actions)
    return max(
        (number - known.get(micro, number) for number, micro in enumerate(stepped_microbatches(actions))),
        default=0,
    )


def version_conflicts(actions: Sequence[Action]) -> Iterator[str]:
    """What is wrong with the versions in the list of a rank: a micro-batch that meets several, and steps in between them."""
    known: dict[int, int] = {}
    for action, version in param_version_uses(actions):
        first = known.setdefault(action.microbatch or 0, version)
        if version != first:
            yield f"{action.name} meets the weights after {version} steps, and the forward of its micro-batch those after {first}"
    kept: set[str] = set()
    restored = ""
    for action in actions:
        if action.kind == "STASH":
            kept.add(action.subject)
        elif action.kind == "LOAD_STASHED" and action.subject not in kept:
            yield f"{action.name} asks for weights that no STASH has kept"
        if action.kind in ("STEP", "STASH") and restored:
            yield f"{action.name} finds the weights of {restored} in the model, and not the newest ones"
        restored = {"LOAD_STASHED": action.name, "LOAD_LATEST": ""}.get(action.kind, restored)
