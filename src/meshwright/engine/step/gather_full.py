"""Whole values of weights on all ranks, where ranks hold the weights of some parts of the model only; and buffers likewise.

Each rank along pp in turn gives those of which it is the first user to all others, in the order of the model:

    rank 0   embed.weight  layers.0...   --> 1, 2        rank 1   layers.2...   --> 0, 2        rank 2   head.weight   --> 0, 1
"""

from collections.abc import Iterable, Iterator

import torch

from meshwright.engine.forward.lockstep_forward import DTYPES
from meshwright.engine.optim.state_dict import persistent_buffers
from meshwright.engine.runtime.state import State
from meshwright.plan.model_spec.model_spec import Weight, block_of
from meshwright.plan.plan import Plan

Values = Iterator[tuple[str, torch.Tensor]]


def spread(plan: Plan, state: State, mine: Values, weights: Iterable[Weight], action: str) -> Values:
    """`mine`, what this rank holds of `weights`, and what the others do; where all ranks hold all, `mine` as it comes."""
    if not plan.space.stages:
        yield from mine
        return
    held, group, device = dict(mine), state.world.group(("pp",)), state.world.device
    owned = [(weight, plan.space.users(weight)[0]) for weight in weights]
    kinds = [DTYPES.index(held[weight.name].dtype) if source == group.index else 0 for weight, source in owned]
    told = torch.tensor(kinds, dtype=torch.float64, device=device)  # what has a master is in another dtype than what is frozen
    group.all_reduce(told, action=action).wait()
    for (weight, source), kind in zip(owned, told.tolist(), strict=True):
        blank = torch.empty(0 if group.index == source else weight.numel, dtype=DTYPES[int(kind)], device=device)
        flat = held[weight.name].contiguous().view(-1) if group.index == source else blank
        group.broadcast(flat, source=source, action=action).wait()
        yield weight.name, flat.view(weight.shape)


def spread_buffers(plan: Plan, state: State, action: str) -> dict[str, torch.Tensor]:
    """The model's persistent buffers by name; those inside of a block are of the first rank that runs it. All ranks call it."""
    stages = [{block_of(visit) for visit in stage} for stage in plan.space.stages]
    found = dict(persistent_buffers(state.subject.module))
    for name in found if stages else ():
        inside = [block for block in state.subject.blocks if name.startswith(f"{block}.")]
        source = next((index for index, stage in enumerate(stages) if not stage.isdisjoint(inside)), None)
        if source is not None:
            found[name] = found[name].detach().clone().contiguous()
            state.world.group(("pp",)).broadcast(found[name], source=source, action=action).wait()
    return found
