"""Whether gradients can flow as the plan has them: looked at once, in the first loss of a run."""

from typing import Any

import torch

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.engine.state import State
from meshwright.model.drive import Visit
from meshwright.model.paths import pieces, refuse_divided
from meshwright.model.values import tensors


def check_paths(plan: Plan, state: State, loss: torch.Tensor, micro: int, outputs: Any, closing: Visit, *, cut: bool) -> None:
    """Raise PlanError for a loss that is no scalar, and for paths from it to a parameter that go round the borders of blocks.

    Where the graph is not `cut` there is one backward, and no border that a path could go round.
    """
    if loss.shape != ():
        text = f"the loss has the shape {list(loss.shape)}; needed is a scalar, the sum over what counts"
        raise PlanError(text, fix="return total.sum() from Loss.total", where="loss")
    if not cut:
        return
    subject = state.subject
    found = pieces(state.passes[micro], closing)
    found.refuse_unknown(subject.trainable, {weight.name: weight.visits for weight in subject.anatomy.weights})
    handed = {id(tensor) for tensor in tensors(outputs)}
    used = {name for action in plan.actions if action.kind == "LOSS" for name in action.tensors}
    unknown = {name: p for name, p in subject.parameters.items() if id(p) not in handed and name not in used}
    found.refuse_loss(loss, unknown)
    parts = plan.mesh.extent(plan.space.summed_axes) * plan.num_micro
    refuse_divided(loss, outputs, state.passes[micro], closing, parts)
