"""The master weights of parameters outside of flat parameters, and groups of parameters that are stepped.

The master starts from the initial value before rounding to the weight's dtype. No block reads it; after every
step the weight is the rounded master (see runtime/mixed_precision.py).
"""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.engine.params.weight_stash import WeightStash
from meshwright.engine.runtime.rank_state import RankState


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
        rounded = [name for name in names if name in self._masters]
        if rounded:  # `data`: graphs that have met an older version see no write
            weights = [self._weights[name].data for name in rounded]
            torch._foreach_copy_(weights, [self._masters[name] for name in rounded])
