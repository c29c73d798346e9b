"""Counts on the device how many tokens of this rank choose each expert, in the forwards of a step."""

from collections.abc import Callable
from functools import partial
from typing import Any

from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.plan.model_spec.model_spec import ExpertsCall
from meshwright.plan.sharding.expert_load import counted_experts_calls, load_count_begins, num_load_counts
from meshwright.plan.step.single_device_program import FORWARD_KINDS


def count_expert_load(state: RankState) -> None:
    """Makes experts add the choices that they are given to the sums of the step, behind the loss, in the
    order of `counted_experts_calls`.

    To be called when strategies have wrapped the forwards of experts: around these, the choices are the
    router's. The host reads nothing.
    """
    view, work = state.plan.view, state.plan.view.work_share
    begins = load_count_begins(view.plan)
    local = {call.name for call in view.model_spec.experts_calls}
    forwards = [action for action in state.plan.actions if action.kind in FORWARD_KINDS]
    microbatches = {action.name: action.microbatch or 0 for action in forwards}

    def count(begin: int, call: ExpertsCall, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `forward`; in a forward of the step it counts for each expert, from the sum at `begin` on."""
        sums, microbatch = state.step.sums, microbatches.get(state.current_action)
        if microbatch is not None and microbatch < state.step.num_real_microbatches:
            given = tree_tensors((args, kwargs))
            if call.form == "dense":  # rows of zeros are not chosen
                chosen_rows = given[0].detach().any(dim=1).view(call.num_experts, -1)
                sums[begin : begin + call.num_experts].add_(chosen_rows.sum(1))
            else:
                index = next(each for each in given if not each.is_floating_point())
                chosen = index.flatten().clamp(max=call.num_experts) + begin
                sums.index_add_(0, chosen, sums.new_ones(()).expand(len(chosen)))
        return forward(*args, **kwargs)

    for name, call in counted_experts_calls(view.plan).items():
        # where each rank has all tokens, the first one counts them
        has_others_tokens = work.token_shard and work.token_fraction(call.block_call, name) == 1
        if name in local and not has_others_tokens:
            state.patches.wrap_forward(name, partial(count, 1 + begins[name], call))  # behind the loss
    state.num_load_counts = num_load_counts(view.plan)
