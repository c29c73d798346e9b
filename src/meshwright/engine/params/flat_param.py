"""One flat parameter on one rank: its full tensor, and this rank's shard, master and gradient.

full_tensor   [ w0 | w1 | w2 | pad ]      the module's parameters are views of it
shard              [ w1 | w2 ]            what UNSHARD sends: a range of full_tensor, or memory of its own
master             [ w1 | w2 ]            what the optimizer steps, in a wider dtype; shard: its rounding
gradient           [ w1 | w2 ]            the sum over all ranks

Where the host steps weights that rest on the device (plan/hardware/memory_tiers.py), it has

host_gradient      [ w1 | w2 ]            a copy of the gradient, which the optimizer reads
host_weights       [ w1 | w2 ]            the stepped weights in the dtype of the shard, to be copied into it

A master that rests in another tier than that of the step is copied there for its STEP (`move_master`). If it
rests on disk, the two copies on the host are in buffers that parameter groups share, from STEP to STEP. A
shard that rests on disk, too, is read from there for each use (`read_shard`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from meshwright.comm.collectives.group import Group
from meshwright.engine.params.master_weights import UpdateGroup
from meshwright.engine.runtime.host_memory import without_memory
from meshwright.plan.sharding.flat_param import FlatParamSpec, ParamShard


@dataclass
class FlatParam:
    """Flat tensors of one parameter group.

    `full_tensor` has spec.numel elements, the others `shard_numel`. `shard_is_remote`: the shard rests in
    another tier, and its range of the full tensor is filled before an all-gather; from the disk `read_shard`
    returns it, in memory that the next read overwrites.
    Without a `master` the optimizer steps the shard itself. `optimizer_params` are, by weight, views of the
    stepped tensor, or tensors without memory while a master rests in another tier; `steps_on_host`: the host
    steps them.
    """

    spec: FlatParamSpec
    group: Group
    shard: torch.Tensor
    full_tensor: torch.Tensor
    views: dict[str, torch.Tensor]
    block_calls: tuple[str, ...]
    is_sharded: bool = False
    shard_is_remote: bool = False
    steps_on_host: bool = False
    master: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    host_gradient: torch.Tensor | None = None
    host_weights: torch.Tensor | None = None
    read_shard: Callable[[], torch.Tensor] | None = None
    optimizer_params: dict[str, nn.Parameter] = field(default_factory=dict)

    @classmethod
    def of_views(
        cls,
        spec: FlatParamSpec,
        group: Group,
        full_tensor: torch.Tensor,
        shapes: Mapping[str, torch.Size],
        block_calls: tuple[str, ...],
    ) -> "FlatParam":
        """Returns the flat parameter of `full_tensor`, of which shard and weights are views."""
        views = {
            name: full_tensor[start : start + numel].view(shapes[name]) for name, numel, start in spec.params
        }
        flat_param = cls(spec, group, full_tensor, full_tensor, views, block_calls)
        flat_param.shard = full_tensor[flat_param.shard_slice]
        return flat_param

    @property
    def index(self) -> int:
        """The index of this rank along the axes of the shards."""
        members = self.spec.member_indices
        return members[self.group.index] if members else self.group.index

    @cached_property
    def param_shards(self) -> tuple[ParamShard, ...]:
        """The parameters, and parts of parameters, that lie in this rank's shard."""
        return self.spec.param_shards(self.index)

    @property
    def shard_slice(self) -> slice:
        """The range of the shard in `full_tensor`."""
        return slice(*self.spec.shard_range(self.index))

    @property
    def shard_numel(self) -> int:
        """The elements of the shard, padding included."""
        return self.spec.local_numel(self.index)

    def gather(self, full_tensor: torch.Tensor, shard: torch.Tensor, *, action: str) -> None:
        """Fills `full_tensor` with the `shard`s of all ranks, or that of the owner; all ranks call it."""
        owner, members = self.spec.owner_index, self.spec.member_indices
        if owner is None:
            self.group.all_gather(full_tensor, shard, action=action).wait()
            return
        if shard.numel() and shard.data_ptr() != full_tensor.data_ptr():
            full_tensor.copy_(shard)
        source = members.index(owner) if members else owner
        self.group.broadcast(full_tensor, source=source, action=action).wait()

    def gather_param(
        self, name: str, shard: torch.Tensor, dtype: torch.dtype, *, action: str
    ) -> torch.Tensor:
        """Returns the full values of the weight `name`, flat, from the `shard`s of all ranks, which call it.

        Nothing of the other weights is made. A rank that has all of them returns a view of its shard.
        """
        shards, works = list(self.spec.shards_of(name)), []
        if self.group.size == 1 and len(shards) == 1:
            return shard[shards[0][1].in_shard].to(self.full_tensor.device, dtype)
        numel = self.views[name].numel()
        full_values = torch.empty(numel, dtype=dtype, device=self.full_tensor.device)
        for index, param_shard in shards:
            part = full_values[param_shard.begin : param_shard.end]
            if index == self.group.index:
                part.copy_(shard[param_shard.in_shard])
            works.append(self.group.broadcast(part, source=index, action=action))
        for work in works:
            work.wait()
        return full_values

    @property
    def optimizer_tensor(self) -> torch.Tensor:
        """The tensor of which the optimizer's parameters are views."""
        return self.shard if self.master is None else self.master

    def param_shard(self, name: str) -> ParamShard:
        """Returns the part of the weight `name` in the shard, which must have one."""
        return next(param_shard for param_shard in self.param_shards if param_shard.name == name)

    def param_gradient(self, name: str) -> torch.Tensor | None:
        """Returns the summed gradient of that part, flat; None before the first backward."""
        param_shard = self.param_shard(name)
        return None if self.gradient is None else self.gradient[param_shard.in_shard]

    @property
    def master_nbytes(self) -> int:
        """The bytes of the master; 0 without one."""
        return 0 if self.master is None else self.master.nbytes

    @property
    def gather_input(self) -> torch.Tensor:
        """What this rank puts into the all-gather: the shard, or its range of the full tensor, into which a
        shard that rests in another tier is fetched first.
        """
        return self.full_tensor[self.shard_slice] if self.shard_is_remote else self.shard

    def fetch(self) -> torch.Tensor:
        """Copies a shard that rests in another tier into the full tensor; returns `gather_input`."""
        if self.shard_is_remote:
            self.gather_input.copy_(self.stored_shard)
        return self.gather_input

    @property
    def stored_shard(self) -> torch.Tensor:
        """The shard, in memory: what rests on disk is read."""
        return self.shard if self.read_shard is None else self.read_shard()

    @property
    def host_gradient_nbytes(self) -> int:
        """The bytes of the gradient that was copied to the host."""
        return 0 if self.host_gradient is None else self.host_gradient.nbytes

    @property
    def rounded_nbytes(self) -> int:
        """The bytes of the stepped weights on the host, if they are not the master."""
        is_own = self.host_weights is not None and self.host_weights is not self.master
        return self.host_weights.nbytes if is_own and self.host_weights is not None else 0

    def shard_values(self, param_shard: ParamShard) -> torch.Tensor:
        """Returns the values of a part of the shard in the widest dtype, flat."""
        return self.optimizer_tensor[param_shard.in_shard]

    def load_values(self, param_shard: ParamShard, values: torch.Tensor) -> None:
        """Copies the flat `values` of the part `param_shard` into the stepped tensor and the shard."""
        tensors = (self.optimizer_tensor, self.shard, self.host_weights)  # some may be one
        for tensor in {id(each): each for each in tensors if each is not None}.values():
            tensor[param_shard.in_shard].copy_(values)

    def load_part(self, param_shard: ParamShard, full_values: torch.Tensor) -> None:
        """Copies the part `param_shard` of the weight's `full_values` likewise."""
        self.load_values(param_shard, full_values.reshape(-1)[param_shard.begin : param_shard.end])

    def shard_view(self, flat: torch.Tensor, param_shard: ParamShard) -> torch.Tensor:
        """Returns the place of `param_shard` in `flat`, in the shape in which it is stepped."""
        return flat[param_shard.in_shard].view(self.optimizer_params[param_shard.name].shape)

    def round_master(self) -> None:
        """Copies the master, rounded, into the shard, or into the stepped weights on the host."""
        target = self.shard if self.host_weights is None else self.host_weights
        if self.master is not None and self.master is not target:
            target.copy_(self.master)

    def move_master(self, master: torch.Tensor, *, is_fetched: bool) -> None:
        """Makes `master` the master: `is_fetched` to be stepped, else to rest in another tier."""
        self.master, like = master, master if self.steps_on_host else self.shard
        for param_shard in self.param_shards:
            parameter = self.optimizer_params[param_shard.name]
            parameter.data = (
                self.shard_view(master, param_shard)
                if is_fetched
                else without_memory(parameter.shape, parameter.dtype, like)
            )

    def place_host_gradient(self, buffer: torch.Tensor) -> None:
        """Makes the begin of `buffer` the place of the gradient that the host reads, if there is one."""
        if self.gradient is not None:
            self.host_gradient = buffer[: self.gradient.nbytes].view(self.gradient.dtype)
            self.assign_grads(self.host_gradient)

    def place_host_weights(self, buffer: torch.Tensor | None) -> None:
        """Makes the begin of `buffer` the place of the stepped weights; None: they are the master."""
        shard = self.shard
        self.host_weights = self.master if buffer is None else buffer[: shard.nbytes].view(shard.dtype)
        if not self.optimizer_params:  # nothing but padding, which no step rounds
            self.round_master()

    def release_host_copies(self) -> None:
        """Gives up both places: another parameter group takes them."""
        self.host_gradient = self.host_weights = None
        for parameter in self.optimizer_params.values():
            parameter.grad = None

    def assign_grads(self, gradient: torch.Tensor) -> None:
        """Gives the optimizer's parameters views of `gradient`, if it has their dtype: else it is cast when
        it is read.
        """
        if gradient.dtype == self.optimizer_tensor.dtype:
            for param_shard in self.param_shards if self.optimizer_params else ():
                self.optimizer_params[param_shard.name].grad = self.shard_view(gradient, param_shard)

    def update_group(self) -> UpdateGroup:
        """Returns the stepped parameters, with views of the gradient that the optimizer reads, which
        exists.
        """
        gradient = self.gradient if self.host_gradient is None else self.host_gradient
        if gradient is None:
            raise ValueError(f"{self.spec.name} has no gradient: it is reduced before STEP")
        gradients = tuple(self.shard_view(gradient, param_shard) for param_shard in self.param_shards)
        return UpdateGroup(
            tuple(self.optimizer_params[param_shard.name] for param_shard in self.param_shards),
            gradients,
            self.round_master,
        )
