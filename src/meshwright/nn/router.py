"""Scores of the experts for each token: a linear layer, in float32 or wider.

A score decides which expert a token goes to, so it gets the digits of float32 where the model computes in
16 bits (Fedus et al. 2021, "selective precision"), and those of float64 in a model of float64.
"""

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.nn.whole_samples import WholeSamples


class Router(nn.Module):
    """A matrix with one row per expert; with `has_choice_bias`, also a buffer for scores that choose.

    `choice_bias` [E] is zero and has no gradient. A routing adds it to scores when it chooses, and not to
    weights. It balances experts without a loss where the strategy `loss_free_balancing` steps it (Wang et al.
    2024, arXiv 2408.15664). A routing compares tokens of a sample with each other by `whole_samples` alone.
    """

    def __init__(self, width: int, num_experts: int, *, has_choice_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.register_buffer("choice_bias", torch.zeros(num_experts) if has_choice_bias else None)
        self.whole_samples = WholeSamples()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights as `nn.Linear` does: uniform within 1 / sqrt(width)."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits [.., E] of `hidden` [.., D]."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return F.linear(hidden.to(dtype), self.weight.to(dtype))
