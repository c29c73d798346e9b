"""Decides whether the graph is cut at blocks, and checks once that gradients flow as planned.

Where a plan does nothing between the backwards of two blocks, the backward of the whole model, or of a stage,
is one call: no leaf at each block, and tens of microseconds less per block, which matters for thin blocks.

    one graph          F F F F  ...  B B B B
    a graph per block  F F F F  ...  B PACK B PACK B B
"""

from collections.abc import Sequence
from typing import Any

import torch

from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.blocks.autograd_partition import backward_nodes, is_leaf_node, split_graph
from meshwright.model.blocks.block_forward_backward import BlockCall
from meshwright.model.loss.loss_definition import SAME_LOSS_FIX
from meshwright.model.loss.loss_inputs import distinct_tensors
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import BatchTensor
from meshwright.plan.plan import RankPlan
from meshwright.plan.step.memory.activation_copies import ACTIVATION_COPIES
from meshwright.plan.step.program import Action
from meshwright.plan.step.single_device_program import CHECKPOINTED_KINDS


def needs_graph_cuts(plan: RankPlan) -> bool:
    """Returns whether the graph of a forward is cut at blocks.

    Else the backwards of a stage are contiguous.
    """
    actions = plan.actions
    kinds = {action.kind for action in actions}
    if (
        plan.mesh.group_size(plan.sharding.grad_sum_axes) > 1
        or not kinds.isdisjoint((*CHECKPOINTED_KINDS, *ACTIVATION_COPIES))
        or "B" not in kinds
        or any(action.inner_transfers for action in actions)
    ):
        return True
    if not plan.sharding.block_calls_by_pp_rank:
        backwards = [i for i, action in enumerate(actions) if action.kind == "B"]
        return backwards[-1] - backwards[0] >= len(backwards)
    return plan.view.model_spec.writes_in_place or "I" in kinds or _stages_interleave(plan, actions)


def _stages_interleave(plan: RankPlan, actions: tuple[Action, ...]) -> bool:
    """Returns whether other actions lie between the backwards of a stage, or a stage is left out."""
    position = {
        (action.subject, action.microbatch): i for i, action in enumerate(actions) if action.kind == "B"
    }
    local_stages = [
        stage.block_calls
        for stage in plan.sharding.stages
        if stage.block_calls[0] in plan.view.model_spec.block_calls
    ]
    microbatches = {microbatch for _, microbatch in position}
    spans = [
        (
            position.get((block_calls[-1], microbatch)),
            position.get((block_calls[0], microbatch)),
            len(block_calls),
        )
        for block_calls in local_stages
        for microbatch in microbatches
    ]
    return any(
        last is not None and first is not None and first - last >= length for last, first, length in spans
    )


def check_gradient_paths(
    state: RankState, loss: torch.Tensor, microbatch: int, outputs: Any, final_glue: BlockCall
) -> None:
    """Raises PlanError for a loss that is no scalar, or whose gradients bypass blocks.

    Where the graph is not cut there is one backward, and no boundary that a path could bypass.
    """
    if loss.shape != ():
        text = f"the loss has the shape {list(loss.shape)}; needed is a scalar, the sum over what counts"
        raise PlanError(text, fix="return total.sum() from Loss.total", location="loss")
    if not state.driver.cut_graph:
        return
    subject, plan = state.trained_module, state.plan
    graph = split_graph(state.step.forward_passes[microbatch], final_glue)
    graph.check_param_users(
        subject.trainable_parameters,
        {weight.name: weight.block_calls for weight in subject.model_spec.params},
    )
    output_ids = {id(tensor) for tensor in tree_tensors(outputs)}
    parameters_used = {name for action in plan.actions if action.kind == "LOSS" for name in action.tensors}
    unknown = {
        name: p
        for name, p in subject.parameters.items()
        if id(p) not in output_ids and name not in parameters_used
    }
    graph.check_loss(loss, unknown)
    _check_statistics(loss, distinct_tensors(outputs), plan.model_spec.outputs)


def _check_statistics(
    loss: torch.Tensor, outputs: Sequence[torch.Tensor], columns: Sequence[BatchTensor]
) -> None:
    """Raises PlanError if `loss` takes one of the `outputs` that are computed over all samples and that the
    loss of the analysis did not take: the plan may run the batch in several parts.
    """
    nodes = backward_nodes([loss.grad_fn] if loss.grad_fn is not None else [])
    leaves = {id(node.variable) for node in nodes if is_leaf_node(node)}
    for tensor, column in zip(outputs, columns, strict=False):
        if column.statistic is not None and not column.used_by_loss and id(tensor) in leaves:
            text = f"the loss takes {column.statistic.path}, which the loss of the analysis did not take"
            raise PlanError(text, fix=SAME_LOSS_FIX, location="loss")
