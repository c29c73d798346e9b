"""Tracks the weight version that each microbatch uses if a rank steps more than once per training step
(PipeDream).

    STASH         keep a copy of the weights before they are updated, for a later backward
    LOAD_STASHED  put the stashed weights into the model, for the backward of a forward that used them
    LOAD_LATEST   put the newest weights back; a copy that no later backward needs is freed

    F0  F1  F2  B0  STASH  STEP(0)  F3  LOAD_STASHED  B1  LOAD_LATEST  STASH  STEP(1)

Here F0, F1, F2, B0 and B1 use version 0, and F3 version 1. All of it is read from the action list of a rank.
A backward with other weights than its forward would not compute a gradient.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.plan.step.program import Action
from meshwright.plan.step.single_device_program import FORWARD_KINDS, PARAM_USE_KINDS, stepped_microbatches


class ParamVersionUse(NamedTuple):
    """`action` uses weights that have been updated `version` times."""

    action: Action
    version: int


def param_version_uses(actions: Sequence[Action]) -> Iterator[ParamVersionUse]:
    """Yields every action that uses weights, with the version it uses."""
    newest, stashed = 0, dict[str, int]()
    loaded: int | None = None
    for action in actions:
        match action.kind:
            case "STEP":
                newest += 1
            case "STASH":
                stashed[action.subject] = newest
            case "LOAD_STASHED":
                loaded = stashed.get(action.subject, newest)
            case "LOAD_LATEST":
                loaded = None
        if action.kind in PARAM_USE_KINDS:
            yield ParamVersionUse(action, newest if loaded is None else loaded)


def forward_versions(actions: Sequence[Action]) -> dict[int, int]:
    """Returns, by microbatch, the weight version of its forward."""
    return {
        use.action.microbatch or 0: use.version
        for use in param_version_uses(actions)
        if use.action.kind in FORWARD_KINDS
    }


def staleness(actions: Sequence[Action]) -> int:
    """Returns the largest age, in steps, of the weights for which a gradient was computed when it is
    applied.
    """
    versions = forward_versions(actions)
    return max(
        (
            number - versions.get(microbatch, number)
            for number, microbatch in enumerate(stepped_microbatches(actions))
        ),
        default=0,
    )


def version_conflicts(actions: Sequence[Action]) -> Iterator[str]:
    """Yields errors in the versions of a rank's list: a microbatch with several versions, or a step between
    them.
    """
    versions: dict[int, int] = {}
    for action, version in param_version_uses(actions):
        first = versions.setdefault(action.microbatch or 0, version)
        if version != first:
            forward = f"the forward of its microbatch those after {first}"
            yield f"{action.name} uses the weights after {version} steps, and {forward}"
    stashed: set[str] = set()
    loaded = ""
    for action in actions:
        if action.kind == "STASH":
            stashed.add(action.subject)
        elif action.kind == "LOAD_STASHED" and action.subject not in stashed:
            yield f"{action.name} loads weights that no STASH has kept"
        if action.kind in ("STEP", "STASH") and loaded:
            yield f"{action.name} finds the weights of {loaded} in the model, and not the newest ones"
        loaded = {"LOAD_STASHED": action.name, "LOAD_LATEST": ""}.get(action.kind, loaded)
