"""Lion: every element moves by the same amount, in the direction of the sign of an average of gradients.

Why it works: AdamW divides the average gradient by its usual size, so most of its updates are near plus or
minus one anyway. Lion takes the sign and needs no second moment. The average that gives the sign weighs the
present gradient more (beta1) than the stored one does (beta2): quick to turn, slow to forget.

    gradient g --+--> c = beta1 m + (1 - beta1) g --> x <- x (1 - lr wd) - lr sign(c)
                 |              ^
                 +--> m <- beta2 m + (1 - beta2) g            stored for the next step

Shard alignment: element. An element needs its own gradient and moment and nothing else.
Cost: 4 bytes per parameter (one moment in float32), or 2 with a moment in bfloat16; AdamW keeps 8. One pass
over memory.
Limits: the step has a fixed size, so take a learning rate 3 to 10 times smaller than AdamW's, and a weight
decay larger by as much. A gradient that is pure rounding noise moves its element as far as a large one. In
bfloat16 a change below 2**-8 of the moment may be lost, so beta2 is at most 1 - 2**-8 (the job refuses more).
Paper: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675 (program 1,
algorithm 2).
"""

from typing import Any, ClassVar

import torch

from meshwright.engine.optim.abstract_optimizer import PerParamOptimizer, get_compute_dtype
from meshwright.plan.sharding.flat_param import ShardAlignment


class Lion(PerParamOptimizer):
    """Lion over `groups`; the moment is stored in `state_dtype` (None: in the parameter's dtype)."""

    shard_alignment: ClassVar[ShardAlignment] = "element"

    def __init__(
        self,
        groups: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        state_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})
        self.state_dtype = state_dtype

    def update_param(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self.state_dtype)
        (beta1, beta2), lr, dtype = group["betas"], group["lr"], get_compute_dtype(parameter)
        stored, gradient = state["exp_avg"], gradient.to(dtype)
        moment = stored.to(dtype)
        direction = moment.lerp(gradient, 1 - beta1).sign_()
        parameter.mul_(1 - lr * group["weight_decay"]).add_(direction.to(parameter.dtype), alpha=-lr)
        stored.copy_(moment.lerp(gradient, 1 - beta2))
