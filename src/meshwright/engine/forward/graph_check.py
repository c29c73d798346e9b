"""Whether a plan does anything between the backwards of two blocks, so that the graph must be cut there.

Where it does not, the backward of the whole model, or of a part of it, is one call: no leaf at each block, and tens of
microseconds a block less, which thin blocks show.

    part      F F F F  ...  B B B B                one graph
    beside    F F F F  ...  B PACK B PACK B B      a graph for each block

Whether gradients can flow as the plan has them: looked at once, in the first loss of a run.
"""

from typing import Any

import torch

from meshwright.engine.runtime.state import RankState
from meshwright.model.blocks.driver import BlockCall
from meshwright.model.blocks.graph_check import check_auxiliary_loss, split_graph
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.step.action import Action
from meshwright.plan.step.single_device import CHECKPOINTED_FORWARD


def needs_graph_cuts(plan: Plan) -> bool:
    """Whether the graph of a forward is cut at the borders of blocks; a part is one where its backwards stand side by side."""
    actions = plan.actions
    kinds = {action.kind for action in actions}
    if (
        plan.mesh.group_size(plan.sharding.grad_sum_axes) > 1
        or CHECKPOINTED_FORWARD in kinds
        or "B" not in kinds
        or any(action.inner_transfers for action in actions)
    ):
        return True
    if not plan.sharding.block_calls_by_pp_rank:
        backwards = [i for i, action in enumerate(actions) if action.kind == "B"]
        return backwards[-1] - backwards[0] >= len(backwards)
    return plan.sharding.model_spec.writes_in_place or "I" in kinds or _interrupted(plan, actions)


def _interrupted(plan: Plan, actions: tuple[Action, ...]) -> bool:
    """Whether anything else stands within the backwards of a part for one micro-batch, or a part is left out."""
    at = {(action.subject, action.microbatch): i for i, action in enumerate(actions) if action.kind == "B"}
    mine = [
        part.block_calls
        for part in plan.sharding.stages
        if part.block_calls[0] in plan.sharding.model_spec.block_calls
    ]
    micros = {micro for _, micro in at}
    spans = [
        (at.get((visits[-1], micro)), at.get((visits[0], micro)), len(visits))
        for visits in mine
        for micro in micros
    ]
    return any(
        last is not None and first is not None and first - last >= length for last, first, length in spans
    )


def check_gradient_paths(
    plan: Plan,
    state: RankState,
    loss: torch.Tensor,
    microbatch: int,
    outputs: Any,
    final_glue: BlockCall,
    *,
    is_graph_cut: bool,
) -> None:
    """Raise PlanError for a loss that is no scalar, and for paths from it to a parameter that go round the borders of blocks.

    Where the graph is not `cut` there is one backward, and no border that a path could go round.
    """
    if loss.shape != ():
        text = f"the loss has the shape {list(loss.shape)}; needed is a scalar, the sum over what counts"
        raise PlanError(text, fix="return total.sum() from Loss.total", location="loss")
    if not is_graph_cut:
        return
    subject = state.trained_module
    found = split_graph(state.forward_passes[microbatch], final_glue)
    found.check_param_users(
        subject.trainable_parameters,
        {weight.name: weight.block_calls for weight in subject.model_spec.params},
    )
    handed = {id(tensor) for tensor in tree_tensors(outputs)}
    used = {name for action in plan.actions if action.kind == "LOSS" for name in action.tensors}
    unknown = {name: p for name, p in subject.parameters.items() if id(p) not in handed and name not in used}
    found.check_loss(loss, unknown)
    parts = plan.mesh.group_size(plan.sharding.grad_sum_axes) * plan.num_microbatches
    check_auxiliary_loss(loss, outputs, state.forward_passes[microbatch], final_glue, parts)
