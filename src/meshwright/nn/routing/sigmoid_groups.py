"""Sigmoid scores with a bias for the choice, and experts in groups of which a token reaches a few.

Each expert has a score of its own between 0 and 1, so one expert's score does not lower the others'. A bias
is added when experts are chosen, and not to the weights: it moves tokens to experts with few of them, and no
gradient disturbs the model. Where each group of experts is on one device, a token is sent to few devices.

    8 experts in 4 groups of 2, top_groups = 2, k = 3
    s + b        .9 .1 | .8 .7 | .2 .3 | .6 .5
    group        1.0   | 1.5   | .5    | 1.1         groups 1 and 3: experts 2, 3, 6

    s = sigmoid(W x),    score of a group = sum of its two largest s + b
    chosen = the k largest s + b in the top groups,    w_e = scale x s_e / sum of the chosen s

With `num_groups` = 1 it is plain sigmoid routing. The bias is the buffer `router.choice_bias`.

Cost: as top-k.
Limits: the bias stays 0 unless the strategy `loss_free_balancing` steps it.
Paper: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437 (equations 12 to 16, section 2.1.2);
Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy", arXiv 2408.15664.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

import torch

from meshwright.nn.router import Router
from meshwright.nn.routing.routes import Routes, Routing, best_experts, check_choices
from meshwright.plan.job.errors import Diagnostic

GROUP_CHOICES = 2  # experts whose scores make that of a group
LEAST_SUM = 1e-20  # of the chosen scores: all may be 0


@dataclass(frozen=True)
class SigmoidGroups(Routing):
    """The `k` best experts of the `top_groups` best of `num_groups` equal groups; weights times `scale`, and
    with `normalized` divided by their sum.
    """

    has_choice_bias: ClassVar[bool] = True

    k: int = 8
    num_groups: int = 1
    top_groups: int = 1
    normalized: bool = True
    scale: float = 1.0

    def diagnostics(self, num_experts: int) -> Iterator[Diagnostic]:
        yield from check_choices(self.k, num_experts)
        if self.num_groups < 1 or num_experts % self.num_groups:
            text = f"{num_experts} experts do not divide into {self.num_groups} groups"
            yield Diagnostic(text, "set num_groups to a divisor of num_experts", "routing.num_groups")
        elif not 1 <= self.top_groups <= self.num_groups:
            text = f"a token reaches {self.top_groups} of {self.num_groups} groups of experts"
            yield Diagnostic(text, f"set top_groups from 1 to {self.num_groups}", "routing.top_groups")
        elif self.k > (reached := self.top_groups * num_experts // self.num_groups):
            text = f"each token chooses k = {self.k} of the {reached} experts in {self.top_groups} groups"
            yield Diagnostic(text, f"set k to at most {reached}, or more top_groups", "routing.k")
        if not isfinite(self.scale) or self.scale <= 0:
            text = f"the scale of the weights is {self.scale!r}; needed is a number above 0"
            yield Diagnostic(text, "set scale = 1.0", "routing.scale")

    def route(self, hidden: torch.Tensor, router: Router) -> Routes:
        logits = router(hidden)
        scores = logits.sigmoid()
        index = best_experts(self._choice_scores(scores.detach(), router.choice_bias), self.k)
        weights = scores.gather(-1, index)
        if self.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
        probabilities = scores / (scores.sum(-1, keepdim=True) + LEAST_SUM)
        return Routes(index, weights * self.scale, logits, probabilities, index)

    def _choice_scores(self, scores: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns the scores [.., E] with the bias, -inf in groups that are not reached."""
        biased = scores if bias is None else scores + bias.to(scores.dtype)
        if self.num_groups == 1:
            return biased
        grouped = biased.unflatten(-1, (self.num_groups, -1))
        largest = grouped.sort(dim=-1, descending=True).values[..., :GROUP_CHOICES].sum(-1)
        reached = torch.zeros_like(largest, dtype=torch.bool)
        reached = reached.scatter(-1, best_experts(largest, self.top_groups), True)
        return grouped.masked_fill(~reached.unsqueeze(-1), -torch.inf).flatten(-2)
