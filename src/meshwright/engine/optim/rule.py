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

Which optimizers bear cuts: what is declared by a class, and what is known of torch's own.

An optimizer that a user brings sees pieces of weights where the plan cuts them. One that computes each element from that
element's gradient and state alone does not notice; any other would compute something else than on one device, without a word,
so it is refused unless its class declares the grain it needs, and the layout gives that:

    class Mine(torch.optim.Optimizer):
        grain = "element"
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

from meshwright.plan.job.errors import PlanError
from meshwright.plan.optimizer_spec import FINENESS
from meshwright.plan.sharding.flat_param import Grain


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


Grains = Mapping[str, Grain]
ELEMENTWISE = (SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, Rprop, ASGD)


def grain_needed(optimizer: torch.optim.Optimizer) -> Grain | None:
    """The grain that the class of `optimizer` declares, or that is known of torch's own; None: nobody knows."""
    kind = type(optimizer)
    declared = next((vars(each)["grain"] for each in kind.__mro__ if "grain" in vars(each)), None)
    if declared is not None and declared not in FINENESS:
        text = f"{kind.__name__} declares grain = {declared!r}"
        raise PlanError(text, fix=f"declare one of {', '.join(FINENESS)}", where="optimizer")
    return "element" if declared is None and kind in ELEMENTWISE else declared


def keys_by_block(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """The keys of its state that hold one element per block."""
    kind = type(optimizer)
    return frozenset(next((vars(each)["by_block"] for each in kind.__mro__ if "by_block" in vars(each)), ()))


def check_grains(optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter], grains: Grains) -> None:
    """Raise PlanError where an optimizer steps a weight that is cut more finely than it bears; `grains` are those of the cuts."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for optimizer in optimizers:
        needed, kind = grain_needed(optimizer), type(optimizer).__name__
        mine = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        cut = next((name for name in mine if name in grains and _too_fine(grains[name], needed)), None)
        if cut is not None:
            known = f"needs the grain '{needed}'" if needed else "does not say whether it may see a part of a weight"
            text = f"{kind} {known}, and the plan cuts {cut} by {grains[cut]}"
            fix = (
                f'if it computes every element by itself, say so: class {kind}: grain = "element"; else have whole weights on '
                'each rank ("replicate" in place of "zero"), or on one: optimizer.name = "adafactor" cuts so, whoever steps them'
            )
            raise PlanError(text, fix=fix, where="optimizer")


def _too_fine(cut: Grain, needed: Grain | None) -> bool:
    """Whether cuts at the grain `cut` are finer than `needed`; of an optimizer that says nothing, it may be whole weights."""
    return FINENESS.index(cut) < FINENESS.index(needed or "matrix")
