"""What a routing returns, and the interface of a routing.

A routing is a value with options. Each token's choice must be the same under every plan, so a routing

    - reads nothing but the tokens of one sample, because other samples may be on other ranks; and other
      tokens than the own one only by `router.whole_samples`, because these may be on other ranks too;
    - breaks ties by order (stable sorts): a kernel that picks any of equals may pick another for other sizes;
    - draws random numbers like a tensor [samples, tokens, ..] (`torch.rand_like`), which a plan gives each
      token alike wherever it runs.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from meshwright.nn.router import Router
from meshwright.plan.job.errors import Diagnostic


@dataclass(frozen=True)
class Routes:
    """The routes of all tokens. S samples, T tokens of each, E experts.

    `index` [S, T, k] are experts, E for none; `weights` [S, T, k] belong to them. `logits` and
    `probabilities` [S, T, E] are the scores, where each row of the second sums to 1. `choices` [S, T, c] are
    the experts that count for load balancing, before any was dropped; None where experts have equal loads.
    `group_tokens` tokens share a capacity and a load, or all of a sample ("sample"). At most `num_choices` of
    `index` are experts, where the routing limits their number.
    """

    index: torch.Tensor
    weights: torch.Tensor
    logits: torch.Tensor
    probabilities: torch.Tensor
    choices: torch.Tensor | None
    group_tokens: int | str = "sample"
    num_choices: int | None = None


class Routing(ABC):
    """Which experts a token goes to. Subclasses are frozen dataclasses; their fields are the options."""

    has_choice_bias: ClassVar[bool] = False

    @abstractmethod
    def diagnostics(self, num_experts: int) -> Iterator[Diagnostic]:
        """Yields what is wrong with the options for `num_experts`."""

    @abstractmethod
    def route(self, hidden: torch.Tensor, router: Router) -> Routes:
        """Returns the routes of `hidden` [samples, tokens, D]; `router.training` says whether to draw."""


def best_experts(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Returns the indices [.., k] of the highest `scores` [.., E], falling; equal ones in their order."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def check_choices(k: int, num_experts: int) -> Iterator[Diagnostic]:
    """Yields a diagnostic if no `k` of `num_experts` can be chosen."""
    if not isinstance(k, int) or not 1 <= k <= num_experts:
        text = f"each token chooses k = {k!r} of {num_experts} experts; needed is 1 <= k <= num_experts"
        yield Diagnostic(text, f"set k = {min(2, num_experts)}, or more experts", "routing.k")
