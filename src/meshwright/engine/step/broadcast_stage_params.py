"""Full values of parameters and buffers on all ranks, where pipeline ranks hold only their stages, and where
servers have rows that workers have not: the first server, which has gathered them, broadcasts these.

Each pp rank in turn broadcasts those of which it is the first user, in the order of the model:

    rank 0   embed.weight  layers.0...  --> 1, 2    rank 1   layers.2...  --> 0, 2     rank 2   head  --> 0, 1
"""

from collections.abc import Iterable, Iterator

import torch

from meshwright.engine.forward_backward.lockstep_pipeline_forward import BROADCAST_DTYPES
from meshwright.engine.optim.sharded_state_dict import persistent_buffers
from meshwright.engine.runtime.rank_state import RankState
from meshwright.plan.model_spec.model_spec import ParamSpec, block_of

NamedTensors = Iterator[tuple[str, torch.Tensor]]


def gather_full_values(
    state: RankState, local_values: NamedTensors, param_specs: Iterable[ParamSpec], action: str
) -> NamedTensors:
    """Yields `local_values`, this rank's values of `param_specs`, and those of other pp ranks.

    Where all ranks hold all parameters, and on servers, yields `local_values` as they come.
    """
    plan = state.plan
    if plan.sharding.params_on_servers:
        yield from _with_rows(state, local_values, action)
        return
    if not plan.sharding.block_calls_by_pp_rank or plan.view.is_server:
        yield from local_values
        return
    local, group, device = dict(local_values), state.world.group(("pp",)), state.world.device
    owners = [(weight, plan.sharding.pp_ranks_using(weight)[0]) for weight in param_specs]
    local_codes = [
        BROADCAST_DTYPES.index(local[weight.name].dtype) if source == group.index else 0
        for weight, source in owners
    ]
    # a parameter with a master has another dtype than a frozen one
    dtype_codes = torch.tensor(local_codes, dtype=torch.float64, device=device)
    group.all_reduce(dtype_codes, action=action).wait()
    for (weight, source), code in zip(owners, dtype_codes.tolist(), strict=True):
        blank = torch.empty(
            0 if group.index == source else weight.numel, dtype=BROADCAST_DTYPES[int(code)], device=device
        )
        flat = local[weight.name].contiguous().view(-1) if group.index == source else blank
        group.broadcast(flat, source=source, action=action).wait()
        yield weight.name, flat.view(weight.shape)


def _with_rows(state: RankState, local_values: NamedTensors, action: str) -> NamedTensors:
    """Yields `local_values`, and on workers the parameters whose rows lie on servers."""
    sharding = state.plan.sharding
    group, source = state.world.group((sharding.server_axis,)), sharding.num_workers
    params = {each.param.name: each.param for each in sharding.params_on_servers}
    gathered = dict[str, torch.Tensor]()
    for name, value in local_values:
        gathered |= {name: value} if name in params else {}
        yield name, value
    for param in params.values():
        known = gathered.get(param.name)
        codes = [0.0 if known is None else BROADCAST_DTYPES.index(known.dtype)]
        code = torch.tensor(codes, dtype=torch.float64, device=state.world.device)
        group.broadcast(code, source=source, action=action).wait()
        blank = torch.empty(param.shape, dtype=BROADCAST_DTYPES[int(code.item())], device=code.device)
        value = blank if known is None else known.contiguous()
        group.broadcast(value, source=source, action=action).wait()
        if known is None:
            yield param.name, value


def gather_full_buffers(state: RankState, action: str) -> dict[str, torch.Tensor]:
    """Returns the model's persistent buffers by name; those of a block from the first rank that runs it.

    All ranks call it.
    """
    blocks_by_rank = [
        {block_of(block_call) for block_call in stage} for stage in state.plan.sharding.block_calls_by_pp_rank
    ]
    buffers = dict(persistent_buffers(state.trained_module.module))
    for name in buffers if blocks_by_rank else ():
        inner_blocks = [block for block in state.trained_module.blocks if name.startswith(f"{block}.")]
        source = next(
            (index for index, stage in enumerate(blocks_by_rank) if not stage.isdisjoint(inner_blocks)), None
        )
        if source is not None:
            buffers[name] = buffers[name].detach().clone().contiguous()
            state.world.group(("pp",)).broadcast(buffers[name], source=source, action=action).wait()
    return buffers
