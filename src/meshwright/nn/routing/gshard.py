"""GShard: each token goes to its best expert, and by chance to its second, while these have room.

A capacity per expert and group of tokens gives every expert the same number of places, so shapes are fixed
and no device waits for a crowded one. A second expert of small weight adds little: it is taken with a
probability of twice its weight, which leaves room for tokens that need it more. All first choices of a group
are served before any second one.

    group of 4 tokens, capacity 2        first choices   a a b a      served a a b -
                                         second choices  b b a b      places 1, 2 of b; a is full

    g1, g2 = the two largest of softmax(W x),    w1 = g1 / (g1 + g2),    w2 = g2 / (g1 + g2)
    second taken if 2 w2 > u for u uniform in [0, 1),    capacity = factor x tokens / experts

A token keeps w1 where its second expert is not taken, and is dropped (it passes by the layer) where both are
full. A second choice that is not taken by chance still counts a place, as in the paper's algorithm.
Evaluation takes the second expert wherever there is room.

Cost: at most 2 x tokens rows, and tokens x experts integers for the places.
Limits: places follow the order of tokens, so a token's experts depend on the tokens before it in its group.
Paper: Lepikhin et al. 2020, "GShard", arXiv 2006.16668 (algorithm 1; its auxiliary loss times E^2 is
`RouterLosses.load_balancing`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

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
from meshwright.plan.job.errors import Diagnostic


@dataclass(frozen=True)
class GShard(GroupRouting):
    """Two experts, with capacity in each group of `group_tokens` tokens of a sample ("sample": all).

    With the `priority` "random", tokens of a group are served in random order in training.
    """

    capacity_factor: float = 2.0
    priority: Priority = "order"

    def diagnostics(self, num_experts: int) -> Iterator[Diagnostic]:
        yield from check_capacity(self.capacity_factor, self.group_tokens, self.priority)
        if isinstance(num_experts, int) and num_experts < 2:
            text = f"each token chooses 2 of {num_experts} experts"
            yield Diagnostic(
                text, "set num_experts = 2 or more, or take TopK(1, normalized=False)", "num_experts"
            )

    def route(self, hidden: torch.Tensor, router: Router) -> Routes:
        logits = router(hidden)
        probabilities = logits.softmax(-1)
        num_experts = logits.shape[-1]
        choices = best_experts(probabilities, 2)
        weights = logits.gather(-1, choices).softmax(-1)
        priority = draw_priority(self.priority if router.training else "order", hidden)
        kept = router.whole_samples(partial(self._have_room, num_experts), choices, *priority)
        if router.training:
            twice = 2 * weights[..., 1].detach()
            first_kept, second_kept = kept.unbind(-1)
            kept = torch.stack([first_kept, second_kept & (twice > torch.rand_like(twice))], -1)
        kept = kept | ~weights.isfinite()  # a token with such scores is not dropped, so it is seen
        index, weights = choices.masked_fill(~kept, num_experts), weights.masked_fill(~kept, 0)
        return Routes(index, weights, logits, probabilities, choices[..., :1], self.group_tokens)

    def _have_room(
        self, num_experts: int, choices: torch.Tensor, priority: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns which of `choices` [samples, tokens, 2] have a place."""
        size, capacity = self.size_and_capacity(choices.shape[1], num_experts)
        first, second = split_groups(choices, size).unbind(-1)
        priority = None if priority is None else split_groups(priority, size)
        first_places, num_first = places_in_experts(first, num_experts, priority=priority)
        second_places, _ = places_in_experts(second, num_experts, num_first, priority)
        return join_groups(torch.stack([first_places, second_places], -1) < capacity, choices)
