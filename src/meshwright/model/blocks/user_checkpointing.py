"""Detects blocks that the model itself recomputes with torch.utils.checkpoint (gradient checkpointing).

The recomputation gives the right numbers, but the plan does not know of it. Collectives inside the block
would run once more, in a backward whose program has none there; and dropout would draw other masks than in
the forward. So either is refused, and the fix is the strategy that does the same.
"""

import sys
from collections.abc import Iterator

import torch

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.plan import Plan
from meshwright.plan.step.single_device_program import FORWARD_KINDS

CHECKPOINT_MODULE = "torch.utils.checkpoint"
USER_CHECKPOINT_FIX = (
    "turn the model's own checkpointing off (in transformers: activation_checkpointing_disable()), and add "
    "the strategy 'activation_checkpointing'"
)


def in_user_checkpoint() -> bool:
    """Returns whether the running code is inside torch.utils.checkpoint, of either kind, by the model
    itself.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and hooks[0].__module__ == CHECKPOINT_MODULE:
        return True
    if torch.is_grad_enabled():
        return False
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != CHECKPOINT_MODULE:
        frame = frame.f_back
    return frame is not None


def user_checkpoint_diagnostics(plan: Plan) -> Iterator[Diagnostic]:
    """Yields diagnostics for blocks that the model itself recomputes, and in which ranks of `plan`
    communicate.
    """
    actions = [
        action for role in plan.program.roles for action in role.actions if action.kind in FORWARD_KINDS
    ]
    communicating = {
        action.subject for action in actions if any(not move.in_glue for move in action.inner_transfers)
    }
    recomputed = [
        block_call for block_call in plan.model_spec.user_checkpointed_calls if block_call in communicating
    ]
    if recomputed:
        others = f" and {len(recomputed) - 1} more blocks" if len(recomputed) > 1 else ""
        text = f"the model runs '{recomputed[0]}'{others} again in backward ({CHECKPOINT_MODULE}),"
        text += " and its collectives would run once more"
        yield Diagnostic(text, USER_CHECKPOINT_FIX, "model")
