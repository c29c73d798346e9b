"""Top-k: each token goes to the k experts with the highest scores, and none is dropped.

It works because the scores weight what the experts return: an expert that helps a token gets a larger weight,
so the router learns although the choice itself has no gradient. Nothing limits how many tokens choose an
expert, so routes depend on the token alone.

    token     scores           k = 2                  weights, normalized
    t0        .1 .6 .3 .0      experts 1, 2           .67 .33
    t1        .5 .1 .2 .2      experts 0, 2           .71 .29      of equal scores the first counts

    p = softmax(W x),    chosen = the k largest,    w_e = p_e, or normalized p_e / sum of the chosen p

Normalized weights are also the softmax over the chosen logits alone (Mixtral), so one option covers both
orders. A single expert with a normalized weight would always have weight 1, and the router no gradient:
refused.

Cost: tokens x k rows of an expert, sorted by expert; the rows of one expert are as many as chose it. Dropless
training (Gale et al.) is this routing with a product per group of rows: no padding, no capacity.
Limits: one expert may get all tokens. Balance them by a loss (losses.py).
Paper: Shazeer et al. 2017, "Outrageously Large Neural Networks", arXiv 1701.06538 (equations 3 and 5, without
noise); Jiang et al. 2024, "Mixtral of Experts", arXiv 2401.04088; Gale et al. 2022, "MegaBlocks", arXiv
2211.15841.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from meshwright.nn.router import Router
from meshwright.nn.routing.routes import Routes, Routing, best_experts, check_choices
from meshwright.plan.job.errors import Diagnostic


@dataclass(frozen=True)
class TopK(Routing):
    """The `k` best experts; with `normalized`, their weights sum to 1."""

    k: int = 2
    normalized: bool = True

    def diagnostics(self, num_experts: int) -> Iterator[Diagnostic]:
        yield from check_choices(self.k, num_experts)
        if self.k == 1 and self.normalized:
            text = "one expert with a normalized weight always has weight 1: the router would learn nothing"
            yield Diagnostic(text, "set normalized = False, or k = 2", "routing.normalized")

    def route(self, hidden: torch.Tensor, router: Router) -> Routes:
        logits = router(hidden)
        probabilities = logits.softmax(-1)
        index = best_experts(probabilities, self.k)
        weights = (logits if self.normalized else probabilities).gather(-1, index)
        weights = weights.softmax(-1) if self.normalized else weights
        return Routes(index, weights, logits, probabilities, index)
