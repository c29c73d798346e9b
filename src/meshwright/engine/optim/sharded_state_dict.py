"""State dicts of one rank, by logical name: a full tensor if all ranks hold it, else the rank's shard.

    model/layers.0.weight              a full tensor, or elements 4096 to 8192 of it
    optimizer/exp_avg/layers.0.weight  an optimizer state, likewise
    buffer/...                         the same on every rank
    state/...                          what techniques keep (step/strategy_tensors.py)
    state/offload/weights/...          the weights of the device, where the host steps others beside

A shard is a range of the flattened logical tensor, so a checkpoint does not depend on the number of ranks,
and every rank of another plan finds in it what it holds.

The state of an optimizer is saved and loaded by parameter name (`exp_avg/lm_head.weight`), so that it
survives any change of layout. A Python number in it comes back as a number (`step:int/lm_head.weight`),
because its arithmetic may differ from a tensor's; so do numbers that the optimizer changed in its groups
(`group.1:float/weight_sum`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from meshwright.engine.optim.abstract_optimizer import PerParamOptimizer, get_blockwise_state_keys
from meshwright.engine.optim.make_optimizers import OptimizerNumbers, all_param_groups, param_group_numbers
from meshwright.engine.runtime.rank_state import RankState, TrainedModule
from meshwright.model.tensors.lazy_mapping import LazyTensors, read_region, tensor_shape
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.model_spec.param_dim_split import DimRanges
from meshwright.plan.sharding.flat_param import QUANT_BLOCK_NUMEL, ParamShard
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.strategy_state import STATE_PREFIX


@dataclass(frozen=True)
class TensorShard:
    """The elements from `start` on of a flattened tensor of `shape`; `values` is flat.

    With `spans`, the elements are counted in the slice that these ranges select from the tensor.
    """

    values: torch.Tensor
    start: int
    shape: tuple[int, ...]
    spans: tuple[DimRanges, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.values.dtype


SavedTensor = torch.Tensor | TensorShard
DEVICE_WEIGHTS = f"{STATE_PREFIX}offload/weights/"


def model_state_dict(state: RankState) -> dict[str, SavedTensor]:
    """Returns the parameters and persistent buffers, as this rank holds them."""
    trained_module, flat_params = state.trained_module, state.flat_params
    found: dict[str, SavedTensor] = {}
    optimizer_params = flat_params.matrix_owners.optimizer_params
    for weight in trained_module.model_spec.params:
        name, param_shard, spans = (
            weight.name,
            flat_params.param_shard(weight.name),
            flat_params.param_slices.spans(weight.name),
        )
        if name in flat_params.matrix_owners.param_names:
            found |= (
                {f"model/{name}": _full_shard(optimizer_params[name])} if name in optimizer_params else {}
            )
        # beside slices, copies of a shard may end elsewhere
        elif param_shard is not None and name in flat_params.reported_param_names:
            found[f"model/{name}"] = TensorShard(
                flat_params.shard_values(param_shard), param_shard.begin, weight.shape, spans
            )
        elif not flat_params.is_flattened(name):
            value = flat_params.master_weights.exact_value(name, trained_module.parameters[name])
            found[f"model/{name}"] = (
                TensorShard(value.reshape(-1), 0, weight.shape, spans) if spans else value
            )
    return found | {f"buffer/{name}": buffer for name, buffer in persistent_buffers(trained_module.module)}


def device_weights_state_dict(state: RankState) -> dict[str, SavedTensor]:
    """Returns the weights that the device computes with, as this rank stores them, where the host steps
    others beside (offload, delay); else nothing.
    """
    store, found = state.flat_params, dict[str, SavedTensor]()
    for param in state.trained_module.model_spec.trainable if state.plan.sharding.tiers.delay else ():
        name, flat_param, shard = param.name, store.flat_param_of(param.name), store.param_shard(param.name)
        spans = store.param_slices.spans(name)
        if flat_param is None:
            weight = state.trained_module.parameters[name].detach()
            found[f"{DEVICE_WEIGHTS}{name}"] = TensorShard(weight.reshape(-1), 0, param.shape, spans)
        elif shard is not None and name in store.reported_param_names:
            values = flat_param.shard[shard.in_shard]
            found[f"{DEVICE_WEIGHTS}{name}"] = TensorShard(values, shard.begin, param.shape, spans)
    return found


@torch.no_grad()
def load_device_weights(state: RankState, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Loads what `device_weights_state_dict` returned; a checkpoint of a plan without delay has none of
    it.
    """
    store = state.flat_params
    for param in state.trained_module.model_spec.trainable if state.plan.sharding.tiers.delay else ():
        name, flat_param, shard = param.name, store.flat_param_of(param.name), store.param_shard(param.name)
        target = state.trained_module.parameters[name].detach()
        begin, end = 0, target.numel()
        if flat_param is not None and flat_param.is_sharded:
            if shard is None:
                continue
            target = flat_param.shard[shard.in_shard]
            begin, end = shard.begin, shard.end
        if f"{DEVICE_WEIGHTS}{name}" in state_dict:
            values = store.param_slices.read_shard(name, state_dict, f"{DEVICE_WEIGHTS}{name}", begin, end)
            target.copy_(values.view(target.shape))


