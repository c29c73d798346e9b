"""The loss of a step: a sum over what counts, and how much counts.

    loss = sum over all micro-batches and ranks of total(outputs, batch) / the same sum of count(batch)

The engine owns the one division. A loss that returned a mean would be wrong as soon as two micro-batches, or two ranks,
hold different numbers of valid tokens: a mean of means is not the mean.

A loss that is no sum over rows (contrastive: each row is compared with all others) says `whole_batch`. The outputs and
targets of all ranks then meet, in the order of the global batch, and `total` sees all rows at once on every rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.model.handed import Judge

Batch = Mapping[str, torch.Tensor]
IGNORED = -100  # the label of a token that does not count
WEIGHTS = "loss_weights"


@dataclass(frozen=True)
class Loss:
    """`total(outputs, batch)` is a scalar sum, `count(batch)` the scalar it is divided by (summed globally first).

    `targets` are the keys of the batch that are not passed to the model. `count` sees the batch before the forward, and is
    a sum over rows, whole numbers or not, never below 0. `tokens(batch)` is what metrics call tokens; None where that is
    the count. With `whole_batch`, `total` gets the outputs of all rows of the global batch, and of the batch its targets.
    """

    total: Callable[[Any, Batch], torch.Tensor]
    count: Callable[[Batch], torch.Tensor]
    targets: tuple[str, ...] = ("labels",)
    tokens: Callable[[Batch], torch.Tensor | None] = lambda batch: None
    whole_batch: bool = False

    def counted(self, batch: Batch) -> tuple[float, float]:
        """What these rows weigh, and how many tokens they are.

        Raises PlanError for a weight below 0 or not finite, and when `count` asks for a key that the batch does not have.
        """
        try:
            weight = float(self.count(batch))
        except KeyError as error:
            text = f"Loss.count reads {error} of the batch, which holds {', '.join(batch) or 'nothing'}"
            fix = "give the batch that key, or pass a loss of your own: Model(loss=...)"
            raise PlanError(text, fix=fix, where="loss") from error
        if not 0 <= weight < inf:
            text = f"the rows of this step weigh {weight}; needed is a number from 0 up"
            raise PlanError(text, fix="correct Loss.count, or the loss_weights of the batch", where="loss")
        tokens = self.tokens(batch)
        return weight, weight if tokens is None else float(tokens)


def token_cross_entropy() -> Loss:
    """Cross-entropy summed over tokens, labels already aligned with the logits (shifted when the data was made).

    The model's outputs are logits of shape (rows, tokens, vocabulary), or an object with `.logits`. Labels of -100 do
    not count. The sum is taken in float32 at least.

    A batch may hold `loss_weights` (rows, tokens), floats from 0 up: each token's loss is multiplied by its weight, and the
    loss is divided by the sum of the weights of all labels that count. Metrics still count tokens, whatever they weigh.
    """
    return Loss(total=_token_total, count=_token_count, targets=("labels", WEIGHTS), tokens=_tokens_if_weighted)


def check_loss(plan: Plan, loss: Loss) -> None:
    """Raise PlanError when `loss` is not of the kind that `plan` was made for."""
    if loss.whole_batch != plan.anatomy.whole_batch:
        kinds = {True: "one of the whole batch", False: "a sum over rows"}
        text = f"the loss is {kinds[loss.whole_batch]}, and the plan was made for {kinds[plan.anatomy.whole_batch]}"
        raise PlanError(text, fix="pass the same loss to read(...) and to build(...) or verify(...)", where="loss")


def nothing_counts(where: str) -> PlanError:
    """What to raise when no row counts anywhere; `where` says of what, "of the 12 samples"."""
    fix = "check how labels are made: -100 leaves a token out, and so does a loss weight of 0"
    return PlanError(f"nothing counts in any {where}: the loss is undefined", fix=fix, where="data")


def judge_of(loss: Loss) -> Judge:
    """`loss` as the reading of a model tries it out."""
    return Judge(loss.total, loss.targets, loss.whole_batch)


def logits_of(outputs: Any) -> torch.Tensor:
    """The logits among a model's outputs: the tensor itself, the first of a tuple, or `.logits`."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, (tuple, list)):
        return outputs[0]
    return outputs["logits"]


def _token_total(outputs: Any, batch: Batch) -> torch.Tensor:
    logits = logits_of(outputs)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    labels = batch["labels"]
    if WEIGHTS in batch:
        each = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORED, reduction="none")
        return (each * _weights(batch).reshape(-1).to(each.dtype)).sum()
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORED, reduction="sum")


def _token_count(batch: Batch) -> torch.Tensor:
    if WEIGHTS not in batch:
        return (batch["labels"] != IGNORED).sum()
    weights = _weights(batch)
    if (weights < 0).any():
        text = f"loss_weights from {weights.min().item():g} up; a weight below 0 would train towards a higher loss"
        raise PlanError(text, fix="give weights from 0 up; 0 leaves a token out", where="batch.loss_weights")
    return weights.double().sum()


def _tokens_if_weighted(batch: Batch) -> torch.Tensor | None:
    return (batch["labels"] != IGNORED).sum() if WEIGHTS in batch else None


def _weights(batch: Batch) -> torch.Tensor:
    """The weights of the labels that count, and 0 for the others. Raises PlanError when they do not fit the labels."""
    labels, weights = batch["labels"], batch[WEIGHTS]
    if weights.shape != labels.shape:
        text = f"loss_weights of shape {list(weights.shape)} beside labels of shape {list(labels.shape)}"
        raise PlanError(text, fix="give one weight per label: (rows, tokens)", where="batch.loss_weights")
    return torch.where(labels != IGNORED, weights, 0)
