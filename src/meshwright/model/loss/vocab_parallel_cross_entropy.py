"""Cross-entropy of logits that are sharded along the vocabulary: no rank needs all logits of a token.

    logits of a token     [ vocabulary of rank 0 | vocabulary of rank 1 | vocabulary of rank 2 ]
    rank r computes       a_r = logsumexp of its logits,  t_r = the label's logit, or 0 if it is not local
    one all_gather        a_r and t_r: two numbers per token
    every rank then has   loss = log of the sum of exp(a_r) - sum of t_r

The gradient of a rank's logits, exp(logit - log-sum) less 1 at the label, needs no communication. With label
smoothing e the loss is log-sum - (1 - e) label's logit - e mean logit: a third number per token, the sum over
a rank's logits. Logits are processed a chunk of tokens at a time, in float32 at least: memory for one such
chunk, and in the backward for their gradient.

Paper: Megatron-LM (2019, arXiv:1909.08053), section 3, which exchanges three numbers per token instead.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.plan.job.errors import PlanError
from meshwright.plan.step.chunked_loss_cost import MAX_CHUNK_NUMEL

NUM_TOKEN_STATS = 2  # per token, exchanged by ranks; one more with label smoothing


@dataclass(frozen=True)
class VocabShard:
    """The part of the vocabulary whose logits this rank has: `size` entries from `start` on, of `vocab_size`.

    `all_gather(stats)` returns the `stats` of all ranks, (ranks, *their shape), in vocabulary order; not
    differentiable.
    """

    start: int
    size: int
    vocab_size: int
    all_gather: Callable[[torch.Tensor], torch.Tensor]


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    vocab_shard: VocabShard,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Returns the sum over tokens of weight times cross-entropy: a scalar, the same on every rank.

    Differentiable.

    Args:
        logits: (tokens, vocab_shard.size), of any floating dtype.
        labels: (tokens), vocabulary indices; those of weight 0 may be anything.
        weights: (tokens), floats from 0 up, or whether a token counts.

    Raises PlanError for a label outside of the vocabulary.
    """
    counts = weights != 0
    labels = labels.masked_fill(~counts, 0)
    check_labels(labels, vocab_shard.vocab_size)
    return _CrossEntropy.apply(logits, labels, weights, vocab_shard, label_smoothing)


def check_labels(labels: torch.Tensor, vocab_size: int, ignored: int | None = None) -> None:
    """Raises PlanError for a label outside of the vocabulary that is not `ignored`; labels on an accelerator
    are not looked at, because this would wait for the device.
    """
    if not labels.numel() or labels.device.type != "cpu" or isinstance(labels, FakeTensor):
        return
    labels = labels if ignored is None else labels.masked_fill(labels == ignored, 0)
    min_label, max_label = int(labels.min()), int(labels.max())
    if min_label < 0 or max_label >= vocab_size:
        text = (
            f"labels from {min_label} to {max_label}, and the model has {vocab_size} tokens, numbered from 0"
        )
        raise PlanError(text, fix="correct the labels; -100 leaves a token out", location="batch.labels")


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        vocab_shard: VocabShard,
        label_smoothing: float,
    ) -> torch.Tensor:
        is_local, local_labels = _local_labels(labels, vocab_shard)
        sums = torch.zeros(
            (NUM_TOKEN_STATS + (label_smoothing > 0), len(logits)),
            dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32,
            device=logits.device,
        )
        for chunk in _chunks(logits):
            chunk_logits = logits[chunk].to(sums.dtype)
            sums[1, chunk] = chunk_logits.gather(1, local_labels[chunk, None])[:, 0].masked_fill(
                ~is_local[chunk], 0
            )
            if label_smoothing:
                sums[2, chunk] = chunk_logits.sum(1)
            sums[0, chunk] = chunk_logits.logsumexp(1)
            del chunk_logits  # else the next chunk is allocated before this one is freed
        stats = vocab_shard.all_gather(sums)
        log_sum, totals = stats[:, 0].logsumexp(0), stats[:, 1:].sum(0)
        token_losses = log_sum - (1 - label_smoothing) * totals[0]
        if label_smoothing:
            token_losses -= label_smoothing / vocab_shard.vocab_size * totals[1]
        weights = weights.to(token_losses.dtype)
        ctx.save_for_backward(logits, labels, weights, log_sum)
        ctx.vocab_shard, ctx.smoothing = vocab_shard, label_smoothing
        return torch.where(weights != 0, token_losses * weights, 0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, labels, weights, log_sum = ctx.saved_tensors
        is_local, local_labels = _local_labels(labels, ctx.vocab_shard)
        at_label = is_local.to(log_sum.dtype) * (ctx.smoothing - 1)
        factor = weights * grads[0]
        gradient = torch.empty_like(logits)
        for chunk in _chunks(logits):
            chunk_logits = logits[chunk].to(log_sum.dtype, copy=True).sub_(log_sum[chunk, None]).exp_()
            if ctx.smoothing:
                chunk_logits -= ctx.smoothing / ctx.vocab_shard.vocab_size
            chunk_logits.scatter_add_(1, local_labels[chunk, None], at_label[chunk, None]).mul_(
                factor[chunk, None]
            )
            gradient[chunk] = chunk_logits.masked_fill_(weights[chunk, None] == 0, 0)
            del chunk_logits  # likewise
        return gradient, None, None, None, None


def _local_labels(labels: torch.Tensor, vocab_shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns whether each label is in the shard, and its index there; 0 where it is not."""
    local_labels = labels - vocab_shard.start
    is_local = (local_labels >= 0) & (local_labels < vocab_shard.size)
    return is_local, local_labels.masked_fill(~is_local, 0)


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    """Yields ranges of tokens whose local logits have about MAX_CHUNK_NUMEL elements."""
    size = max(1, MAX_CHUNK_NUMEL // max(1, logits.shape[1]))
    yield from (slice(first, first + size) for first in range(0, len(logits), size))