def filter_remote_state(
    state_dict: Mapping[str, SavedTensor], trained_module: TrainedModule, sharding: ShardingPlan
) -> dict[str, SavedTensor]:
    """Returns `state_dict` without the entries of other ranks, which save them: those of other pipeline
    stages, and on servers those of all blocks.
    """
    if not trained_module.remote_param_names and not sharding.num_servers:
        return dict(state_dict)
    local_blocks = {block_of(block_call) for block_call in trained_module.model_spec.block_calls}
    remote_prefixes = tuple(
        f"buffer/{block}." for block in trained_module.blocks if block not in local_blocks
    )
    found: dict[str, SavedTensor] = {}
    for name, value in state_dict.items():
        kind, _, entry = name.partition("/")
        has_one_writer = kind in ("model", "buffer") or (
            kind == "optimizer" and not entry.startswith("group.")
        )
        if not name.startswith(remote_prefixes):
            found[name] = _full_shard(value) if has_one_writer and isinstance(value, torch.Tensor) else value
    return found


def optimizer_state_dict(state: RankState, numbers: OptimizerNumbers) -> dict[str, SavedTensor]:
    """Returns the optimizers' state, as this rank holds it, and the changed `numbers` of their groups."""
    optimizers, trained_module, flat_params = state.optimizers, state.trained_module, state.flat_params
    found: dict[str, SavedTensor] = {}
    shapes = {weight.name: weight.shape for weight in trained_module.model_spec.params}
    optimizer_params, blockwise_keys = flat_params.optimizer_params(), _blockwise_keys(optimizers)
    for entry, value in local_optimizer_state(optimizers, optimizer_params, numbers).items():
        key, _, name = entry.partition("/")
        param_shard, spans = flat_params.param_shard(name), flat_params.param_slices.spans(name)
        if param_shard is not None and name not in flat_params.reported_param_names:
            continue
        if name in flat_params.matrix_owners.param_names:
            found[f"optimizer/{entry}"] = _full_shard(value)
        elif spans and not entry.startswith("group.") and value.ndim:
            found[f"optimizer/{entry}"] = _state_shard(
                entry, value, param_shard, optimizer_params[name], shapes[name], spans
            )
        elif param_shard is None or entry.startswith("group."):
            found[f"optimizer/{entry}"] = value
        elif key in blockwise_keys[id(optimizer_params[name])]:
            num_blocks = -(-trained_module.parameters[name].numel() // QUANT_BLOCK_NUMEL)
            found[f"optimizer/{entry}"] = TensorShard(
                value, param_shard.begin // QUANT_BLOCK_NUMEL, (num_blocks,)
            )
        else:
            found[f"optimizer/{entry}"] = _state_shard(
                entry, value, param_shard, optimizer_params[name], shapes[name]
            )
    return found


def load_model_state(state: RankState, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.dtype]:
    """Loads parameters and buffers from `state_dict`, full tensors by full name, each cast to its dtype here.

    Only what this rank holds is read. Returns the dtypes in which the others were saved,
    by logical name.
    """
    trained_module, flat_params = state.trained_module, state.flat_params
    dtypes: dict[str, torch.dtype] = {}
    with torch.no_grad():
        for name, parameter in trained_module.parameters.items():
            if flat_params.is_flattened(name) and not flat_params.stores_locally(name):
                continue
            entry = f"model/{name}"
            if (
                name in flat_params.matrix_owners.optimizer_params
            ):  # its slices lie within, so it is read once
                full_value = state_dict[entry]
                flat_params.matrix_owners.load_values(name, full_value)
                state_dict_of_param = {entry: full_value}
            else:
                state_dict_of_param = state_dict
            if flat_params.is_flattened(name):
                dtypes[name] = flat_params.load_values(name, state_dict_of_param, entry)
            else:
                numel = parameter.numel()
                values = flat_params.param_slices.read_shard(name, state_dict_of_param, entry, 0, numel)
                flat_params.master_weights.load_values(name, parameter, values.view(parameter.shape))
                dtypes[name] = values.dtype
        for name, buffer in persistent_buffers(trained_module.module):
            buffer.copy_(state_dict[f"buffer/{name}"])
    return dtypes


def load_optimizer_state(
    state: RankState, state_dict: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Loads the optimizers' state from `state_dict`, full tensors by name, for parameters stepped here.

    A state that was saved in the dtype of its weight (`dtypes`, see `load_model_state`) gets the dtype of the
    stepped parameter. One tensor at a time is read, and of it what this rank steps. Raises PlanError for
    state of a parameter that is not trained.
    """
    optimizers, trained_module, flat_params = state.optimizers, state.trained_module, state.flat_params
    optimizer_params, blockwise_keys = flat_params.optimizer_params(), _blockwise_keys(optimizers)
    shapes = {weight.name: weight.shape for weight in trained_module.model_spec.params}
    following_params = {
        id(p)
        for each in optimizers
        if _states_follow_params(each)
        for group in each.param_groups
        for p in group["params"]
    }

    def load_entry(entry: str) -> torch.Tensor:
        key, _, name = entry.partition("/")
        if name not in optimizer_params:  # refused below
            return state_dict[entry]
        stepped, shard = optimizer_params[name], flat_params.param_shard(name)
        is_owned = name in flat_params.matrix_owners.optimizer_params
        by_element = key.partition(":")[0] != "step" and tensor_shape(state_dict, entry) == shapes[name]
        if shard is not None and not is_owned and key in blockwise_keys[id(stepped)]:
            blocks = range(shard.begin // QUANT_BLOCK_NUMEL, -(-shard.end // QUANT_BLOCK_NUMEL))
            return read_region(state_dict, entry, (blocks,))
        if is_owned or not by_element:
            tensor = state_dict[entry]
        else:
            begin = 0 if shard is None else shard.begin
            end = begin + stepped.numel()
            tensor = flat_params.param_slices.read_shard(name, state_dict, entry, begin, end)
            tensor = tensor.view(stepped.shape)
        follows = by_element and id(stepped) in following_params and tensor.dtype == dtypes.get(name)
        return tensor.to(stepped.dtype) if follows else tensor

    names = ((entry, entry.partition("/")[2]) for entry in state_dict)
    local_value = [
        entry
        for entry, name in names
        if name in optimizer_params
        or name not in {*trained_module.trainable_parameters, *trained_module.remote_param_names}
    ]
    is_offloaded = state.plan.sharding.tiers.optimizer_states != "device"
    device = torch.device("cpu") if is_offloaded else None
    for optimizer in optimizers:
        optimizer.state.clear()
    # what rests on disk is in memory one parameter group at a time
    for entries in [local_value] if state.disk is None else state.disk.entries_by_group(local_value):
        _add_optimizer_state(optimizers, optimizer_params, LazyTensors(entries, load_entry), device)
        if is_offloaded:
            state.offloaded.adopt_states(entries)


def _state_shard(
    entry: str,
    value: torch.Tensor,
    param_shard: ParamShard | None,
    stepped: torch.Tensor,
    shape: tuple[int, ...],
    spans: tuple[DimRanges, ...] = (),
) -> TensorShard:
    """Returns the saved form of the state of a shard, or of a slice (`spans`), of a weight of `shape`.

    Raises PlanError for a state that belongs to a part of the weight and is neither a number nor one value
    per element.
    """
    begin = 0 if param_shard is None else param_shard.begin
    if value.ndim and value.shape == stepped.shape:
        return TensorShard(value.reshape(-1), begin, shape, spans)
    if value.ndim and (spans or stepped.numel() < prod(shape)):
        which = f"elements {begin} to {begin + stepped.numel()} of a {'slice of a ' if spans else ''}weight"
        text = f"the optimizer keeps '{entry}' of shape {list(value.shape)} for {which}"
        fix = (
            "keep one number, or one per element; or have no weight cut: optimizer.name = 'adafactor' cuts "
            "none"
        )
        raise PlanError(text, fix=fix, location="optimizer")
    return _full_shard(value)


def _full_shard(value: torch.Tensor) -> TensorShard:
    return TensorShard(value.detach().reshape(-1), 0, tuple(value.shape))


def _states_follow_params(optimizer: torch.optim.Optimizer) -> bool:
    return not isinstance(optimizer, PerParamOptimizer) or optimizer.state_dtype is None


def _blockwise_keys(optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, frozenset[str]]:
    return {
        id(parameter): get_blockwise_state_keys(optimizer)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the persistent buffers by name: what a state_dict holds, regardless of state_dict hooks."""
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def local_optimizer_state(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, nn.Parameter],
    initial: OptimizerNumbers,
) -> dict[str, torch.Tensor]:
    """Returns the optimizers' state by `key/logical name`, and group numbers that differ from `initial`.

    A Python number becomes a 0-dim tensor, and its kind is noted at the key. Raises PlanError for state that
    is neither.
    """
    rule: dict[str, Any] = {
        name: value for name, value in param_group_numbers(optimizers).items() if initial.get(name) != value
    }
    for name, parameter in parameters.items():
        for optimizer in optimizers:
            held_ids = optimizer.state.get(parameter, {})
            rule |= {f"{key}/{name}": value for key, value in held_ids.items() if value is not None}
    return dict(_as_tensor(*item) for item in rule.items())


def load_local_optimizer_state(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, nn.Parameter],
    state_dict: Mapping[str, torch.Tensor],
) -> None:
    """Replaces the optimizers' state by copies of `state_dict`, each on its parameter's device.

    Raises PlanError for state of a parameter that is not among `parameters`.
    """
    for optimizer in optimizers:
        optimizer.state.clear()
    _add_optimizer_state(optimizers, parameters, state_dict)


