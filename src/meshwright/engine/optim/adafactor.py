"""Adafactor: the second moment of a matrix from the means of its rows and columns, and no first moment.

Why it works: the squared gradients of a matrix are close to a matrix of rank one: a row that learns fast does
so in every column. So instead of all v[i, j] Adafactor keeps the mean of each row and of each column, from
which the best such matrix follows. An update that is much larger than usual (its root mean square exceeds 1)
comes from an outdated estimate, and is scaled down. Steps are relative: in units of the weight's own size.

    squared gradients  . . . . | r0      v[i, j] ~ r[i] c[j] / mean(r)
                       . . . . | r1
                       ------- +
                       c0 .. c3          stored: rows + columns instead of rows x columns

    r <- b r + (1 - b) mean_j(g^2 + 1e-30)        b = 1 - t**-0.8        c likewise over i
    u = g / sqrt(r c / mean(r))                   u <- u / max(1, rms(u))
    x <- x (1 - lr wd) - lr max(0.001, rms(x)) u

Shard alignment: matrix, for vectors too: the sizes of weight and update are those of the whole weight. (With
shards of rows, the row means would stay separate, and the column means and both sizes would need a sum over
ranks inside the step.)
Cost: 4/columns + 4/rows bytes per parameter: 0.002 for 4096 x 4096; 4 for vectors. AdamW keeps 8. Weights of
three and more dims are matrices in their last two. Whole matrices make shards uneven, so a parameter group is
padded to n times its fullest rank.
Limits: the learning rate is relative: 1e-2 is usual, AdamW's 3e-4 is far too small. Betas, eps and momentum
of the job are not used. A weight that is larger than a rank's share of its parameter group (an embedding)
makes that rank hold more than the others.
Not torch.optim.Adafactor: it caps the learning rate at 1/sqrt(step), below 1e-2 from step 10,000 on whatever
the job's schedule says, and it keeps the moments of bfloat16 weights in bfloat16 (here: float32).
Paper: Shazeer & Stern 2018, "Adafactor", arXiv 1804.04235 (algorithms 4 and 5; decay and clipping, sections 6
and 7.2).
"""

from typing import Any, ClassVar

import torch

from meshwright.engine.optim.abstract_optimizer import PerParamOptimizer, get_compute_dtype
from meshwright.plan.sharding.flat_param import ShardAlignment

SQUARE_EPS, MIN_RMS, DECAY_EXPONENT = 1e-30, 1e-3, -0.8  # epsilon 1, epsilon 2 and the exponent of the paper


class Adafactor(PerParamOptimizer):
    """Adafactor over `groups`, with steps relative to the size of each parameter."""

    shard_alignment: ClassVar[ShardAlignment] = "matrix"

    def __init__(self, groups: Any, lr: float = 1e-2) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    def update_param(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        gradient = gradient.to(get_compute_dtype(parameter))
        state["step"] = state.get("step", 0) + 1
        weight = state["step"] ** DECAY_EXPONENT
        squares = gradient.square().add_(SQUARE_EPS)
        if gradient.ndim > 1:
            rows, columns = (
                _update_average(state, "row_var", squares.mean(-1), weight),
                _update_average(state, "col_var", squares.mean(-2), weight),
            )
            second_moment = (rows / rows.mean(-1, keepdim=True))[..., :, None] * columns[..., None, :]
        else:
            second_moment = _update_average(state, "variance", squares, weight)
        update = gradient * second_moment.clamp(min=SQUARE_EPS).rsqrt()
        update /= _rms(update).clamp(min=1.0)
        step_size = group["lr"] * _rms(parameter.to(update.dtype)).clamp(min=MIN_RMS)
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_((update * step_size).to(parameter.dtype))


def _update_average(state: dict[str, Any], key: str, value: torch.Tensor, weight: float) -> torch.Tensor:
    """Updates the running average under `key` with `value` at `weight`; the first call stores `value`."""
    state[key] = state[key].lerp_(value, weight) if key in state else value
    return state[key]


def _rms(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.square().mean().sqrt()
