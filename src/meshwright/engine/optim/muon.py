"""Muon: the update of a matrix is the nearest orthogonal matrix to its momentum.

Why it works: a few singular directions dominate the momentum of a weight matrix; the others, rare but useful,
hardly move. Muon keeps the directions and makes all singular values one. A few steps of an odd polynomial in
the matrix find the nearest orthogonal matrix U V' of U S V' without a singular value decomposition: it acts
on each singular value by itself and drives those between 0 and 1 towards 1. Times 0.2 sqrt(larger side), an
update is as large as AdamW's usually is, so both share one learning rate and one weight decay.

    M <- mu M + (1 - mu) G          momentum
    N  = mu M + (1 - mu) G          look-ahead (Nesterov)
    X  = N / |N|                    singular values now between 0 and 1
    5 x   X <- a X + b (X X') X + c (X X')^2 X         a, b, c = 3.4445, -4.7750, 2.0315
    W <- W (1 - lr wd) - lr 0.2 sqrt(max(rows, columns)) X

Shard alignment: matrix. Singular values are those of the whole matrix; a shard that is orthogonalized by
itself gives another update (by 39 % in one published report), so each matrix has one owner, which does the
work for all.
Cost: 4 bytes per parameter, where AdamW keeps 8. Flops: 15 products per step, at most 5 w / tokens of what
the matrix costs anyway, w being its smaller side: 1 % at w = 1,000 and 500,000 tokens. Ranks that own no
matrix of a block wait; the shards of a block are as long as what its fullest rank owns.
Experts [experts, rows, columns] are a matrix each. One rank steps all experts of a layer, whoever has them.
Limits: for hidden matrices. AdamW steps embeddings, heads, norms and biases (plan/optimizer_per_param.py).
The polynomial is quick and not exact: singular values end between 0.7 and 1.2. On a GPU it runs in bfloat16,
in which it is stable. Not torch.optim.Muon: it runs the polynomial in bfloat16 for every dtype and device, 1
to 2 % off, and parity with one device is checked in float64, to 1e-10. Paper: Jordan et al. 2024, "Muon: An
optimizer for hidden layers in neural networks" (kellerjordan.github.io/posts/muon); the scale and the decay:
Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv 2502.16982 (section 2.2).
"""

from typing import Any, ClassVar

import torch

from meshwright.engine.optim.abstract_optimizer import PerParamOptimizer, get_compute_dtype
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.flat_param import ShardAlignment

NEWTON_SCHULZ_COEFFICIENTS, NUM_NEWTON_SCHULZ_STEPS = (3.4445, -4.7750, 2.0315), 5
UPDATE_RMS = 0.2  # root mean square of a usual update of AdamW


class Muon(PerParamOptimizer):
    """Muon over `groups`, all of whose parameters are whole matrices, or experts with one each.

    Raises PlanError for a parameter that is not a matrix, such as a shard of one.
    """

    shard_alignment: ClassVar[ShardAlignment] = "matrix"

    def __init__(self, groups: Any, lr: float = 1e-3, momentum: float = 0.95) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        non_matrices = [
            tuple(parameter.shape)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.ndim not in (2, 3)
        ]
        if non_matrices:
            text = f"Muon got a parameter of shape {non_matrices[0]}; needed are whole matrices"
            fix = (
                "let it step 2-D weights only, and shards keep them whole: set it in the job, "
                'optimizer.name = "muon"'
            )
            raise PlanError(text, fix=fix, location="optimizer")

    def update_param(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        lr, mu = group["lr"], group["momentum"]
        state["momentum"].lerp_(gradient, 1 - mu)
        ahead = gradient.lerp(state["momentum"], mu)
        update = orthogonalize(ahead).to(parameter.dtype)
        parameter.mul_(1 - lr * group["weight_decay"]).sub_(
            update, alpha=lr * UPDATE_RMS * max(parameter.shape[-2:]) ** 0.5
        )


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the singular vectors of `matrix` with singular values between 0.7 and 1.2; of each one, for
    [experts, rows, columns].
    """
    use_bf16 = matrix.device.type != "cpu" and matrix.dtype != torch.float64
    dtype = torch.bfloat16 if use_bf16 else get_compute_dtype(matrix)
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = x.mT if is_tall else x  # the products are then of the smaller side
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    for _ in range(NUM_NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x
