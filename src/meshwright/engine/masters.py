"""What the optimizer steps where weights lie in no arena: the weights themselves, or a master of each in a wider dtype.

A master begins as the initial value before that was rounded to the weight's dtype. It is never read by a block; after every step
the weight is its master, rounded. Pieces of arenas have masters too (engine/held.py); what masters are for stands in
engine/precision.py. Where old versions of weights are kept (engine/versions.py) and there is no master, another parameter in the
same memory as the weight is stepped, which no graph has met.
"""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.core.plan import Plan
from meshwright.engine.state import State
from meshwright.engine.versions import Versions


@dataclass(frozen=True)
class Stepped:
    """What is stepped together: the optimizer's parameters, the summed gradient of each (None: all zeros), and what follows.

    `finish` brings the weights up to date with what was stepped.
    """

    parameters: tuple[nn.Parameter, ...]
    gradients: tuple[torch.Tensor | None, ...]
    finish: Callable[[], None]


class Masters:
    """Of the trained weights that are not in `cut`: what is stepped in their place, by name."""

    def __init__(self, plan: Plan, state: State, cut: Container[str]) -> None:
        precision, subject = plan.job.precision.resolved, state.subject
        self._weights = {name: weight for name, weight in subject.trainable.items() if name not in cut}
        self._bundles = [
            names for each in plan.space.bundles() if (names := [w.name for w in each.weights if w.name in self._weights])
        ]
        keeps = any(action.kind == "STASH" for action in plan.actions)
        self._masters: dict[str, nn.Parameter] = {}
        self.beside: dict[str, nn.Parameter] = {}  # in the same memory as the weight
        if precision.master != precision.parameters and plan.leads(state.world.rank):
            dtype = getattr(torch, precision.master)
            for name, weight in self._weights.items():
                value = subject.blank[name] if name in subject.blank else weight.detach()
                self._masters[name] = nn.Parameter(value.to(dtype, copy=True))
        elif keeps:
            self.beside = {name: nn.Parameter(weight.data) for name, weight in self._weights.items()}
        self.versions = Versions(self._weights if keeps else {}, self.beside)

    @property
    def stepped(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps, by the name of the weight."""
        return self._weights | self._masters | self.beside

    @property
    def nbytes(self) -> int:
        """The bytes of the masters."""
        return sum(master.nbytes for master in self._masters.values())

    def value(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The value of `weight` as exactly as it is known: its master's, or its own."""
        return self._masters.get(name, weight).detach()

    @torch.no_grad()
    def take(self, name: str, weight: torch.Tensor, values: torch.Tensor) -> None:
        """Have `weight`, and its master if there is one, be `values`, each in its own dtype."""
        weight.copy_(values)
        if name in self._masters:
            self._masters[name].copy_(values)

    def hand_over(self) -> None:
        """Give what is stepped beside a weight the gradient of that; one that backward did not reach has a gradient of zero."""
        for name, parameter in self.beside.items():
            gradient = self._weights[name].grad
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient

    def bundles(self) -> Iterator[Stepped]:
        """What is stepped, one bundle after the other."""
        stepped = self.stepped
        for names in self._bundles:
            gradients = tuple(self._weights[name].grad for name in names)
            yield Stepped(tuple(stepped[name] for name in names), gradients, lambda names=names: self._round(names))

    @torch.no_grad()
    def _round(self, names: list[str]) -> None:
        for name in names:
            if name in self._masters:
                self._weights[name].data.copy_(self._masters[name])  # graphs that have met an older version see no write
