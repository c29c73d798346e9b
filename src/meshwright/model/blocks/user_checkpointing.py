"""Blocks that the model itself runs again in backward, by torch.utils.checkpoint (in transformers, gradient checkpointing).

What runs again computes what it computed, so numbers are right; but nobody hears of it. What ranks send each other within the
block they send once more, in a backward whose plan says nothing of that; and dropout would draw other masks than in the forward.
So either is refused, and the strategy that does the same is its repair.
"""

import sys
from collections.abc import Iterator

import torch

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.plan import Plan
from meshwright.plan.step.single_device import FORWARD_KINDS

CHECKPOINT_MODULE = "torch.utils.checkpoint"
USER_CHECKPOINT_FIX = (
    "turn the model's own checkpointing off (in transformers: activation_checkpointing_disable()), and add the strategy"
    " 'recompute'"
)


def in_user_checkpoint() -> bool:
    """Whether what runs now runs once more in backward, by the model's own doing: torch.utils.checkpoint, of either kind."""
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
    """Blocks that the model runs again by itself, and in which ranks of `plan` meet."""
    actions = [
        action for _, listed in plan.program.roles for action in listed if action.kind in FORWARD_KINDS
    ]
    meeting = {
        action.subject for action in actions if any(not move.in_glue for move in action.inner_transfers)
    }
    found = [visit for visit in plan.model_spec.user_checkpointed_calls if visit in meeting]
    if found:
        more = f" and {len(found) - 1} more blocks" if len(found) > 1 else ""
        text = f"the model runs '{found[0]}'{more} again in backward ({CHECKPOINT_MODULE}),"
        text += " and ranks would send once more what they send there"
        yield Diagnostic(text, USER_CHECKPOINT_FIX, "model")
