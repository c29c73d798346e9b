"""One flat parameter on one rank, the master weights of parameters outside of it, and stashed weights.

    full_tensor   [ w0 | w1 | w2 | pad ]      the module's parameters are views of it
    shard              [ w1 | w2 ]            what UNSHARD sends: a range of full_tensor, or memory of its own
    master             [ w1 | w2 ]            what the optimizer steps, in a wider dtype; shard: its rounding
    gradient           [ w1 | w2 ]            the sum over all ranks

A parameter outside of a flat parameter may have a master too. The master starts from the initial value before
rounding to the weight's dtype. No block reads it; after every step the weight is the rounded master (see
runtime/mixed_precision.py).

Weight stashing (PipeDream, plan/step/weight_stashing.py) keeps the weights of earlier steps for backwards
that need them:

    weight     ----> memory 0          memory 1     a weight of the module, which autograd graphs refer to
    stepped    ----> memory 0                       the optimizer's parameter: same memory, in no graph

    STASH          both point to memory 1, which starts as a copy; memory 0 stays; STEP writes into memory 1
    LOAD_STASHED   the weight points to memory 0, for a backward
    LOAD_LATEST    puts the latest weights back: the weight points to memory 1

Autograd saves either the weight itself, and reads during backward whatever it points to (norms), or a view,
which stays in the memory that it was made from (matrix products). Both are right: the memory of a version is
not written while it is stashed, and the weight points there while the backward of that version runs. The
optimizer steps a parameter of its own, so that autograd sees no write to the weight. The next STASH reuses
freed memory.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from meshwright.comm.collectives.group import Group
from meshwright.engine.runtime.rank_state import RankState
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.flat_param import FlatParamSpec, ParamShard
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler


class WeightStash:
    """The stashed versions of `weights`, by name.

    The optimizer steps `optimizer_params`, in the same memory.
    """

    def __init__(
        self, weights: Mapping[str, nn.Parameter], optimizer_params: Mapping[str, nn.Parameter]
    ) -> None:
        self._weights = list(weights.values())
        self._optimizer_params = [optimizer_params.get(name) for name in weights]
        self._stashed: dict[str, list[torch.Tensor]] = {}
        self._free: list[list[torch.Tensor]] = []
        self._newest: list[torch.Tensor] | None = None
        self.handlers: dict[str, Handler] = {
            "STASH": self.stash,
            "LOAD_STASHED": self.load_stashed,
            "LOAD_LATEST": self.load_latest,
        }

    @property
    def nbytes(self) -> int:
        """The bytes of all memory except that of the latest version."""
        return sum(tensor.nbytes for tensors in (*self._stashed.values(), *self._free) for tensor in tensors)

    @torch.no_grad()
    def stash(self, action: Action) -> None:
        """Keeps the present weights under the name of `action.subject`.

        The optimizer steps a copy from now on.
        """
        old = [weight.data for weight in self._weights]
        new = self._free.pop() if self._free else [torch.empty_like(tensor) for tensor in old]
        torch._foreach_copy_(new, old)
        self._stashed[action.subject] = old
        self._set_weights(new)
        for parameter, tensor in zip(self._optimizer_params, new, strict=True):
            if parameter is not None:
                parameter.data = tensor

    def load_stashed(self, action: Action) -> None:
        """Points the weights to the version that `action.subject` names."""
        self._newest = [weight.data for weight in self._weights]
        self._set_weights(self._stashed[action.subject])

    def load_latest(self, action: Action) -> None:
        """Points the weights to the latest version, and frees the versions that `action` frees."""
        if self._newest is not None:
            self._set_weights(self._newest)
            self._newest = None
        for name in action.frees:
            if name in self._stashed:
                self._free.append(self._stashed.pop(name))

    def discard_all(self) -> None:
        """Points the weights to the latest version and frees all others, after a failed step."""
        self.load_latest(Action("LOAD_LATEST", frees=tuple(self._stashed)))

    def _set_weights(self, tensors: Iterable[torch.Tensor]) -> None:
        for weight, tensor in zip(self._weights, tensors, strict=True):
            weight.data = tensor


@dataclass(frozen=True)
class UpdateGroup:
    """Parameters that are stepped together: their summed gradients (None: all zeros), and what follows.

    `finish` updates the weights from the stepped parameters.
    """

    parameters: tuple[nn.Parameter, ...]
    gradients: tuple[torch.Tensor | None, ...]
    finish: Callable[[], None]


class MasterWeights:
    """The master weights of trained parameters outside of flat parameters.

    What the optimizer steps, by name.
    """

    def __init__(self, plan: Plan, state: RankState, flat_param_names: Container[str]) -> None:
        precision, subject = plan.job.precision.effective, state.trained_module
        self._weights = {
            name: weight
            for name, weight in subject.trainable_parameters.items()
            if name not in flat_param_names
        }
        self._group_names = [
            names
            for param_group in plan.sharding.param_groups()
            if (names := [w.name for w in param_group.params if w.name in self._weights])
        ]
        stashes = any(action.kind == "STASH" for action in plan.actions)
        self._masters: dict[str, nn.Parameter] = {}
        self.alias_params: dict[str, nn.Parameter] = {}  # in the same memory as the weight
        if precision.master != precision.parameters and plan.is_primary_rank(state.world.rank):
            dtype = getattr(torch, precision.master)
            for name, weight in self._weights.items():
                value = subject.initial_values[name] if name in subject.initial_values else weight.detach()
                self._masters[name] = nn.Parameter(value.to(dtype, copy=True))
        elif stashes:
            self.alias_params = {name: nn.Parameter(weight.data) for name, weight in self._weights.items()}
        self.weight_stash = WeightStash(self._weights if stashes else {}, self.alias_params)

    @property
    def optimizer_params(self) -> dict[str, nn.Parameter]:
        """The optimizer's parameters, by the name of the weight."""
        return self._weights | self._masters | self.alias_params

    @property
    def nbytes(self) -> int:
        """The bytes of the masters."""
        return sum(master.nbytes for master in self._masters.values())

    def exact_value(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Returns the value of `weight` in the widest dtype: its master's, or its own."""
        return self._masters.get(name, weight).detach()

    @torch.no_grad()
    def load_values(self, name: str, weight: torch.Tensor, values: torch.Tensor) -> None:
        """Copies `values` into `weight`, and into its master if it has one, each in its own dtype."""
        weight.copy_(values)
        if name in self._masters:
            self._masters[name].copy_(values)

    def assign_alias_grads(self) -> None:
        """Gives each alias of a weight that weight's gradient; zeros where backward did not reach it."""
        for name, parameter in self.alias_params.items():
            gradient = self._weights[name].grad
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient

    def update_groups(self) -> Iterator[UpdateGroup]:
        """Yields the stepped parameters, one parameter group at a time."""
        stepped = self.optimizer_params
        for names in self._group_names:
            gradients = tuple(self._weights[name].grad for name in names)
            yield UpdateGroup(
                tuple(stepped[name] for name in names),
                gradients,
                lambda names=names: self._round_masters(names),
            )

    @torch.no_grad()
    def _round_masters(self, names: list[str]) -> None:
        for name in names:
            if name in self._masters:
                # graphs that have met an older version see no write
                self._weights[name].data.copy_(self._masters[name])


@dataclass
class FlatParam:
    """Flat tensors of one parameter group.

    `full_tensor` has spec.numel elements, the others spec.shard_numel.
    Without a `master` the optimizer steps the shard itself. `optimizer_params` are, by weight, views of the
    stepped tensor.
    """

    spec: FlatParamSpec
    group: Group
    shard: torch.Tensor
    full_tensor: torch.Tensor
    views: dict[str, torch.Tensor]
    block_calls: tuple[str, ...]
    is_sharded: bool = False
    master: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    optimizer_params: dict[str, nn.Parameter] = field(default_factory=dict)

    @cached_property
    def param_shards(self) -> tuple[ParamShard, ...]:
        """The parameters, and parts of parameters, that lie in this rank's shard."""
        return self.spec.param_shards(self.group.index)

    @property
    def shard_slice(self) -> slice:
        """The range of the shard in `full_tensor`."""
        return slice(self.group.index * self.spec.shard_numel, (self.group.index + 1) * self.spec.shard_numel)

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
        return (
            None
            if self.gradient is None
            else self.gradient[param_shard.shard_offset : param_shard.shard_offset + param_shard.numel]
        )

    @property
    def master_nbytes(self) -> int:
        """The bytes of the master; 0 without one."""
        return 0 if self.master is None else self.master.nbytes

    def shard_values(self, param_shard: ParamShard) -> torch.Tensor:
        """Returns the values of a part of the shard in the widest dtype, flat."""
        return self.optimizer_tensor[param_shard.shard_offset : param_shard.shard_offset + param_shard.numel]

    def load_values(self, param_shard: ParamShard, values: torch.Tensor) -> None:
        """Copies the part `param_shard` of the full `values` into the stepped tensor and the shard."""
        values_in_shard = values.reshape(-1)[param_shard.begin : param_shard.end]
        self.shard_values(param_shard).copy_(values_in_shard)
        if self.master is not None:
            self.shard[param_shard.shard_offset : param_shard.shard_offset + param_shard.numel].copy_(
                values_in_shard
            )

    def shard_view(self, flat: torch.Tensor, param_shard: ParamShard) -> torch.Tensor:
        """Returns the place of `param_shard` in `flat`, in the shape in which it is stepped."""
        return flat[param_shard.shard_offset : param_shard.shard_offset + param_shard.numel].view(
            self.optimizer_params[param_shard.name].shape
        )

    def update_shard_from_master(self) -> None:
        """Copies the master into the shard, rounding it."""
        if self.master is not None:
            self.shard.copy_(self.master)

    def update_group(self, gradient: torch.Tensor) -> UpdateGroup:
        """Returns the stepped parameters, with views of `gradient`."""
        gradients = tuple(self.shard_view(gradient, param_shard) for param_shard in self.param_shards)
        return UpdateGroup(
            tuple(self.optimizer_params[param_shard.name] for param_shard in self.param_shards),
            gradients,
            self.update_shard_from_master,
        )