def _add_optimizer_state(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, nn.Parameter],
    state_dict: Mapping[str, torch.Tensor],
    rests_on: torch.device | None = None,
) -> None:
    """Adds copies of `state_dict` to the optimizers' state, on `rests_on` or each parameter's device."""
    owners = {
        id(p): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }
    groups = all_param_groups(optimizers)
    for entry, tensor in state_dict.items():
        key, _, name = entry.partition("/")
        key, _, kind = key.partition(":")
        if key.startswith("group."):
            groups[int(key.removeprefix("group."))][name] = tensor.item()
            continue
        if name not in parameters:
            fix = "train the same parameters as the run that saved it, or load into a new run folder"
            raise PlanError(
                f"the checkpoint holds '{key}' of {name}, which is not trained here",
                fix=fix,
                location="optimizer",
            )
        optimizer = owners[id(parameters[name])]
        # torch keeps step counters on the CPU, unless a kernel reads them
        on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        device = parameters[name].device if tensor.ndim or on_device else torch.device("cpu")
        device = rests_on or device
        optimizer.state[parameters[name]][key] = tensor.item() if kind else tensor.to(device, copy=True)


def _as_tensor(entry: str, value: Any) -> tuple[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return entry, value
    key, _, name = entry.partition("/")
    dtypes = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}
    kind = type(value).__name__
    if kind not in dtypes:
        text = f"the optimizer keeps a {kind} as '{key}' of {name}; what can be saved are tensors and numbers"
        raise PlanError(
            text, fix="use an optimizer whose state is tensors by parameter", location="optimizer"
        )
    return f"{key}:{kind}/{name}", torch.tensor(value, dtype=dtypes[kind])
