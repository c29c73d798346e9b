"""The loss of a step: a sum over what counts, and how much counts.

    loss = sum over all micro-batches and ranks of total(outputs, batch) / the same sum of count(batch)

The engine owns the one division. A loss that returned a mean would be wrong as soon as two micro-batches, or two ranks,
hold different numbers of valid tokens: a mean of means is not the mean.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

Batch = Mapping[str, torch.Tensor]
IGNORED = -100  # the label of a token that does not count


@dataclass(frozen=True)
class Loss:
    """`total(outputs, batch)` is a scalar sum, `count(batch)` the scalar it is divided by (summed globally first).

    `targets` are the keys of the batch that are not passed to the model. `count` sees the batch before the forward.
    """

    total: Callable[[Any, Batch], torch.Tensor]
    count: Callable[[Batch], torch.Tensor]
    targets: tuple[str, ...] = ("labels",)


def token_cross_entropy() -> Loss:
    """Cross-entropy summed over tokens, labels already aligned with the logits (shifted when the data was made).

    The model's outputs are logits of shape (rows, tokens, vocabulary), or an object with `.logits`. Labels of -100 do
    not count. The sum is taken in float32 at least.
    """
    return Loss(total=_token_total, count=_token_count)


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
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORED, reduction="sum")


def _token_count(batch: Batch) -> torch.Tensor:
    return (batch["labels"] != IGNORED).sum()
