"""The loss of a step: a sum over what counts, and how much counts.

    loss = sum over all micro-batches and ranks of total(outputs, batch) / the same sum of count(batch)

The engine owns the one division. A loss that returned a mean would be wrong as soon as two micro-batches, or
two ranks, hold different numbers of valid tokens: a mean of means is not the mean.

A loss that is no sum over rows (contrastive: each row is compared with all others) says `whole_batch`. The
outputs and targets of all ranks then meet, in the order of the global batch, and `total` sees all rows at
once on every rank.

A loss of logits may say how it is taken where each rank has the logits of some words only: `split`
(engine/logits.py).

Cross-entropy where each rank has the logits of some words: no rank ever sees all of a token's.

    logits of a token     [ words of rank 0 | words of rank 1 | words of rank 2 ]
    rank r finds          a_r = log of the sum of exp over its words,  t_r = the label's logit, or 0 if that is not here
    they tell each other  a_r and t_r: two numbers per token, in one all_gather
    every rank then has   loss = log of the sum of exp(a_r) - sum of t_r

The gradient of a rank's logits, exp(logit - log-sum) less 1 at the label, needs nothing from anybody. With
label smoothing e the loss is log-sum - (1 - e) label's logit - e mean logit: a third number per token, the
sum over a rank's words.

Logits are looked at some tokens at a time, in float32 at least: beside them there is one such piece in that
width, and in the backward their gradient.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from meshwright.model.blocks.loss_inputs import LossSpec
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.step.chunked_loss import MAX_CHUNK_NUMEL

NUM_TOKEN_STATS = 2  # of each token, that ranks tell each other; with label smoothing one more


@dataclass(frozen=True)
class VocabShard:
    """Which words this rank has the logits of: `count` from `first` on, of `total`.

    `told(numbers)` are the `numbers` of all ranks, (ranks, *their shape), in the order of the words; no
    gradient passes.
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
        if least < 0 or most >= vocab_shard.vocab_size:
            text = (
                f"labels from {least} to {most}, and the model has {vocab_shard.vocab_size} words, "
                "numbered from 0"
            )
            raise PlanError(text, fix="correct the labels; -100 leaves a token out", location="batch.labels")
    return _CrossEntropy.apply(logits, labels, weights, vocab_shard, label_smoothing)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        words: VocabShard,
        smoothing: float,
    ) -> torch.Tensor:
        here, places = _places(labels, words)
        sums = torch.zeros(
            (NUM_TOKEN_STATS + (smoothing > 0), len(logits)),
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
        told = words.all_gather(sums)
        log_sum, others = told[:, 0].logsumexp(0), told[:, 1:].sum(0)
        each = log_sum - (1 - smoothing) * others[0]
        if smoothing:
            each -= smoothing / words.vocab_size * others[1]
        weights = weights.to(each.dtype)
        ctx.save_for_backward(logits, labels, weights, log_sum)
        ctx.cells, ctx.smoothing = words, smoothing
        return torch.where(weights != 0, each * weights, 0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, labels, weights, log_sum = ctx.saved_tensors
        here, places = _places(labels, ctx.cells)
        at_label = here.to(log_sum.dtype) * (ctx.smoothing - 1)
        factor = weights * grads[0]
        gradient = torch.empty_like(logits)
        for some in _pieces(logits):
            piece = logits[some].to(log_sum.dtype, copy=True).sub_(log_sum[some, None]).exp_()
            if ctx.smoothing:
                piece -= ctx.smoothing / ctx.cells.total
            piece.scatter_add_(1, places[some, None], at_label[some, None]).mul_(factor[some, None])
            gradient[some] = piece.masked_fill_(weights[some, None] == 0, 0)
            del piece  # likewise
        return gradient, None, None, None, None


def _places(labels: torch.Tensor, words: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each label is among the words here, and at which place; 0 where it is not."""
    places = labels - words.start
    here = (places >= 0) & (places < words.size)
    return here, places.masked_fill(~here, 0)


def _pieces(logits: torch.Tensor) -> Iterator[slice]:
    """Some tokens after others, so that a piece of their logits has about PIECE elements."""
    size = max(1, MAX_CHUNK_NUMEL // max(1, logits.shape[1]))
    yield from (slice(first, first + size) for first in range(0, len(logits), size))


Batch = Mapping[str, torch.Tensor]
IGNORE_INDEX = -100  # the label of a token that does not count
LOSS_WEIGHTS_KEY = "loss_weights"
SAME_LOSS_FIX = "pass the same loss to read(...) and to build(...) or verify(...)"


@dataclass(frozen=True)
class VocabParallelLoss:
    """How a loss is taken on logits of some words.

    `logits(outputs)` are those that it takes, words along the last dim; `total(outputs, batch, words)` is the
    sum that `Loss.total` is on logits of all words, the same on every rank. Of each token the ranks tell each
    other so many `numbers`, by one call of `words.told`.
    """

    logits: Callable[[Any], torch.Tensor]
    total: Callable[[Any, Batch, VocabShard], torch.Tensor]
    num_token_stats: int


@dataclass(frozen=True)
class Loss:
    """`total(outputs, batch)` is a scalar sum, `count(batch)` the scalar it is divided by (summed globally first).

    `targets` are the keys of the batch that are not passed to the model. `count` sees the batch before the
    forward, and is a sum over rows, whole numbers or not, never below 0. `tokens(batch)` is what metrics call
    tokens; None where that is the count. With `whole_batch`, `total` gets the outputs of all rows of the
    global batch, and of the batch its targets. `split` is how it is taken on logits of some words; None: it
    needs those of all. `by_token`: what comes out for some of the tokens, and the same of the targets, gives
    their part of it. `per_token`: it is the mean surprise of a token, and its exponential a perplexity.
    """

    total: Callable[[Any, Batch], torch.Tensor]
    count: Callable[[Batch], torch.Tensor]
    targets: tuple[str, ...] = ("labels",)
    count_tokens: Callable[[Batch], torch.Tensor | None] = lambda batch: None
    whole_batch: bool = False
    vocab_parallel: VocabParallelLoss | None = None
    is_token_sum: bool = False
    is_token_nll: bool = False

    def wrap_total(
        self, wrap: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]
    ) -> "Loss":
        """This loss with its totals as `wrap` changes them."""
        split = (
            None
            if self.vocab_parallel is None
            else replace(self.vocab_parallel, total=wrap(self.vocab_parallel.total))
        )
        return replace(self, total=wrap(self.total), vocab_parallel=split)

    def model_inputs(self, batch: Batch) -> Batch:
        """What of `batch` is passed to the model: all but the targets."""
        return {key: value for key, value in batch.items() if key not in self.targets}

    def count_weight_and_tokens(self, batch: Batch) -> tuple[float, float]:
        """What these rows weigh, and how many tokens they are.

        Raises PlanError for a weight below 0 or not finite, and when `count` asks for a key that the batch
        does not have.
        """
        try:
            weight = float(self.count(batch))
        except KeyError as error:
            text = f"Loss.count reads {error} of the batch, which holds {', '.join(batch) or 'nothing'}"
            fix = "give the batch that key, or pass a loss of your own: Model(loss=...)"
            raise PlanError(text, fix=fix, location="loss") from error
        if not 0 <= weight < inf:
            text = f"the rows of this step weigh {weight}; needed is a number from 0 up"
            raise PlanError(text, fix="correct Loss.count, or the loss_weights of the batch", location="loss")
        tokens = self.count_tokens(batch)
        return weight, weight if tokens is None else float(tokens)


def token_cross_entropy(label_smoothing: float = 0.0) -> Loss:
    """Cross-entropy summed over tokens, labels already aligned with the logits (shifted when the data was made).

    The model's outputs are logits of shape (rows, tokens, vocabulary), or an object with `.logits`. Labels of
    -100 do not count. The sum is taken in float32 at least. With `label_smoothing` e the target is 1 - e on
    the label, and e spread evenly over all words.

    A batch may hold `loss_weights` (rows, tokens), floats from 0 up: each token's loss is multiplied by its
    weight, and the loss is divided by the sum of the weights of all labels that count. Metrics still count
    tokens, whatever they weigh.

    Raises PlanError for a `label_smoothing` outside of 0 to 1.
    """
    if not 0 <= label_smoothing <= 1:
        text = f"label_smoothing = {label_smoothing}"
        raise PlanError(
            text, fix="write a number from 0, the label alone, to 1, all words alike", location="loss"
        )
    smooth = label_smoothing > 0
    split = VocabParallelLoss(
        get_logits, partial(_split_total, smoothing=label_smoothing), NUM_TOKEN_STATS + smooth
    )
    total = partial(_token_total, smoothing=label_smoothing)
    targets = ("labels", LOSS_WEIGHTS_KEY)
    return Loss(
        total,
        _token_count,
        targets,
        _tokens_if_weighted,
        vocab_parallel=split,
        is_token_sum=True,
        is_token_nll=not smooth,
    )


def check_loss(plan: Plan, loss: Loss) -> None:
    """Raise PlanError when `loss` is not of the kind that `plan` was made for."""
    if loss.whole_batch != plan.model_spec.needs_global_batch:
        kinds = {True: "one of the whole batch", False: "a sum over rows"}
        text = (
            f"the loss is {kinds[loss.whole_batch]}, and the plan was made for "
            f"{kinds[plan.model_spec.needs_global_batch]}"
        )
        raise PlanError(text, fix=SAME_LOSS_FIX, location="loss")
    logits = plan.model_spec.logits
    if (
        plan.sharding.logits_layout.placements
        and logits is not None
        and (loss.vocab_parallel is None or loss.vocab_parallel.num_token_stats != logits.num_reduced_values)
    ):
        what = (
            "needs whole logits"
            if loss.vocab_parallel is None
            else f"tells {loss.vocab_parallel.num_token_stats} numbers of a token"
        )
        text = (
            f"the loss {what}, and the plan divides them by words and has {logits.num_reduced_values} "
            "numbers of a token told"
        )
        raise PlanError(text, fix=SAME_LOSS_FIX, location="loss")


def empty_loss_error(where: str) -> PlanError:
    """What to raise when no row counts anywhere; `where` says of what, "of the 12 samples"."""
    fix = "check how labels are made: -100 leaves a token out, and so does a loss weight of 0"
    return PlanError(f"nothing counts in any {where}: the loss is undefined", fix=fix, location="data")


def make_loss_spec(loss: Loss) -> LossSpec:
    """`loss` as the reading of a model tries it out."""
    if loss.vocab_parallel is None:
        return LossSpec(loss.total, loss.targets, loss.whole_batch, is_token_sum=loss.is_token_sum)
    split = loss.vocab_parallel.logits, loss.vocab_parallel.num_token_stats
    return LossSpec(loss.total, loss.targets, loss.whole_batch, *split, is_token_sum=loss.is_token_sum)


def get_logits(outputs: Any) -> torch.Tensor:
    """The logits among a model's outputs: the tensor itself, the first of a tuple, or `.logits`."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, (tuple, list)):
        return outputs[0]
    return outputs["logits"]


def _token_total(outputs: Any, batch: Batch, smoothing: float) -> torch.Tensor:
    logits = get_logits(outputs)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    flat, labels = logits.reshape(-1, logits.shape[-1]), batch["labels"].reshape(-1)
    taken = partial(F.cross_entropy, flat, labels, ignore_index=IGNORE_INDEX, label_smoothing=smoothing)
    if LOSS_WEIGHTS_KEY in batch:
        each = taken(reduction="none")
        return (each * _weights(batch).reshape(-1).to(each.dtype)).sum()
    return taken(reduction="sum")


def _split_total(outputs: Any, batch: Batch, words: VocabShard, smoothing: float) -> torch.Tensor:
    logits, labels = get_logits(outputs), batch["labels"].reshape(-1)
    weights = _weights(batch) if LOSS_WEIGHTS_KEY in batch else (batch["labels"] != IGNORE_INDEX)
    return vocab_parallel_cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels, weights.reshape(-1), words, smoothing
    )


def _token_count(batch: Batch) -> torch.Tensor:
    if LOSS_WEIGHTS_KEY not in batch:
        return (batch["labels"] != IGNORE_INDEX).sum()
    weights = _weights(batch)
    if (weights < 0).any():
        text = (
            f"loss_weights from {weights.min().item():g} up; a weight below 0 would train towards a "
            "higher loss"
        )
        raise PlanError(
            text, fix="give weights from 0 up; 0 leaves a token out", location="batch.loss_weights"
        )
    return weights.double().sum()


def _tokens_if_weighted(batch: Batch) -> torch.Tensor | None:
    return (batch["labels"] != IGNORE_INDEX).sum() if LOSS_WEIGHTS_KEY in batch else None


def _weights(batch: Batch) -> torch.Tensor:
    """The weights of the labels that count, and 0 for the others.

    Raises PlanError when they do not fit the labels.
    """
    labels, weights = batch["labels"], batch[LOSS_WEIGHTS_KEY]
    if weights.shape != labels.shape:
        text = f"loss_weights of shape {list(weights.shape)} beside labels of shape {list(labels.shape)}"
        raise PlanError(text, fix="give one weight per label: (rows, tokens)", location="batch.loss_weights")
    return torch.where(labels != IGNORE_INDEX, weights, 0)
