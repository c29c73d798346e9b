"""Cross-entropy where each rank has the logits of some words: no rank ever sees all of a token's.

    logits of a token     [ words of rank 0 | words of rank 1 | words of rank 2 ]
    rank r finds          a_r = log of the sum of exp over its words,  t_r = the label's logit, or 0 if that is not here
    they tell each other  a_r and t_r: two numbers per token, in one all_gather
    every rank then has   loss = log of the sum of exp(a_r) - sum of t_r

The gradient of a rank's logits, exp(logit - log-sum) less 1 at the label, needs nothing from anybody. With label smoothing e the
loss is log-sum - (1 - e) label's logit - e mean logit: a third number per token, the sum over a rank's words.

Logits are looked at some tokens at a time, in float32 at least: beside them there is one such piece in that width, and in the
backward their gradient.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.core.errors import PlanError
from meshwright.core.pieces import PIECE

NUMBERS = 2  # of each token, that ranks tell each other; with label smoothing one more


@dataclass(frozen=True)
class Words:
    """Which words this rank has the logits of: `count` from `first` on, of `total`.

    `told(numbers)` are the `numbers` of all ranks, (ranks, *their shape), in the order of the words; no gradient passes.
    """

    first: int
    count: int
    total: int
    told: Callable[[torch.Tensor], torch.Tensor]


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, words: Words, smoothing: float = 0.0
) -> torch.Tensor:
    """The sum over tokens of weight times cross-entropy: a scalar, the same on every rank. Differentiable.

    Args:
        logits: (tokens, words.count), of any floating dtype.
        labels: (tokens), numbers of words; those of weight 0 may be anything.
        weights: (tokens), floats from 0 up, or whether a token counts.

    Raises PlanError for a label that is no word.
    """
    counts = weights != 0
    labels = labels.masked_fill(~counts, 0)
    if labels.numel() and labels.device.type == "cpu":  # elsewhere it would stop the device to look
        least, most = int(labels.min()), int(labels.max())
        if least < 0 or most >= words.total:
            text = f"labels from {least} to {most}, and the model has {words.total} words, numbered from 0"
            raise PlanError(text, fix="correct the labels; -100 leaves a token out", where="batch.labels")
    return _CrossEntropy.apply(logits, labels, weights, words, smoothing)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, words: Words, smoothing: float
    ) -> torch.Tensor:
        here, places = _places(labels, words)
        sums = torch.zeros(
            (NUMBERS + (smoothing > 0), len(logits)),
            dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32,
            device=logits.device,
        )
        for some in _pieces(logits):
            piece = logits[some].to(sums.dtype)
            sums[1, some] = piece.gather(1, places[some, None])[:, 0].masked_fill(~here[some], 0)
            if smoothing:
                sums[2, some] = piece.sum(1)
            sums[0, some] = piece.logsumexp(1)
            del piece  # or the next one is made beside it
        told = words.told(sums)
        log_sum, others = told[:, 0].logsumexp(0), told[:, 1:].sum(0)
        each = log_sum - (1 - smoothing) * others[0]
        if smoothing:
            each -= smoothing / words.total * others[1]
        weights = weights.to(each.dtype)
        ctx.save_for_backward(logits, labels, weights, log_sum)
        ctx.words, ctx.smoothing = words, smoothing
        return torch.where(weights != 0, each * weights, 0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, labels, weights, log_sum = ctx.saved_tensors
        here, places = _places(labels, ctx.words)
        at_label = here.to(log_sum.dtype) * (ctx.smoothing - 1)
        factor = weights * grads[0]
        gradient = torch.empty_like(logits)
        for some in _pieces(logits):
            piece = logits[some].to(log_sum.dtype, copy=True).sub_(log_sum[some, None]).exp_()
            if ctx.smoothing:
                piece -= ctx.smoothing / ctx.words.total
            piece.scatter_add_(1, places[some, None], at_label[some, None]).mul_(factor[some, None])
            gradient[some] = piece.masked_fill_(weights[some, None] == 0, 0)
            del piece  # likewise
        return gradient, None, None, None, None


def _places(labels: torch.Tensor, words: Words) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each label is among the words here, and at which place; 0 where it is not."""
    places = labels - words.first
    here = (places >= 0) & (places < words.count)
    return here, places.masked_fill(~here, 0)


def _pieces(logits: torch.Tensor) -> Iterator[slice]:
    """Some tokens after others, so that a piece of their logits has about PIECE elements."""
    size = max(1, PIECE // max(1, logits.shape[1]))
    yield from (slice(first, first + size) for first in range(0, len(logits), size))
