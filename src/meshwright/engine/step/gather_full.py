"""Whole values of weights on all ranks, where ranks hold the weights of some parts of the model only; and buffers likewise.

Each rank along pp in turn gives those of which it is the first user to all others, in the order of the model:

    rank 0   embed.weight  layers.0...   --> 1, 2        rank 1   layers.2...   --> 0, 2        rank 2   head.weight   --> 0, 1
"""

from collections.abc import Iterable, Iterator

import torch

from meshwright.engine.forward.lockstep_forward import BROADCAST_DTYPES
from meshwright.engine.optim.state_dict import persistent_buffers
from meshwright.engine.runtime.state import RankState
from meshwright.plan.model_spec.model_spec import ParamSpec, block_of
from meshwright.plan.plan import Plan

NamedTensors = Iterator[tuple[str, torch.Tensor]]


def gather_full_values(
    plan: Plan, state: RankState, local_values: NamedTensors, param_specs: Iterable[ParamSpec], action: str
) -> NamedTensors:
    """`mine`, what this rank holds of `weights`, and what the others do; where all ranks hold all, `mine` as it comes."""
    if not plan.sharding.block_calls_by_pp_rank:
        yield from local_values
        return
    held, group, device = dict(local_values), state.world.group(("pp",)), state.world.device
    owned = [(weight, plan.sharding.pp_ranks_using(weight)[0]) for weight in param_specs]
    kinds = [
        BROADCAST_DTYPES.index(held[weight.name].dtype) if source == group.index else 0
        for weight, source in owned
    ]
    told = torch.tensor(
        kinds, dtype=torch.float64, device=device
    )  # what has a master is in another dtype than what is frozen
    group.all_reduce(told, action=action).wait()
    for (weight, source), kind in zip(owned, told.tolist(), strict=True):
        blank = torch.empty(
            0 if group.index == source else weight.numel, dtype=BROADCAST_DTYPES[int(kind)], device=device
        )
        flat = held[weight.name].contiguous().view(-1) if group.index == source else blank
        group.broadcast(flat, source=source, action=action).wait()
        yield weight.name, flat.view(weight.shape)


def gather_full_buffers(plan: Plan, state: RankState, action: str) -> dict[str, torch.Tensor]:
    """The model's persistent buffers by name; those inside of a block are of the first rank that runs it. All ranks call it."""
    stages = [{block_of(visit) for visit in stage} for stage in plan.sharding.block_calls_by_pp_rank]
    found = dict(persistent_buffers(state.trained_module.module))
    for name in found if stages else ():
        inside = [block for block in state.trained_module.blocks if name.startswith(f"{block}.")]
        source = next((index for index, stage in enumerate(stages) if not stage.isdisjoint(inside)), None)
        if source is not None:
            found[name] = found[name].detach().clone().contiguous()
            state.world.group(("pp",)).broadcast(found[name], source=source, action=action).wait()
    return found
