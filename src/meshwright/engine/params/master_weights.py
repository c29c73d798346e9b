"""The master weights of parameters outside of flat parameters, and groups of parameters that are stepped.

The master starts from the initial value before rounding to the weight's dtype. No block reads it; after every
step the weight is the rounded master (see runtime/mixed_precision.py). Where the host steps, every weight has
a master there, a copy of its gradient, and the stepped weight in its own dtype, as flat parameters have.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Set
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.engine.params.weight_stash import WeightStash
from meshwright.engine.runtime.host_memory import without_memory
from meshwright.engine.runtime.rank_state import RankState
from meshwright.plan.hardware.memory_tiers import MemoryTiers


@dataclass(frozen=True)
class UpdateGroup:
    """Parameters that are stepped together: their summed gradients (None: all zeros), and what follows.

    `finish` updates the weights from the stepped parameters.
    """

    parameters: tuple[nn.Parameter, ...]
    gradients: tuple[torch.Tensor | None, ...]
    finish: Callable[[], None]


def has_any(group: Iterable[str], names: Set[str] | None) -> bool:
    """Returns whether a name of `group` is one of `names`; None: of any."""
    return any(names is None or name in names for name in group)


class MasterWeights:
    """The master weights of trained parameters outside of flat parameters.

    What the optimizer steps, by name.
    """

    def __init__(self, state: RankState, flat_param_names: Container[str]) -> None:
        plan = state.plan
        precision, subject = plan.job.precision.effective, state.trained_module
        self._weights = {
            name: weight
            for name, weight in subject.trainable_parameters.items()
            if name not in flat_param_names
        }
        self._group_names = [
            names
            for param_group in plan.view.param_groups
            if (names := [w.name for w in param_group.params if w.name in self._weights])
        ]
        stashes = any(action.kind == "STASH" for action in plan.actions)
        self._masters: dict[str, nn.Parameter] = {}
        self._values: dict[str, torch.Tensor] = {}  # of the masters, wherever they rest
        self._host_weights: dict[str, torch.Tensor] = {}
        self._host_gradients: dict[str, torch.Tensor] = {}
        self._state, tiers = state, plan.sharding.tiers
        self.alias_params: dict[str, nn.Parameter] = {}  # in the same memory as the weight
        rounds = precision.master != precision.parameters
        if (rounds or tiers.step == "host") and plan.is_primary_rank(state.world.rank):
            dtype = getattr(torch, precision.master)
            for name, weight in self._weights.items():
                value = subject.initial_values[name] if name in subject.initial_values else weight.detach()
                self._make_master(name, value, dtype, tiers)
                if tiers.optimizer_states == "host" and tiers.step == "host":
                    self._host_weights[name] = self._values[name]
                    if rounds:
                        self._host_weights[name] = state.host_memory.empty(weight.shape, weight.dtype, weight)
                        self._host_weights[name].copy_(value)
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
        return sum(values.nbytes for values in self._values.values())

    @property
    def rounded_nbytes(self) -> int:
        """The bytes of stepped weights on the host that are not the masters."""
        return sum(each.nbytes for name, each in self._host_weights.items() if each is not self._values[name])

    @property
    def host_gradient_nbytes(self) -> int:
        """The bytes of the gradients that were copied to the host."""
        return sum(gradient.nbytes for gradient in self._host_gradients.values())

    def _make_master(self, name: str, value: torch.Tensor, dtype: torch.dtype, tiers: MemoryTiers) -> None:
        weight, disk = self._weights[name].detach(), self._state.disk
        if tiers.optimizer_states == "device":
            self._values[name] = value.to(dtype, copy=True)
        else:
            self._values[name] = (
                self._state.host_memory.empty(value.shape, dtype, weight)
                if disk is None
                else disk.master(name, value.shape, dtype)
            )
            self._values[name].copy_(value)
        rests = tiers.optimizer_states != tiers.step
        like = weight if tiers.step == "device" else self._values[name]
        self._masters[name] = nn.Parameter(
            without_memory(value.shape, dtype, like) if rests else self._values[name]
        )

    def master(self, name: str) -> torch.Tensor | None:
        """Returns the master of the weight `name`, wherever it rests; None without one."""
        return self._values.get(name)

    def move_master(self, name: str, master: torch.Tensor, *, is_fetched: bool) -> None:
        """Makes `master` that of the weight `name`: `is_fetched` to be stepped, else to rest elsewhere."""
        self._values[name] = master
        steps_on_host = self._state.plan.sharding.tiers.step == "host"
        like = master if steps_on_host else self._weights[name].detach()
        self._masters[name].data = master if is_fetched else without_memory(master.shape, master.dtype, like)

    def grads_to_host(self, names: Iterable[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the copies to make, (target, source), of the gradients of `names` to the host, where the
        optimizer reads them; zeros where backward did not reach a weight.
        """
        pairs = []
        for name in (name for name in names if name in self._masters):
            weight, master = self._weights[name], self._masters[name]
            if name not in self._host_gradients:
                self._host_gradients[name] = self._state.host_memory.empty(
                    weight.shape, weight.dtype, weight.detach()
                )
            target = self._host_gradients[name]
            pairs.append((target, torch.zeros_like(weight) if weight.grad is None else weight.grad))
            master.grad = target if target.dtype == master.dtype else None
        return pairs

    def place_host_gradients(self, names: Iterable[str], buffer: torch.Tensor) -> None:
        """Makes `buffer` the place of the gradients of `names` that the host reads, one behind the other."""
        self._host_gradients |= self._views(names, buffer)

    def place_host_weights(self, names: Iterable[str], buffer: torch.Tensor | None) -> None:
        """Makes `buffer` the place of the stepped weights of `names`; None: they are the masters."""
        views = {name: self._values[name] for name in names} if buffer is None else self._views(names, buffer)
        self._host_weights |= views

    def release_host_copies(self, names: Iterable[str]) -> None:
        """Gives up both places: another parameter group takes them."""
        for name in names:
            self._host_gradients.pop(name, None)
            self._host_weights.pop(name, None)
            self._masters[name].grad = None

    def _views(self, names: Iterable[str], buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns tensors in `buffer` that are like the weights `names`."""
        views, begin = {}, 0
        for name in names:
            weight = self._weights[name]
            end = begin + weight.nbytes
            views[name] = buffer[begin:end].view(weight.dtype).view(weight.shape)
            begin = end
        return views

    def weights_to_device(self, names: Iterable[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the copies to make of the weights that the host has stepped to the device."""
        stepped = (name for name in names if name in self._host_weights)
        return [(self._weights[name].data, self._host_weights[name]) for name in stepped]

    def exact_value(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Returns the value of `weight` in the widest dtype: its master's, or its own."""
        return self._values.get(name, weight).detach()

    @torch.no_grad()
    def load_values(self, name: str, weight: torch.Tensor, values: torch.Tensor) -> None:
        """Copies `values` into `weight`, and into its master if it has one, each in its own dtype."""
        for target in (weight, self._values.get(name), self._host_weights.get(name)):
            if target is not None:
                target.copy_(values)

    def assign_alias_grads(self) -> None:
        """Gives each alias of a weight that weight's gradient; zeros where backward did not reach it."""
        for name, parameter in self.alias_params.items():
            gradient = self._weights[name].grad
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient

    def update_groups(self, chosen: Set[str] | None = None) -> Iterator[UpdateGroup]:
        """Yields the stepped parameters, one parameter group at a time; with `chosen`, the groups that have
        one of these names.
        """
        stepped = self.optimizer_params
        for names in (each for each in self._group_names if has_any(each, chosen)):
            # a thread that steps copies (delayed_steps) must not touch the weights' own gradients
            gradients = tuple(
                self._host_gradients[name] if name in self._host_gradients else self._weights[name].grad
                for name in names
            )
            yield UpdateGroup(
                tuple(stepped[name] for name in names),
                gradients,
                lambda names=names: self.round_masters(names),
            )

    @torch.no_grad()
    def round_masters(self, names: Iterable[str]) -> None:
        """Updates those of the weights `names` that have masters from these."""
        rounded = [name for name in names if name in self._masters]
        if rounded:  # `data`: graphs that have met an older version see no write
            weights = [self._host_weights.get(name, self._weights[name].data) for name in rounded]
            if weights[0] is not self._values[rounded[0]]:
                torch._foreach_copy_(weights, [self._values[name] for name in rounded])
