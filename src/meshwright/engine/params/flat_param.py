"""What the optimizer steps where weights lie in no arena: the weights themselves, or a master of each in a wider dtype.

A master begins as the initial value before that was rounded to the weight's dtype. It is never read by a block; after every step
the weight is its master, rounded. Pieces of arenas have masters too (engine/held.py); what masters are for stands in
engine/precision.py. Where old versions of weights are kept (engine/versions.py) and there is no master, another parameter in the
same memory as the weight is stepped, which no graph has met.

One arena in a rank's memory: what is kept of it, where it becomes whole, and what the optimizer steps.

whole     [ w0 | w1 | w2 | pad ]      views of it are the module's parameters
shard          [ w1 | w2 ]            what UNSHARD sends: a stretch of the whole, or memory of its own
master         [ w1 | w2 ]            what is stepped, where that has a wider dtype; the shard is the master, rounded
gradient       [ w1 | w2 ]            the sum over all ranks

STASH, LOAD_STASHED and LOAD_LATEST: weights as they were some steps ago, for the backwards that need those (core/versions.py).

    weight    ----> memory 0          memory 1          a weight of the module, which graphs have met
    stepped   ----> memory 0                            what the optimizer steps: the same memory, and no graph has met it

    STASH     both point to memory 1, which begins as a copy; memory 0 stays as it is       STEP writes into memory 1
    LOAD_STASHED   the weight points to memory 0, for a backward                                 LOAD_LATEST points it to memory 1 again

Of a weight autograd saves either itself, and looks when backward comes where it points to (norms), or a view, which stays in the
memory that it was made from (products of matrices). Both are right: the memory of a version is not written into while it is
kept, and the weight points there while the backward of that version runs. The optimizer steps a parameter of its own, so that
autograd sees no write to the weight. Memory that is let go of serves the next STASH.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from meshwright.comm.collectives.group import Group
from meshwright.engine.runtime.state import RankState
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.flat_param import FlatParamSpec, ParamShard
from meshwright.plan.step.action import Action
from meshwright.plan.strategy import Handler


class WeightStash:
    """Of `weights`, by name, the versions that are kept; `stepped` are what the optimizer steps in the same memory."""

    def __init__(
        self, weights: Mapping[str, nn.Parameter], optimizer_params: Mapping[str, nn.Parameter]
    ) -> None:
        self._weights = list(weights.values())
        self._stepped = [optimizer_params.get(name) for name in weights]
        self._kept: dict[str, list[torch.Tensor]] = {}
        self._free: list[list[torch.Tensor]] = []
        self._newest: list[torch.Tensor] | None = None
        self.handlers: dict[str, Handler] = {
            "STASH": self.stash,
            "LOAD_STASHED": self.load_stashed,
            "LOAD_LATEST": self.load_latest,
        }

    @property
    def nbytes(self) -> int:
        """The bytes of all memory beside that of the newest version."""
        return sum(tensor.nbytes for held in (*self._kept.values(), *self._free) for tensor in held)

    @torch.no_grad()
    def stash(self, action: Action) -> None:
        """Keep the weights as they are under the name of `action.subject`; what is stepped next is a copy."""
        old = [weight.data for weight in self._weights]
        new = self._free.pop() if self._free else [torch.empty_like(tensor) for tensor in old]
        torch._foreach_copy_(new, old)
        self._kept[action.subject] = old
        self._point(new)
        for parameter, tensor in zip(self._stepped, new, strict=True):
            if parameter is not None:
                parameter.data = tensor

    def load_stashed(self, action: Action) -> None:
        """Have the weights be those that `action.subject` names."""
        self._newest = [weight.data for weight in self._weights]
        self._point(self._kept[action.subject])

    def load_latest(self, action: Action) -> None:
        """Have the weights be the newest ones; let go of those that `action` frees."""
        if self._newest is not None:
            self._point(self._newest)
            self._newest = None
        for name in action.frees:
            if name in self._kept:
                self._free.append(self._kept.pop(name))

    def discard_all(self) -> None:
        """Have the newest weights, and let go of all others: a step has not come to its end."""
        self.load_latest(Action("LOAD_LATEST", frees=tuple(self._kept)))

    def _point(self, tensors: Iterable[torch.Tensor]) -> None:
        for weight, tensor in zip(self._weights, tensors, strict=True):
            weight.data = tensor


@dataclass(frozen=True)
class UpdateGroup:
    """What is stepped together: the optimizer's parameters, the summed gradient of each (None: all zeros), and what follows.

    `finish` brings the weights up to date with what was stepped.
    """

    parameters: tuple[nn.Parameter, ...]
    gradients: tuple[torch.Tensor | None, ...]
    finish: Callable[[], None]


class MasterWeights:
    """Of the trained weights that are not in `cut`: what is stepped in their place, by name."""

    def __init__(self, plan: Plan, state: RankState, flat_param_names: Container[str]) -> None:
        precision, subject = plan.job.precision.effective, state.trained_module
        self._weights = {
            name: weight
            for name, weight in subject.trainable_parameters.items()
            if name not in flat_param_names
        }
        self._bundles = [
            names
            for each in plan.sharding.param_groups()
            if (names := [w.name for w in each.params if w.name in self._weights])
        ]
        keeps = any(action.kind == "STASH" for action in plan.actions)
        self._masters: dict[str, nn.Parameter] = {}
        self.alias_params: dict[str, nn.Parameter] = {}  # in the same memory as the weight
        if precision.master != precision.parameters and plan.is_primary_rank(state.world.rank):
            dtype = getattr(torch, precision.master)
            for name, weight in self._weights.items():
                value = subject.initial_values[name] if name in subject.initial_values else weight.detach()
                self._masters[name] = nn.Parameter(value.to(dtype, copy=True))
        elif keeps:
            self.alias_params = {name: nn.Parameter(weight.data) for name, weight in self._weights.items()}
        self.weight_stash = WeightStash(self._weights if keeps else {}, self.alias_params)

    @property
    def optimizer_params(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps, by the name of the weight."""
        return self._weights | self._masters | self.alias_params

    @property
    def nbytes(self) -> int:
        """The bytes of the masters."""
        return sum(master.nbytes for master in self._masters.values())

    def exact_value(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The value of `weight` as exactly as it is known: its master's, or its own."""
        return self._masters.get(name, weight).detach()

    @torch.no_grad()
    def load_values(self, name: str, weight: torch.Tensor, values: torch.Tensor) -> None:
        """Have `weight`, and its master if there is one, be `values`, each in its own dtype."""
        weight.copy_(values)
        if name in self._masters:
            self._masters[name].copy_(values)

    def assign_alias_grads(self) -> None:
        """Give what is stepped beside a weight the gradient of that; one that backward did not reach has a gradient of zero."""
        for name, parameter in self.alias_params.items():
            gradient = self._weights[name].grad
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient

    def update_groups(self) -> Iterator[UpdateGroup]:
        """What is stepped, one bundle after the other."""
        stepped = self.optimizer_params
        for names in self._bundles:
            gradients = tuple(self._weights[name].grad for name in names)
            yield UpdateGroup(
                tuple(stepped[name] for name in names), gradients, lambda names=names: self._round(names)
            )

    @torch.no_grad()
    def _round(self, names: list[str]) -> None:
        for name in names:
            if name in self._masters:
                self._weights[name].data.copy_(
                    self._masters[name]
                )  # graphs that have met an older version see no write


@dataclass
class FlatParam:
    """Flat tensors: `whole` has arena.numel elements, the others arena.shard. Without a `master` the shard itself is stepped.

    `steps` are the optimizer's parameters by weight: views of what is stepped.
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
        """What lies in the shard."""
        return self.spec.param_shards(self.group.index)

    @property
    def shard_slice(self) -> slice:
        """Where the shard lies in a whole."""
        return slice(self.group.index * self.spec.shard_numel, (self.group.index + 1) * self.spec.shard_numel)

    @property
    def optimizer_tensor(self) -> torch.Tensor:
        """What the optimizer's parameters are views of."""
        return self.shard if self.master is None else self.master

    def param_shard(self, name: str) -> ParamShard:
        """What lies in the shard of the weight `name`, of which it has a part."""
        return next(piece for piece in self.param_shards if piece.name == name)

    def param_gradient(self, name: str) -> torch.Tensor | None:
        """The summed gradient of that part, flat; None before the first."""
        piece = self.param_shard(name)
        return (
            None
            if self.gradient is None
            else self.gradient[piece.shard_offset : piece.shard_offset + piece.numel]
        )

    @property
    def master_nbytes(self) -> int:
        """The bytes of the master, if there is one."""
        return 0 if self.master is None else self.master.nbytes

    def shard_values(self, param_shard: ParamShard) -> torch.Tensor:
        """The values of a piece as exactly as they are known, flat."""
        return self.optimizer_tensor[param_shard.shard_offset : param_shard.shard_offset + param_shard.numel]

    def load_values(self, param_shard: ParamShard, values: torch.Tensor) -> None:
        """Have a piece be its part of the whole `values`, in the dtypes of what is stepped and of the shard."""
        mine = values.reshape(-1)[param_shard.begin : param_shard.end]
        self.shard_values(param_shard).copy_(mine)
        if self.master is not None:
            self.shard[param_shard.shard_offset : param_shard.shard_offset + param_shard.numel].copy_(mine)

    def shard_view(self, flat: torch.Tensor, param_shard: ParamShard) -> torch.Tensor:
        """The place of a piece in `flat`, as long as the shard, in the shape in which it is stepped."""
        return flat[param_shard.shard_offset : param_shard.shard_offset + param_shard.numel].view(
            self.optimizer_params[param_shard.name].shape
        )

    def update_shard_from_master(self) -> None:
        """Bring the shard up to date with its master."""
        if self.master is not None:
            self.shard.copy_(self.master)

    def update_group(self, gradient: torch.Tensor) -> UpdateGroup:
        """What is stepped of it, with the places of `gradient`."""
        gradients = tuple(self.shard_view(gradient, piece) for piece in self.param_shards)
        return UpdateGroup(
            tuple(self.optimizer_params[piece.name] for piece in self.param_shards),
            gradients,
            self.update_shard_from_master,
        )
