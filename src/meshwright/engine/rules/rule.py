"""What every rule here has in common: it steps one parameter at a time, from its gradient and its own state.

A parameter is a whole weight, or a flat *piece* of one: what a rank has of it where weights are cut into shards. `grain` says
at which places a rule can bear a cut (core/arena.py), so that the pieces, stepped apart, become what the whole would have
become:

    element   each element by itself: any piece does
    block     256 elements of the flattened weight share something: pieces begin and end at multiples of 256 (or at its end)
    matrix    the rule looks at the whole weight: one rank has all of it, in its own shape

Of a weight of which ranks have slices, cut along a dim of it, one rank steps all for the others (core/owners.py), unless any
piece does.

State is tensors and numbers by key, so that it can be saved by logical name. A tensor is of the parameter's shape (by
element), has one element per block if its key is in `by_block`, or belongs to a whole weight and has any shape.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from meshwright.core.arena import Grain


class Rule(torch.optim.Optimizer, ABC):
    """An optimizer that steps each parameter by itself: `update`."""

    grain: ClassVar[Grain]
    by_block: ClassVar[frozenset[str]] = frozenset()
    keeps: torch.dtype | None = None  # the dtype of its moments, whatever is stepped; None: they follow that

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  torch has two overloads
        """Step every parameter that has a gradient; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    @abstractmethod
    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Change `parameter` and `state`, which is empty before the first step, in place.

        `group` holds lr, weight_decay and what else the rule needs.
        """


def computed_in(parameter: torch.Tensor) -> torch.dtype:
    """The dtype in which moments are computed, whatever they are kept in: at least float32."""
    return torch.promote_types(parameter.dtype, torch.float32)
