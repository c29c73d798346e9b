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
from meshwright.plan.optimizer_spec import ALIGNMENTS_BY_SIZE
from meshwright.plan.sharding.flat_param import ShardAlignment


class PerParamOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer that steps each parameter by itself: `update`."""

    shard_alignment: ClassVar[ShardAlignment]
    blockwise_state_keys: ClassVar[frozenset[str]] = frozenset()
    state_dtype: torch.dtype | None = (
        None  # the dtype of its moments, whatever is stepped; None: they follow that
    )

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
                    self.update_param(parameter, parameter.grad, self.state[parameter], group)
        return loss

    @abstractmethod
    def update_param(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Change `parameter` and `state`, which is empty before the first step, in place.

        `group` holds lr, weight_decay and what else the rule needs.
        """


def get_compute_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype in which moments are computed, whatever they are kept in: at least float32."""
    return torch.promote_types(parameter.dtype, torch.float32)


ShardAlignments = Mapping[str, ShardAlignment]
ELEMENTWISE_OPTIMIZERS = (SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, Rprop, ASGD)


def required_shard_alignment(optimizer: torch.optim.Optimizer) -> ShardAlignment | None:
    """The grain that the class of `optimizer` declares, or that is known of torch's own; None: nobody knows."""
    kind = type(optimizer)
    declared = next((vars(each)["grain"] for each in kind.__mro__ if "grain" in vars(each)), None)
    if declared is not None and declared not in ALIGNMENTS_BY_SIZE:
        text = f"{kind.__name__} declares grain = {declared!r}"
        raise PlanError(text, fix=f"declare one of {', '.join(ALIGNMENTS_BY_SIZE)}", location="optimizer")
    return "element" if declared is None and kind in ELEMENTWISE_OPTIMIZERS else declared


def get_blockwise_state_keys(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """The keys of its state that hold one element per block."""
    kind = type(optimizer)
    return frozenset(next((vars(each)["by_block"] for each in kind.__mro__ if "by_block" in vars(each)), ()))


def check_shard_alignments(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, nn.Parameter],
    shard_alignments: ShardAlignments,
) -> None:
    """Raise PlanError where an optimizer steps a weight that is cut more finely than it bears; `grains` are those of the cuts."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for optimizer in optimizers:
        needed, kind = required_shard_alignment(optimizer), type(optimizer).__name__
        mine = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        cut = next(
            (name for name in mine if name in shard_alignments and _too_fine(shard_alignments[name], needed)),
            None,
        )
        if cut is not None:
            known = (
                f"needs the grain '{needed}'"
                if needed
                else "does not say whether it may see a part of a weight"
            )
            text = f"{kind} {known}, and the plan cuts {cut} by {shard_alignments[cut]}"
            fix = (
                f'if it computes every element by itself, say so: class {kind}: grain = "element"; else have whole weights on '
                'each rank ("replicate" in place of "zero"), or on one: optimizer.name = "adafactor" cuts so, whoever steps them'
            )
            raise PlanError(text, fix=fix, location="optimizer")


def _too_fine(cut: ShardAlignment, needed: ShardAlignment | None) -> bool:
    """Whether cuts at the grain `cut` are finer than `needed`; of an optimizer that says nothing, it may be whole weights."""
    return ALIGNMENTS_BY_SIZE.index(cut) < ALIGNMENTS_BY_SIZE.index(needed or "matrix")
