"""Switch: each token goes to its best expert alone, while that has room.

One expert per token halves the work and the messages of two, and still trains: the score weights what the
expert returns, so the router has a gradient. Noise on the router's input makes it try experts that it would
not choose. A token whose expert is full passes by the layer.

    group of 6 tokens, 3 experts, factor 1: capacity 2
    choices   a a b a c a        served  a a b - c -

    p = softmax(W (x * u)), u uniform in [1 - eps, 1 + eps],    w = p_e of the largest,    y = w expert_e(x)
    capacity = factor x tokens / experts

The experts get x without noise. In evaluation there is none.

Cost: at most `tokens` rows, and tokens x experts integers for the places.
Limits: places follow the order of tokens, so a token's expert depends on the tokens before it in its group.
Paper: Fedus et al. 2021, "Switch Transformers", arXiv 2101.03961 (section 2.2; input jitter and input dropout
in appendix C).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.nn.router import Router
from meshwright.nn.routing.capacity import (
    GroupRouting,
    Priority,
    check_capacity,
    draw_priority,
    join_groups,
    places_in_experts,
    split_groups,
)
from meshwright.nn.routing.routes import Routes, best_experts
from meshwright.plan.job.errors import Diagnostic, suggest_name

NOISES = ("jitter", "dropout")


@dataclass(frozen=True)
class Switch(GroupRouting):
    """One expert, with capacity in each group of `group_tokens` tokens of a sample ("sample": all).

    In training the router's input is multiplied by uniform numbers within `noise_size` of 1 (the `noise`
    "jitter"), or each of its elements is dropped with that probability ("dropout"); 0: no noise. With the
    `priority` "random", tokens of a group are served in random order in training.
    """

    capacity_factor: float = 1.25
    noise_size: float = 0.01
    noise: Literal["jitter", "dropout"] = "jitter"
    priority: Priority = "order"

    def diagnostics(self, num_experts: int) -> Iterator[Diagnostic]:
        yield from check_capacity(self.capacity_factor, self.group_tokens, self.priority)
        if self.noise not in NOISES:
            text = f"the noise of the router's input is {self.noise!r}"
            yield Diagnostic(text, suggest_name(str(self.noise), NOISES), "routing.noise")
        if not isinstance(self.noise_size, (int, float)) or not 0 <= self.noise_size < 1:
            text = f"noise_size is {self.noise_size!r}; needed is a number from 0 up to below 1"
            yield Diagnostic(text, "set noise_size = 0.01", "routing.noise_size")

    def route(self, hidden: torch.Tensor, router: Router) -> Routes:
        logits = router(self._add_noise(hidden) if router.training and self.noise_size else hidden)
        probabilities = logits.softmax(-1)
        num_experts = logits.shape[-1]
        choices = best_experts(probabilities, 1)
        priority = draw_priority(self.priority if router.training else "order", hidden)
        kept = router.whole_samples(partial(self._have_room, num_experts), choices, *priority)
        weights = probabilities.gather(-1, choices)
        # a token with scores that are not finite is not dropped, so it is seen
        dropped = ~kept & weights.isfinite()
        index, weights = choices.masked_fill(dropped, num_experts), weights.masked_fill(dropped, 0)
        return Routes(index, weights, logits, probabilities, choices, self.group_tokens)

    def _have_room(
        self, num_experts: int, choices: torch.Tensor, priority: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns which of `choices` [samples, tokens, 1] have a place."""
        size, capacity = self.size_and_capacity(choices.shape[1], num_experts)
        priority = None if priority is None else split_groups(priority, size)
        places, _ = places_in_experts(split_groups(choices.squeeze(-1), size), num_experts, priority=priority)
        return join_groups(places < capacity, choices).unsqueeze(-1)

    def _add_noise(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.noise == "dropout":
            return F.dropout(hidden, self.noise_size)
        dtype = torch.promote_types(hidden.dtype, torch.float32)  # 1 + 0.001 is 1 in bfloat16
        drawn = torch.rand_like(hidden, dtype=dtype)
        return hidden * (1 + self.noise_size * (2 * drawn - 1))
