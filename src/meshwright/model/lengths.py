"""What blocks compute on rows of two lengths: who asks how many tokens there are would compute something else on a rank.

    rows of 7 tokens      layers.0: mul 0.35, softmax, mul 2.81, ...          log(7) / log(2)
    rows of 5 tokens      layers.0: mul 0.35, softmax, mul 2.32, ...          log(5) / log(2)

A number may have become anything by the time that it is computed with, so it is told by this alone. The same holds for a branch.
What a model runs again by itself in backward asks nobody, and would attend to this rank's tokens alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.model.operations import ALIKE, ELEMENTWISE
from meshwright.model.values import leaves

CHECKPOINT = "torch.utils.checkpoint, which runs it again in backward: leave that to the strategy 'recompute'"
_FILLED = {"full": 1, "full_like": 1, "new_full": 2, "fill": 1}  # where the value stands; sizes are told by shapes
_MADE = frozenset(("tensor", "as_tensor", "asarray", "new_tensor", "scalar_tensor", "scaled_dot_product_attention"))
_WITH_NUMBERS = (ELEMENTWISE - ALIKE) | _MADE | {"softmax", "log_softmax", "layer_norm", "rms_norm"}


@dataclass(frozen=True)
class Computed:
    """One operation of a block: within which module, its name, the numbers that it was given."""

    module: str
    name: str
    numbers: tuple[str, ...]

    @classmethod
    def of(cls, module: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Computed":
        """The operation `name` on these."""
        if name in _FILLED:
            given: list[Any] = [*args[_FILLED[name] :][:1], *(kwargs[key] for key in ("fill_value", "value") if key in kwargs)]
        else:
            given = leaves((args, dict(kwargs))) if name in _WITH_NUMBERS else []
        return cls(module, name, tuple(repr(each) for each in given if type(each) in (int, float, complex)))


def run_again() -> str:
    """Why what runs now cannot have some of the tokens, in a trial: it runs once more in backward, unseen; "": it does not."""
    if not torch.is_grad_enabled():
        return f"runs without gradients: torch.no_grad, or {CHECKPOINT}"
    return f"runs in {CHECKPOINT}" if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None else ""


def unlike(mine: Sequence[Computed], other: Sequence[Computed], length: str) -> str:
    """Why a visit that computes `mine`, and `other` on rows of so many tokens, must know how many there are; "": it need not."""
    for one, two in zip(mine, other, strict=False):
        if one.name != two.name:
            return f"{one.module} computes '{two.name}' on rows of {length} tokens where it else computes '{one.name}'"
        if one.numbers != two.numbers:
            return f"{one.module} computes with the number of tokens ({one.name})"
    return "" if len(mine) == len(other) else f"{mine[-1].module} computes more or less on rows of {length} tokens than else"
