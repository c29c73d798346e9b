"""All flat parameters of one rank: the shards, and the full parameters while they are needed.

    unsharded storage   full_tensor  [ w0 | w1 | w2 | pad ]    one per group; the shard is a range of it
    sharded storage     shard        [ w1 | w2 ]               own memory; full tensor in a shared buffer

A parameter of the module is permanently a view of its place in the full tensor: a group always returns to the
same buffer, so what autograd has saved of a weight is right again once UNSHARD has filled it, and no storage
changes under a graph. The optimizer steps views of the shard, or of its master in a wider dtype: one
parameter per weight with elements here. PACK copies gradients to their places in a flat buffer; `gradient` is
this rank's shard of their sum.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from meshwright.engine.params.flat_param import FlatParam
from meshwright.engine.params.master_weights import MasterWeights, UpdateGroup, has_any
from meshwright.engine.params.matrix_owners import MatrixOwners
from meshwright.engine.params.tensor_parallel_slices import ParamSlices
from meshwright.engine.runtime.grad_bucket import copy_gradients
from meshwright.engine.runtime.mixed_precision import total_norm
from meshwright.engine.runtime.rank_state import Operand, RankState
from meshwright.model.tensors.lazy_mapping import read_shard
from meshwright.plan.model_spec.model_spec import ROOT, block_of
from meshwright.plan.sharding.flat_param import FlatParamSpec, ParamShard
from meshwright.plan.step.memory.memory_names import allocates_sum
from meshwright.plan.step.program import Action


class FlatParamStore:
    """The flat parameters of one rank, filled from the values of the model's parameters."""

    def __init__(self, state: RankState) -> None:
        self._state, plan = state, state.plan
        self.param_slices = ParamSlices(plan, state.world)
        self._by_name: dict[str, FlatParam] = {}  # by weight
        self.matrix_owners = MatrixOwners(state, self._by_name)
        self.param_slices.slice_params(state.trained_module)
        self._tiers = plan.sharding.tiers
        roles = {role: getattr(torch, dtype) for role, dtype in plan.job.precision.roles.items()}
        self._dtype, self._reduce_dtype, self._grad_dtype, self._master_dtype = (
            roles[r] for r in ("parameters", "reduce", "gradients", "master")
        )
        # buffers are of its kind: on its device, fake where it is
        self._example_param = state.trained_module.example_param
        self._buffers: dict[str, torch.Tensor] = {}
        self.by_param_group: dict[str, FlatParam] = {}
        # the norm's, of this rank's shards or of all
        self.grad_sqnorm = torch.zeros(1, dtype=torch.float64, device=state.world.device)
        # of the first that takes its buffer: a gather behind a copy may take others
        self._unshard_allocations = {
            action.tensors[0]: action.allocations
            for action in reversed(plan.actions)
            if action.kind in ("UNSHARD", "FETCH_PARAM") and action.allocations
        }
        self._param_shardings = {
            param_sharding.param.name: param_sharding for param_sharding in plan.view.param_shardings
        }
        self._norm_param_names = plan.view.params_counted_in_norm
        self.reported_param_names = plan.view.params_counted_in_sum
        for name, spec in plan.view.flat_param_specs.items():
            first = spec.params[0][0]
            is_sharded = self._param_shardings[first].is_stored_sharded
            flat_param = self._make_sharded(spec) if is_sharded else self._make_unsharded(spec)
            self.by_param_group[name] = flat_param
            self._by_name |= dict.fromkeys((weight for weight, _, _ in spec.params), flat_param)
            if self._param_shardings[first].param.trainable and first not in self.matrix_owners.param_names:
                flat_param.optimizer_params = {
                    p.name: nn.Parameter(flat_param.shard_values(p).detach().view(self._optimizer_shape(p)))
                    for p in flat_param.param_shards
                }
                if flat_param.master is not None and self._tiers.optimizer_states != self._tiers.step:
                    flat_param.move_master(flat_param.master, is_fetched=False)
        self.master_weights = MasterWeights(state, self._by_name.keys() | self.matrix_owners.param_names)
        kinds = ("REDUCE", "ACCUMULATE", "TAKE", "PUSH_ROWS")
        sums = [action for action in plan.actions if action.kind in kinds]
        # gradients stay where they are summed
        self._grads_in_place = not any(
            action.kind == "ACCUMULATE" or allocates_sum(action) for action in sums
        )
        packs = (action for action in plan.actions if action.kind == "PACK")
        # buffers that gradients are packed into
        self._pack_buffer_names = {hold.name for action in packs for hold in action.allocations}
        self._packed_buffers: dict[str, torch.Tensor] = {}  # what is under way, by the name of its PACK

    def optimizer_params(self) -> dict[str, nn.Parameter]:
        """Returns the optimizer's parameters on this rank, shards and whole ones, by logical name."""
        found, unflattened = {}, self.master_weights.optimizer_params | self.matrix_owners.optimizer_params
        for name in self._state.trained_module.trainable_parameters:
            if name in unflattened:
                found[name] = unflattened[name]
            elif name in self._by_name and name in self._by_name[name].optimizer_params:
                found[name] = self._by_name[name].optimizer_params[name]
        return found

    def update_groups(self, names: Set[str] | None = None) -> Iterator[UpdateGroup]:
        """Yields the stepped parameters, one group at a time, with their summed gradients; with `names`, the
        groups that have one of them.
        """
        yield from (
            flat_param.update_group()
            for flat_param in self.by_param_group.values()
            if flat_param.gradient is not None and has_any(flat_param.optimizer_params, names)
        )
        yield from self.master_weights.update_groups(names)
        yield from self.matrix_owners.update_groups(names)

    @property
    def forward_is_collective(self) -> bool:
        """Whether a forward needs all ranks, because some parameters are stored only in shards or slices."""
        return bool(self.param_slices or self._state.plan.sharding.params_on_servers) or any(
            flat_param.is_sharded for flat_param in self.by_param_group.values()
        )

    def is_flattened(self, name: str) -> bool:
        """Returns whether the weight `name` lies in a flat parameter."""
        return name in self._by_name

    def flat_param_of(self, name: str) -> FlatParam | None:
        """Returns the flat parameter that the weight `name` lies in; None if in none."""
        return self._by_name.get(name)

    def param_shard(self, name: str) -> ParamShard | None:
        """Returns this rank's part of the weight `name`; None if it has none, or it is not flattened."""
        flat_param = self._by_name.get(name)
        param_shards = () if flat_param is None else flat_param.param_shards
        return next((each for each in param_shards if each.name == name), None)

    def stores_locally(self, name: str) -> bool:
        """Returns whether this rank stores anything of the flattened weight `name` between its uses."""
        return not self._by_name[name].is_sharded or self.param_shard(name) is not None

    def shard_values(self, param_shard: ParamShard) -> torch.Tensor:
        """Returns the values of `param_shard`, flat: the master's, if there is one."""
        return self._by_name[param_shard.name].shard_values(param_shard)

    def load_values(self, name: str, full_values: Mapping[str, torch.Tensor], entry: str) -> torch.dtype:
        """Copies this rank's part of the flattened weight `name` from `full_values[entry]`; reads no more.

        All of it where it is stored unsharded. Returns the dtype of what was read.
        """
        flat_param, shard = self._by_name[name], self.param_shard(name)
        view = flat_param.views[name]
        begin, end = (
            (0, view.numel()) if shard is None or not flat_param.is_sharded else (shard.begin, shard.end)
        )
        values = self.param_slices.read_shard(name, full_values, entry, begin, end)
        if not flat_param.is_sharded:
            view.copy_(values.view(view.shape))
        if shard is not None:
            flat_param.load_values(shard, values[shard.begin - begin : shard.end - begin])
        return values.dtype

    def pack(self, action: Action) -> bool:
        """Packs the gradients of a group into a flat buffer; returns False if the group is not flattened."""
        flat_param = self._by_name.get(action.tensors[0])
        if flat_param is None:
            return False
        flat = self.buffer(action.allocations[0].name, action.allocations[0].nbytes, self._reduce_dtype)[
            : flat_param.spec.numel
        ]
        parameters = [self._state.trained_module.parameters[name] for name, _, _ in flat_param.spec.params]
        places = [
            flat[start : start + numel].view(parameter.shape)
            for parameter, (_, numel, start) in zip(parameters, flat_param.spec.params, strict=True)
        ]
        padding = [flat[begin:end] for begin, end in flat_param.spec.gaps]
        copy_gradients([*places, *padding], [p.grad for p in parameters] + [None] * len(padding))
        for parameter, place in zip(parameters, places, strict=True):
            parameter.grad = place if self._grads_in_place else None
        self._packed_buffers[action.name] = flat
        if self._grads_in_place and flat_param.gradient is None:  # the buffer belongs to the flat parameter
            self._set_gradient(flat_param, flat[flat_param.shard_slice])
        return True

    def operand(self, action: Action) -> Operand:
        """Returns what an action on a parameter group moves.

        Its shard into the full tensor (all-gather, or what an owner sends), its packed gradients (send), also
        into their shard (reduce-scatter, or the reduce to an owner), or the shard of its gradients, over
        replicas.
        """
        flat_param, transfer = self._by_name[action.tensors[0]], action.transfer
        match "" if transfer is None else transfer.collective:
            case "all_gather":
                return Operand(flat_param.gather_input, flat_param.full_tensor)
            case "broadcast" | "recv":
                return Operand.in_place(flat_param.full_tensor)
            case "send":
                return Operand.in_place(self._packed_buffer(action))
            case "reduce_scatter" | "reduce":
                flat = self._packed_buffer(action)
                direct = allocates_sum(action) and self._reduce_dtype == self._grad_dtype
                return Operand(flat, self.gradient(flat_param) if direct else flat[flat_param.shard_slice])
            case _:
                return Operand.in_place(self.gradient(flat_param))

    def views_by_param(self, name: str, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the places of the parameters of the group of `name` in `flat`.

        A tensor laid out like the full tensor of the group, or like this rank's shard.
        """
        flat_param = self._by_name[name]
        if flat.numel() == flat_param.spec.numel:
            return {each: flat[start : start + numel] for each, numel, start in flat_param.spec.params}
        return {
            each.name: flat[each.shard_offset : each.shard_offset + each.numel]
            for each in flat_param.param_shards
        }

    def accumulate(self, action: Action) -> None:
        """Adds the reduced shard of one microbatch to the sum of those before it."""
        flat_param = self._by_name[action.tensors[0]]
        local_grads, gradient = self.packed_shard(action), self.gradient(flat_param)
        # the first is there when it takes room
        gradient.copy_(local_grads) if allocates_sum(action) else gradient.add_(local_grads)

    def packed_shard(self, action: Action) -> torch.Tensor:
        """Returns this rank's shard of the gradients that the PACK of `action`'s group has packed."""
        return self._packed_buffer(action)[self._by_name[action.tensors[0]].shard_slice]

    def _packed_buffer(self, action: Action) -> torch.Tensor:
        return self._packed_buffers[replace(action, kind="PACK").name]

    def compute_sqnorm(self) -> None:
        """Computes the squared norm of the gradients that this rank is the first to hold."""
        local_grads = [
            part
            for flat_param in self.by_param_group.values()
            if flat_param.gradient is not None
            for part in self._norm_parts(flat_param, flat_param.gradient)
        ]
        full_tensor = (
            p
            for name, p in self._state.trained_module.trainable_parameters.items()
            if name not in self._by_name and name in self._norm_param_names
        )
        local_grads += [parameter.grad for parameter in full_tensor if parameter.grad is not None]
        self.grad_sqnorm = (
            total_norm(local_grads).double().square().view(1).to(self.grad_sqnorm.device)
            if local_grads
            else torch.zeros_like(self.grad_sqnorm)
        )

    def _norm_parts(self, flat_param: FlatParam, gradient: torch.Tensor) -> list[torch.Tensor]:
        if all(name in self._norm_param_names for name, _, _ in flat_param.spec.params):
            return [gradient]
        return [
            gradient[param_shard.shard_offset : param_shard.shard_offset + param_shard.numel]
            for param_shard in flat_param.param_shards
            if param_shard.name in self._norm_param_names
        ]

    @property
    def total_norm(self) -> torch.Tensor:
        """The norm of all gradients, once GLOBAL_NORM has ended."""
        return self.grad_sqnorm.sqrt()[0]

    def refresh_unsharded(self, action: str) -> None:
        """Gathers the parameters that stay unsharded: those stored so, and those of the root.

        All ranks call it.
        """
        for flat_param in self.by_param_group.values():
            if not flat_param.is_sharded or ROOT in flat_param.block_calls:
                flat_param.gather(flat_param.full_tensor, flat_param.fetch(), action=action)

    def unshard_block(self, block: str, action: str) -> None:
        """Gathers the parameters that a call of `block` uses, without the root's; all ranks call it."""
        for flat_param in self.by_param_group.values():
            if (
                flat_param.is_sharded
                and ROOT not in flat_param.block_calls
                and any(block_of(block_call) == block for block_call in flat_param.block_calls)
            ):
                flat_param.gather(flat_param.full_tensor, flat_param.fetch(), action=action)

    def full_value(
        self, name: str, action: str, *, use_masters: bool = False, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Returns the present value of the logical parameter `name`, rounded to `dtype`; all ranks that have
        it call it, and may get their own memory.

        Memory: the value, and along tp one slice of it.
        """
        return self._gather_full(name, self.local_values(name, use_masters=use_masters), dtype, action)

    def full_gradient(self, name: str, action: str) -> torch.Tensor | None:
        """Returns the summed gradient of the trained parameter `name`, in the same way; None if its group has
        none. GLOBAL_NORM has ended.
        """
        flat_param, parameter = self._by_name.get(name), self._state.trained_module.parameters[name]
        gradient = parameter.grad if flat_param is None else flat_param.gradient
        if gradient is None and flat_param is None:
            gradient = torch.zeros_like(parameter)
        return None if gradient is None else self._gather_full(name, gradient, None, action)

    def local_values(self, name: str, *, use_masters: bool) -> torch.Tensor:
        """Returns what this rank stores of `name`; of a flattened parameter, the shard of its group.

        `use_masters`: the master where there is one, except for a weight that a matrix owner steps.
        """
        flat_param = self._by_name.get(name)
        if flat_param is None:
            parameter = self._state.trained_module.parameters[name]
            return self.master_weights.exact_value(name, parameter) if use_masters else parameter.detach()
        master = flat_param.master if use_masters else None
        return flat_param.stored_shard if master is None else master

    def _gather_full(
        self, name: str, local: torch.Tensor, dtype: torch.dtype | None, action: str
    ) -> torch.Tensor:
        flat_param, parameter = self._by_name.get(name), self._state.trained_module.parameters[name]
        dtype = dtype or local.dtype
        if flat_param is None:
            local = local.to(parameter.device, dtype)
        else:
            local = flat_param.gather_param(name, local, dtype, action=action).view(parameter.shape)
        return self.param_slices.gather_full(name, local, action)

    def _make_unsharded(self, spec: FlatParamSpec) -> FlatParam:
        full_tensor = self._example_param.new_zeros(spec.numel, dtype=self._dtype)
        flat_param = self._add_master(self._make_flat_param(spec, full_tensor))
        param_shards = {param_shard.name: param_shard for param_shard in flat_param.param_shards}
        for name, view in flat_param.views.items():
            values = self._initial_value(name)
            with torch.no_grad():
                view.copy_(values)
                if name in param_shards:
                    flat_param.load_part(param_shards[name], values)
            self._state.trained_module.parameters[name].data = view
        return flat_param

    def _make_sharded(self, spec: FlatParamSpec) -> FlatParam:
        first, disk, tier = spec.params[0][0], self._state.disk, self._tiers.weights
        parameter = self._state.trained_module.parameters[first]
        dtype, has_rows = parameter.dtype, self._param_shardings[first].rows_on_servers
        if has_rows:  # no rank ever has the whole
            full_tensor = parameter.detach().new_zeros(()).expand(spec.numel)
        else:
            buffer = self._unshard_allocations[first][0]
            full_tensor = self.buffer(buffer.name, buffer.nbytes, dtype)[: spec.numel]
        flat_param = self._make_flat_param(spec, full_tensor)
        if tier == "disk" and disk is not None:
            flat_param.shard = disk.shard(first, flat_param.shard_numel, dtype)
            flat_param.read_shard = partial(disk.read_shard, first, flat_param.shard)
        else:
            shard = self._empty(flat_param.shard_numel, dtype, is_on_host=tier == "host")
            flat_param.shard = shard.zero_()
        flat_param.is_sharded, flat_param.shard_is_remote = True, tier != "device"
        flat_param, parameters = self._add_master(flat_param), self._state.trained_module.parameters
        with torch.no_grad():
            for shard in flat_param.param_shards:
                if has_rows and shard.name in (blank := self._state.trained_module.initial_values):
                    flat_param.load_values(shard, read_shard(blank, shard.name, shard.begin, shard.end))
                else:
                    flat_param.load_part(shard, self._initial_value(shard.name))
        for name, view in flat_param.views.items():
            parameters[name].data = view
        return flat_param

    def _initial_value(self, name: str) -> torch.Tensor:
        blank = self._state.trained_module.initial_values
        return blank[name] if name in blank else self._state.trained_module.parameters[name].detach()

    def _make_flat_param(self, spec: FlatParamSpec, full_tensor: torch.Tensor) -> FlatParam:
        group = self._state.world.group(spec.axes, spec.member_indices)
        shapes = {name: self._state.trained_module.parameters[name].shape for name, _, _ in spec.params}
        block_calls = self._param_shardings[spec.params[0][0]].param.block_calls
        return FlatParam.of_views(spec, group, full_tensor, shapes, block_calls)

    def _add_master(self, flat_param: FlatParam) -> FlatParam:
        first = flat_param.spec.params[0][0]
        rounds, numel = self._master_dtype != self._dtype, flat_param.shard_numel
        copies = self._tiers.host_steps_copy(is_stored_sharded=flat_param.is_sharded)
        if (
            (rounds or copies)
            and self._param_shardings[first].param.trainable
            and first not in self.matrix_owners.param_names
        ):
            flat_param.steps_on_host, disk = copies, self._state.disk
            if disk is not None:
                flat_param.master = disk.master(first, (numel,), self._master_dtype, flat_param.spec.name)
                return flat_param
            is_on_host = self._tiers.optimizer_states == "host"
            flat_param.master = self._empty(numel, self._master_dtype, is_on_host=is_on_host).zero_()
            if copies:
                flat_param.host_weights = (
                    self._empty(numel, self._dtype, is_on_host=True).zero_() if rounds else flat_param.master
                )
        return flat_param

    def _empty(self, numel: int, dtype: torch.dtype, *, is_on_host: bool) -> torch.Tensor:
        like = self._example_param.detach()
        if is_on_host:
            return self._state.host_memory.empty((numel,), dtype, like)
        return like.new_empty(numel, dtype=dtype)

    def _optimizer_shape(self, param_shard: ParamShard) -> tuple[int, ...]:
        sharding = self._param_shardings[param_shard.name]
        return sharding.param.shape if sharding.shard_alignment == "matrix" else (param_shard.numel,)

    def gradient(self, flat_param: FlatParam) -> torch.Tensor:
        """Returns the summed gradient of `flat_param`, which its first use makes."""
        gradient = flat_param.gradient
        if gradient is None:
            numel, is_on_host = flat_param.shard_numel, self._tiers.gradients == "host"
            gradient = self._empty(numel, self._grad_dtype, is_on_host=is_on_host)
            self._set_gradient(flat_param, gradient)
        return gradient

    def _set_gradient(self, flat_param: FlatParam, gradient: torch.Tensor) -> None:
        flat_param.gradient = gradient
        if self._tiers.gradients == self._tiers.step:  # else the optimizer reads a copy
            flat_param.assign_grads(gradient)

    def buffer(self, name: str, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the buffer `name` as elements of `dtype`.

        Made at its first use, it stays, and groups share it in turn.
        """
        if name not in self._buffers:
            self._buffers[name] = self._example_param.detach().new_empty(nbytes, dtype=torch.uint8)
        return self._buffers[name][: nbytes - nbytes % dtype.itemsize].view(dtype)

    def memory_by_category(self) -> dict[str, int]:
        """Returns bytes by category: parameters, gradients and buffers on the device, and masters wherever
        they rest.

        A buffer in which gradients stay counts as gradients.
        """
        flat_params = self.by_param_group.values()
        sizes = {name: buffer.nbytes for name, buffer in self._buffers.items()}
        gradient_nbytes = sum(
            each.gradient.nbytes
            for each in flat_params
            if each.gradient is not None and not self._grads_in_place and self._tiers.gradients == "device"
        )
        in_place_nbytes = sum(
            sizes.pop(name)
            for name in list(sizes)
            if self._grads_in_place and name in self._pack_buffer_names
        )
        return {
            "parameters": sum(
                (each.shard if each.is_sharded else each.full_tensor).nbytes
                for each in flat_params
                if not each.shard_is_remote
            ),
            "master": sum(each.master_nbytes for each in flat_params)
            + self.master_weights.nbytes
            + self.matrix_owners.nbytes,
            "gradients": gradient_nbytes + in_place_nbytes,
            "buffers": sum(sizes.values()),
        }
