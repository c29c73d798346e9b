"""Finds the actions that complete the gradients of a parameter group, and those that read summed gradients.

Backwards of several block calls may add to one gradient; the last of them completes it. The first action that
reads all summed gradients (LOCAL_NORM, else CLIP) must wait for every sum.
"""

from collections.abc import Iterable, Sequence

from meshwright.plan.model_spec.model_spec import ROOT
from meshwright.plan.sharding.param_sharding import ParamGroup
from meshwright.plan.step.program import Action, with_waits
from meshwright.plan.step.single_device_program import WEIGHT_GRAD_KINDS


def reads_summed_grads(action: Action) -> bool:
    """Returns whether `action` reads the summed gradients of all parameters; all reductions precede the first
    such action.
    """
    return action.kind in ("LOCAL_NORM", "OFFLOAD_GRAD", "CLIP")


def first_grad_reader(actions: Sequence[Action], microbatch: int | None = None) -> int:
    """Returns the index of the first action that reads all summed gradients (of `microbatch`, if it is
    stepped alone).
    """
    return next(
        i
        for i, action in enumerate(actions)
        if reads_summed_grads(action) and action.microbatch == microbatch
    )


def with_grad_waits(
    actions: Iterable[Action], names: Iterable[str], microbatch: int | None = None
) -> list[Action]:
    """Returns `actions`, in which those that read all summed gradients (of `microbatch`, if given) wait for
    `names` too.
    """
    names = tuple(names)
    return [
        with_waits(action, names)
        if reads_summed_grads(action) and action.microbatch == microbatch
        else action
        for action in actions
    ]


def last_backward(actions: Sequence[Action]) -> Action:
    """Returns the last action that computes parameter gradients: after it all are complete."""
    return next(action for action in reversed(actions) if action.kind in WEIGHT_GRAD_KINDS)


def contributing_calls(param_group: ParamGroup, block_calls: tuple[str, ...]) -> frozenset[str]:
    """Returns the block calls whose backwards add to the gradients of `param_group`; all if glue uses one of
    its parameters.
    """
    found = frozenset(block_call for param in param_group.params for block_call in param.block_calls)
    return frozenset(block_calls) if ROOT in found else found


def completing_backwards(
    actions: Sequence[Action],
    param_group: ParamGroup,
    block_calls: tuple[str, ...],
    microbatch: int | None = None,
) -> list[int]:
    """Returns the indices of the backwards that complete the gradients of `param_group`, one per microbatch,
    in list order.

    With `microbatch`, only its own.
    """
    return BackwardIndex(actions).completing(param_group, block_calls, microbatch)


class BackwardIndex:
    """The positions of the completing backwards in a list, indexed once for all parameter groups."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions, self._at = actions, dict[str, list[int]]()
        for i, action in enumerate(actions):
            if action.kind in WEIGHT_GRAD_KINDS:
                self._at.setdefault(action.subject, []).append(i)

    def completing(
        self, param_group: ParamGroup, block_calls: tuple[str, ...], microbatch: int | None = None
    ) -> list[int]:
        """As `completing_backwards`."""
        found = sorted(
            i
            for block_call in contributing_calls(param_group, block_calls)
            for i in self._at.get(block_call, ())
        )
        microbatches = ((self._actions[i].microbatch, i) for i in found)
        return sorted({each: i for each, i in microbatches if microbatch in (None, each)}.values())
