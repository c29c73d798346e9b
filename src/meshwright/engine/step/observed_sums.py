"""What sums of codes have left out on all ranks, and whether they are what their technique defines.

    definition     the sum that the ranks end with = what the technique defines, computed in one process from
                   the inputs of all ranks, without messages
    owed           what all ranks together owe to each parameter, as a logical tensor: the sum of residuals
    unowed         what codes lost in this step, and no rank owes: without error feedback
    clipped        what local clipping took from the gradients
    dropped        the momenta that have ended, where momentum is added before codes

All ranks call these functions, after a step and beside its program. The verifier does
(verifier/one_device/lost_steps.py), for a rank whose state has `observed_sums`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from meshwright.engine.runtime.rank_state import RankState
from meshwright.engine.step.broadcast_stage_params import gather_full_values
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.tensor_placements import FLAT, Layout, S
from meshwright.plan.strategy_interface import ObservedSum

ACTION = "GATHER_FULL"  # the ledger name of collectives that no plan has


def owed_sums(state: RankState) -> dict[str, torch.Tensor]:
    """Returns what all ranks together owe to each parameter."""
    summands, layouts = dict[str, torch.Tensor](), dict[str, Layout]()
    for owner, specs in state.plan.states.items():
        tensors = state.strategy_tensors.of(owner)
        for spec in specs:
            if spec.param and spec.name == "residual":
                summands[spec.param], layouts[spec.param] = tensors[spec.key], spec.layout
    return _logical_sums(state, summands, layouts)


def unowed_sums(state: RankState) -> dict[str, torch.Tensor]:
    """Returns what codes have lost in this step, and no rank owes."""
    return _step_sums(state, lambda observed: {} if observed.is_owed else observed.lost)


@dataclass(frozen=True)
class LocalChanges:
    """What ranks did to their gradients before codes, all together: `clipped` of them, and the momenta that
    they added, times `momentum`; of those, `dropped` have ended in this step.
    """

    momentum: float = 0.0
    clipped: Mapping[str, torch.Tensor] = field(default_factory=dict)
    dropped: Mapping[str, torch.Tensor] = field(default_factory=dict)


def local_changes(state: RankState) -> LocalChanges:
    """Returns what ranks did to their gradients before codes in this step."""
    observed = state.observed_sums or ()
    momentum = largest_of_ranks(state, max((each.momentum for each in observed), default=0.0))
    clips = largest_of_ranks(state, float(any(each.clipped for each in observed)))
    return LocalChanges(
        momentum,
        _step_sums(state, lambda each: each.clipped) if clips else {},
        _step_sums(state, lambda each: each.dropped) if momentum else {},
    )


def _step_sums(
    state: RankState, part: Callable[[ObservedSum], Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    summands, layouts = dict[str, torch.Tensor](), dict[str, Layout]()
    for observed in state.observed_sums or ():
        for name, each in part(observed).items():
            summands[name] = each + summands[name] if name in summands else each
            layouts[name] = observed.layouts[name]
    return _logical_sums(state, summands, layouts)


def _logical_sums(
    state: RankState, summands: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout]
) -> dict[str, torch.Tensor]:
    compressed = state.plan.sharding.compressed_params
    specs = [each for each in state.plan.model_spec.trainable if each.name in compressed]
    shapes = {each.name: each.shape for each in specs}

    def read_local(name: str) -> torch.Tensor:
        parameter = state.trained_module.parameters[name]
        if name not in summands:  # on no rank that has it
            return torch.zeros(shapes[name], dtype=parameter.dtype, device=parameter.device)
        summand = summands[name]
        total = summand.new_zeros(parameter.numel())
        shard = state.flat_params.param_shard(name) if summand.numel() != total.numel() else None
        begin = 0 if shard is None else shard.begin
        total[begin : begin + summand.numel()] = summand.view(-1)
        layout = layouts[name]
        axes = (*layout.axes_with("P"), *(axis for axis, at in layout.placements if at == S(FLAT)))
        state.world.group(axes).all_reduce(total, action=ACTION).wait()
        return state.flat_params.param_slices.gather_full(name, total.view(parameter.shape), ACTION)

    return dict(gather_full_values(state, read_local, specs, ACTION))


def largest_sum_error(state: RankState) -> float:
    """Returns the largest error of any sum of this step on any rank, relative to the largest element."""
    # sums over several groups end in another order on every rank, and all must meet in the same one
    sums = sorted(state.observed_sums or (), key=lambda each: each.number)
    return largest_of_ranks(state, max((_error(state, each) for each in sums), default=0.0))


def largest_of_ranks(state: RankState, value: float) -> float:
    """Returns the largest `value` of any rank."""
    group = state.world.group(AXES)
    mine = torch.tensor([value], dtype=torch.float64, device=state.world.device)
    found = mine.new_empty(group.size)
    group.all_gather(found, mine, action=ACTION).wait()
    return float("nan") if found.isnan().any() else found.max().item()


def _error(state: RankState, observed: ObservedSum) -> float:
    group = state.world.group(observed.axes)
    inputs = observed.input.new_empty(group.size, observed.input.numel())
    group.all_gather(inputs, observed.input.contiguous(), action=ACTION).wait()
    defined = observed.defined_sum(list(inputs))
    numel = observed.output.numel()
    first = group.index * numel if numel < observed.input.numel() else 0
    expected = defined[first : first + numel]
    scale = max(expected.abs().max().item(), 1e-30) if numel else 1.0
    return (observed.output - expected).abs().max().item() / scale if numel else 0.0
