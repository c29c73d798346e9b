"""Expert choice: each expert takes the tokens with the highest scores for it, and all the same number.

All experts have equal loads by construction, without a loss and without dropped work, and a token gets as
many experts as want it: hard tokens many, easy ones perhaps none, which then pass by the layer.

    group of 4 tokens    scores of expert a   .9 .2 .7 .1      capacity 2      a takes t0, t2
                         scores of expert b   .1 .8 .3 .9                      b takes t1, t3

    p = softmax(W x) over experts,    expert e takes the C tokens with the largest p_e,    weights = p_e
    C = factor x tokens / experts: `factor` experts per token in the mean

A router that is sure of e has many p_e that round to 1, and rounding must not choose. So tokens are compared
by the logarithm of their odds, which rises with p_e and keeps all digits of the logits z:

    o_e = log(p_e / (1 - p_e)) = z_e - log sum over the other experts of exp(z)

Tokens that repeat at the begin of a sample have equal scores, because causal attention sees nothing else; but
products of other sizes round otherwise. So of tokens whose o_e differ from the C-th largest by no more than
logits are rounded by, e takes the first.

Cost: experts x C rows = factor x tokens, copied once more than by other routings; tokens x experts scores and
indices.
Limits: a token's experts depend on all tokens of its group, also later ones. A language model that predicts
the next token sees its future in training, and cannot be sampled from token by token.
Paper: Zhou et al. 2022, "Mixture-of-Experts with Expert Choice Routing", arXiv 2202.09368 (section 3.2).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from meshwright.nn.router import Router
from meshwright.nn.routing.capacity import (
    GroupRouting,
    check_capacity,
    join_groups,
    split_groups,
)
from meshwright.nn.routing.routes import Routes, best_experts
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.sharding.sequence_sharding import MIN_TOKENS


@dataclass(frozen=True)
class ExpertChoice(GroupRouting):
    """`capacity_factor` experts per token in the mean, in each group of `group_tokens` tokens of a sample
    ("sample": all).
    """

    capacity_factor: float = 2.0

    def diagnostics(self, num_experts: int) -> Iterator[Diagnostic]:
        yield from check_capacity(self.capacity_factor, self.group_tokens)

    def route(self, hidden: torch.Tensor, router: Router) -> Routes:
        logits = router(hidden)
        probabilities = logits.softmax(-1)
        num_experts = logits.shape[-1]
        taken, num_choices = router.whole_samples(self._take, log_odds(logits.detach()))
        experts = torch.arange(num_experts, device=hidden.device)
        index = torch.where(taken, experts, num_experts)
        weights = probabilities.masked_fill(~taken, 0)
        # a rank with one token of a sample runs it twice, and experts may take both
        num_choices = min(max(num_choices, len(index) * MIN_TOKENS * num_experts), index.numel())
        return Routes(index, weights, logits, probabilities, None, self.group_tokens, num_choices)

    def _take(self, scores: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Returns which tokens experts take, [samples, tokens, E], and how many these are together."""
        num_tokens, num_experts = scores.shape[1:]
        size, capacity = self.size_and_capacity(num_tokens, num_experts)
        taken = take_first_of_equals(split_groups(scores, size), capacity)
        return join_groups(taken, scores), len(taken) * num_experts * capacity


def log_odds(logits: torch.Tensor) -> torch.Tensor:
    """Returns log(p / (1 - p)) for p = softmax(`logits` [.., E]), also where p rounds to 1 or to 0."""
    log_p = logits - logits.logsumexp(-1, keepdim=True)
    is_best = torch.arange(logits.shape[-1], device=logits.device) == best_experts(logits, 1)
    others = logits.masked_fill(is_best, -torch.inf).logsumexp(-1, keepdim=True)
    # of the best alone 1 - p may be all rounding: all others have p <= 1/2
    return torch.where(is_best, logits - others, log_p - torch.log1p(-log_p.exp()))


def take_first_of_equals(scores: torch.Tensor, capacity: int) -> torch.Tensor:
    """Returns which tokens have the `capacity` largest of `scores` [groups, tokens, E], which are logarithms
    of odds, as bools of the shape of `scores`: of those within rounding of the last taken, the first ones.
    """
    numbers = torch.finfo(scores.dtype)
    scores = scores.nan_to_num(nan=torch.inf, posinf=numbers.max)  # NaN above all, so that outputs show it
    last = scores.sort(dim=1, descending=True).values[:, capacity - 1 : capacity]
    # below one rounding of 16 bits, whose logits are compared as they are: there many more would be equal
    rounding = min(2**12 * numbers.eps, 2**-16)
    above = scores > last + rounding
    equal = (scores >= last - rounding) & ~above
    free = capacity - above.sum(1, keepdim=True)
    return above | (equal & (equal.cumsum(1) <= free))
