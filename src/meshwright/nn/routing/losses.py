"""Losses that balance a router, one value per sample.

    load balancing   E sum over experts of f_e P_e      f = share of the choices, before drops; P = mean score
    z-loss           mean over tokens of logsumexp(logits)^2

The first is 1 where all experts have equal loads and scores, and grows where many tokens choose one expert
with high scores; f has no gradient, so it lowers the scores of crowded experts. The second keeps logits
small.

They belong to a sample: means over its tokens, and over its groups. A loss may add their sum over samples,
and has the same value on any number of ranks and microbatches. Over the whole batch f would be another
number: the mean of products is not the product of means (DeepSeek-V3 calls this one sequence-wise).
"""

from typing import NamedTuple

import torch

from meshwright.nn.routing.capacity import split_groups
from meshwright.nn.routing.routes import Routes


class RouterLosses(NamedTuple):
    """Values [samples] of the losses of one layer: add them up over layers, and weigh them in the loss."""

    load_balancing: torch.Tensor
    z: torch.Tensor


def load_balancing_loss(routes: Routes) -> torch.Tensor:
    """Returns the load balancing loss [samples], the mean over the groups of each sample; zeros for routings
    with equal loads.

    GShard: equation of algorithm 1, times E^2. Switch: equation 4, without alpha. DeepSeek-V3: equation 17.
    """
    probabilities, choices = routes.probabilities, routes.choices
    if choices is None:
        return probabilities.new_zeros(len(probabilities))
    num_experts = probabilities.shape[-1]
    experts = torch.arange(num_experts, device=choices.device)
    chosen = (choices.unsqueeze(-1) == experts).to(probabilities.dtype).mean(-2)
    means = (split_groups(each, routes.group_tokens).mean(1) for each in (chosen, probabilities))
    chosen_share, mean_score = means
    of_groups = num_experts * (chosen_share * mean_score).sum(-1)
    return of_groups.view(len(probabilities), -1).mean(1)


def router_z_loss(routes: Routes) -> torch.Tensor:
    """Returns the z-loss [samples] (Zoph et al. 2022, "ST-MoE", arXiv 2202.08906, equation 5)."""
    return routes.logits.logsumexp(-1).square().mean(1)
