"""Full values of parameters and buffers on all ranks, where pipeline ranks hold only their stages, and where
servers have rows that workers have not: the first server, which has gathered them, broadcasts these.

One parameter at a time, in the order of the model; its first user along pp broadcasts it:

    rank 0   embed.weight  layers.0...  --> 1, 2    rank 1   layers.2...  --> 0, 2     rank 2   head  --> 0, 1
"""

from collections.abc import Callable, Iterable, Iterator

import torch

from meshwright.comm.collectives.group import Group
from meshwright.engine.forward_backward.lockstep_pipeline_forward import BROADCAST_DTYPES
from meshwright.engine.optim.sharded_state_dict import persistent_buffers
from meshwright.engine.runtime.rank_state import RankState
from meshwright.plan.model_spec.model_spec import ParamSpec, block_of

ReadLocal = Callable[[str], torch.Tensor | None]  # the full value of a parameter that this rank has


def gather_full_values(
    state: RankState, read_local: ReadLocal, param_specs: Iterable[ParamSpec], action: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the values of `param_specs` on all ranks, in order, one at a time: `read_local(name)` of a rank
    that has the parameter.

    A server yields what it has.
    """
    for param in param_specs:
        value = full_value(state, read_local, param, action)
        if value is not None:
            yield param.name, value


def full_value(
    state: RankState,
    read_local: ReadLocal,
    param: ParamSpec,
    action: str,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """Returns the value of `param`, which all ranks ask for; None where no rank has one, and on a server of
    other parameters. `dtype` is that of the value if all ranks know it; else it is sent too.
    """
    sharding, is_local = state.plan.sharding, param.name in state.trained_module.parameters
    if any(each.param.name == param.name for each in sharding.params_on_servers):
        group, source = state.world.group((sharding.server_axis,)), sharding.num_workers
    elif not sharding.block_calls_by_pp_rank or state.plan.view.is_server:
        return read_local(param.name) if is_local else None
    else:
        group, source = state.world.group(("pp",)), sharding.pp_ranks_using(param)[0]
    local = read_local(param.name) if is_local else None  # all that have it, whose collectives it takes
    value = local.contiguous() if local is not None and group.index == source else None
    del local
    if dtype is None:
        dtype = _share_dtype(state, group, None if value is None else value.dtype, source, action)
    if dtype is None:
        return None
    if value is None:
        value = torch.empty(param.shape, dtype=dtype, device=state.world.device)
    group.broadcast(value, source=source, action=action).wait()
    return value


def _share_dtype(
    state: RankState, group: Group, dtype: torch.dtype | None, source: int, action: str
) -> torch.dtype | None:
    """Returns the dtype of the value on the rank at `source`; None if it has no value."""
    code = torch.tensor([-1.0 if dtype is None else BROADCAST_DTYPES.index(dtype)], dtype=torch.float64)
    code = code.to(state.world.device)
    group.broadcast(code, source=source, action=action).wait()
    return BROADCAST_DTYPES[int(code.item())] if code.item() >= 0 else None


def full_value_dtype(state: RankState, param: ParamSpec, action: str) -> torch.dtype:
    """Returns the dtype of the value of `param`, or of its master if it has one; all ranks call it, where
    none is a server.
    """
    dtype = None
    if param.name in state.trained_module.parameters:
        dtype = state.flat_params.local_values(param.name, use_masters=True).dtype
    if state.plan.sharding.block_calls_by_pp_rank:
        source = state.plan.sharding.pp_ranks_using(param)[0]
        dtype = _share_dtype(state, state.world.group(("pp",)), dtype, source, action)
    if dtype is None:
        raise ValueError(f"no rank has {param.name}")
    return dtype


def gather_full_buffers(state: RankState, action: str) -> dict[str, torch.Tensor]:
    """Returns the model's persistent buffers by name; all ranks call it."""
    names = [name for name, _ in persistent_buffers(state.trained_module.module)]
    return {name: full_buffer(state, name, action) for name in names}


def full_buffer(state: RankState, name: str, action: str) -> torch.Tensor:
    """Returns the persistent buffer `name`; that of a block from the first rank that runs it. All ranks call
    it.
    """
    buffer, stages = state.trained_module.module.get_buffer(name), state.plan.sharding.block_calls_by_pp_rank
    blocks = {block for block in state.trained_module.blocks if name.startswith(f"{block}.")}
    running = (index for index, stage in enumerate(stages) if not blocks.isdisjoint(map(block_of, stage)))
    source = next(running, None)
    if source is None:
        return buffer
    buffer = buffer.detach().clone().contiguous()
    state.world.group(("pp",)).broadcast(buffer, source=source, action=action).wait()
    return buffer
