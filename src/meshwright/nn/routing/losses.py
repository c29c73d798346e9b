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

from functools import partial
from typing import NamedTuple

import torch

from meshwright.nn.routing.capacity import group_size, join_groups, split_groups
from meshwright.nn.routing.routes import Routes
from meshwright.nn.whole_samples import WholeSamples


class RouterLosses(NamedTuple):
    """Values [samples] of the losses of one layer: add them up over layers, and weigh them in the loss."""

    load_balancing: torch.Tensor
    z: torch.Tensor


def router_losses(routes: Routes, whole_samples: WholeSamples) -> RouterLosses:
    """Returns the losses of one layer.

    Load balancing: the mean over the groups of each sample; zeros for routings with equal loads. GShard:
    equation of algorithm 1, times E^2. Switch: equation 4, without alpha. DeepSeek-V3: equation 17. The
    z-loss: Zoph et al. 2022, "ST-MoE", arXiv 2202.08906, equation 5.
    """
    load_balancing, z = _load_balancing_by_token(routes, whole_samples), routes.logits.logsumexp(-1).square()
    by_token = torch.stack([load_balancing, z], -1)
    means = whole_samples(partial(torch.mean, dim=1), by_token, per_token=False)
    return RouterLosses(*means.unbind(-1))


def _load_balancing_by_token(routes: Routes, whole_samples: WholeSamples) -> torch.Tensor:
    """Returns the parts [samples, tokens] of the load balancing loss, whose mean it is."""
    probabilities, choices = routes.probabilities, routes.choices
    if choices is None:
        return probabilities.new_zeros(probabilities.shape[:2])
    num_experts = probabilities.shape[-1]
    share = partial(_shares_in_group, routes.group_tokens, num_experts, probabilities.dtype)
    return num_experts * (whole_samples(share, choices) * probabilities).sum(-1)


def _shares_in_group(
    group_tokens: int | str, num_experts: int, dtype: torch.dtype, choices: torch.Tensor
) -> torch.Tensor:
    """Returns for each token the share of its group's `choices` [samples, tokens, c] that each expert has."""
    experts = torch.arange(num_experts, device=choices.device)
    chosen = (choices.unsqueeze(-1) == experts).to(dtype).mean(-2)
    groups = split_groups(chosen, group_size(group_tokens, choices.shape[1]))
    return join_groups(groups.mean(1, keepdim=True).expand_as(groups), choices)
