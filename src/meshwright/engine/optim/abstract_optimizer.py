"""Base class of our optimizers, and the check that an optimizer accepts the plan's shards of its weights.

A parameter of the optimizer is a whole weight, or a flat shard of one. `shard_alignment` says where a weight
may be cut (plan/sharding/flat_param.py) so that its shards, stepped separately, become what the whole would
have become:

    element   each element depends on itself only: any shard works
    block     256 elements of the flattened weight share a value: shards begin and end at multiples of 256
    matrix    the optimizer needs the whole weight: one rank holds all of it, in its own shape

Where ranks hold slices of a weight along one of its dims, one rank steps all of it for the others
(plan/step/matrix_owner_actions.py), unless any shard works.

State is tensors and numbers by key, so that it can be saved by parameter name. A tensor has the parameter's
shape (one value per element), or one element per block if its key is in `blockwise_state_keys`, or belongs to
a whole weight and has any shape.

A user's optimizer that computes each element from that element's gradient and state alone does not notice
shards. Any other would silently compute something else than on one device, so it is refused unless its class
declares what it needs, and the layout gives that:

    class Mine(torch.optim.Optimizer):
        shard_alignment = "element"
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

from meshwright.plan.job.errors import PlanError
from meshwright.plan.optimizer_per_param import ALIGNMENTS_BY_SIZE
from meshwright.plan.sharding.flat_param import ShardAlignment


class PerParamOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer that steps each parameter by itself: `update_param`."""

    shard_alignment: ClassVar[ShardAlignment]
    blockwise_state_keys: ClassVar[frozenset[str]] = frozenset()
    state_dtype: torch.dtype | None = (
        None  # the dtype of its moments, whatever is stepped; None: they follow that
    )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  torch has two overloads
        """Steps every parameter that has a gradient; returns what `closure` returns."""
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
        """Updates `parameter` and `state` in place; `state` is empty before the first step.

        `group` holds lr, weight_decay and what else the optimizer needs.
        """


def get_compute_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which moments are computed, whatever they are stored in: at least float32."""
    return torch.promote_types(parameter.dtype, torch.float32)


ShardAlignments = Mapping[str, ShardAlignment]
ELEMENTWISE_OPTIMIZERS = (SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, Rprop, ASGD)


def required_shard_alignment(optimizer: torch.optim.Optimizer) -> ShardAlignment | None:
    """Returns the alignment that the class of `optimizer` declares, or that of torch's own; None: unknown."""
    kind = type(optimizer)
    declared = next(
        (vars(each)["shard_alignment"] for each in kind.__mro__ if "shard_alignment" in vars(each)), None
    )
    if declared is not None and declared not in ALIGNMENTS_BY_SIZE:
        text = f"{kind.__name__} declares shard_alignment = {declared!r}"
        raise PlanError(text, fix=f"declare one of {', '.join(ALIGNMENTS_BY_SIZE)}", location="optimizer")
    return "element" if declared is None and kind in ELEMENTWISE_OPTIMIZERS else declared


def get_blockwise_state_keys(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Returns the keys of the optimizer's state that hold one element per block."""
    kind = type(optimizer)
    return frozenset(
        next(
            (
                vars(each)["blockwise_state_keys"]
                for each in kind.__mro__
                if "blockwise_state_keys" in vars(each)
            ),
            (),
        )
    )


def check_shard_alignments(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, nn.Parameter],
    shard_alignments: ShardAlignments,
) -> None:
    """Raises PlanError where an optimizer needs a coarser alignment than the plan's `shard_alignments`."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for optimizer in optimizers:
        needed, kind = required_shard_alignment(optimizer), type(optimizer).__name__
        param_names = [
            names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]
        ]
        cut = next(
            (
                name
                for name in param_names
                if name in shard_alignments and _is_too_fine(shard_alignments[name], needed)
            ),
            None,
        )
        if cut is not None:
            requirement = (
                f"needs shard_alignment = '{needed}'"
                if needed
                else "does not say whether it accepts a part of a weight"
            )
            text = f"{kind} {requirement}, and the plan cuts {cut} by {shard_alignments[cut]}"
            fix = (
                f'if it computes every element by itself, say so: class {kind}: shard_alignment = "element"; '
                'otherwise keep full weights on each rank ("ddp" in place of "zero"), or on one: '
                'optimizer.name = "adafactor" shards them so, for any optimizer'
            )
            raise PlanError(text, fix=fix, location="optimizer")


def _is_too_fine(cut: ShardAlignment, needed: ShardAlignment | None) -> bool:
    return ALIGNMENTS_BY_SIZE.index(cut) < ALIGNMENTS_BY_SIZE.index(needed or "matrix")
