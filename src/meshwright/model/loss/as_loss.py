"""Turns what a user passes as a loss into a `Loss`, and checks that it is a sum over samples.

    nn.CrossEntropyLoss(label_smoothing=0.1)   token_cross_entropy with its label smoothing and ignored label
    F.cross_entropy                            token_cross_entropy
    model.loss_function                        the loss that the model computes itself (model_loss.py)

A mean in place of a sum is a silent fault: the engine divides it by the count once more, so that gradients
are too small by the number of tokens. So the total of a few samples is compared with the totals of their
parts, on random outputs of the shapes that the trial found:

    sum     total(a, b, c) = total(a) + total(b, c)
    mean    total(a, b, c) is about half of that
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from meshwright.model.loss.loss_definition import Batch, Loss
from meshwright.model.loss.token_cross_entropy import LABELS_KEY, token_cross_entropy
from meshwright.model.tensors.pytree import map_leaves, tree_tensors
from meshwright.plan.job.errors import PlanError

LossInput = Loss | nn.CrossEntropyLoss | Callable[..., torch.Tensor]
MAX_CHECKED_TOKENS = 8  # of a sequence; random logits of all would take the memory of a step
MAX_CHECKED_NUMEL = 1 << 24
SUM_TOLERANCE = 1e-3
SUM_FIX = "return meshwright.Loss(total=..., count=...): a sum over what counts, and how much counts"


def as_loss(given: object) -> Loss | None:
    """Returns `given` as a `Loss`; None where the model's own loss is meant.

    Raises PlanError for anything that cannot be stated as a sum and a count.
    """
    if given is None or isinstance(given, Loss):
        return given
    if given is F.cross_entropy:
        return token_cross_entropy()
    if isinstance(given, nn.CrossEntropyLoss):
        if given.weight is not None or given.reduction != "mean":
            text = f"{given} with weight or reduction='{given.reduction}'"
            fix = "leave reduction at 'mean', and pass weights of tokens as loss_weights in the batch"
            raise PlanError(text, fix=fix, location="loss")
        return token_cross_entropy(given.label_smoothing, ignore_index=given.ignore_index)
    if callable(given) and str(given.__module__).startswith("transformers.loss"):
        return None
    fix = f"{SUM_FIX}; for cross-entropy loss=meshwright.token_cross_entropy() or nn.CrossEntropyLoss()"
    raise PlanError(f"the loss is a {type(given).__name__}", fix=fix, location="loss")


def check_is_sum(loss: Loss, batch: Batch, outputs: Any) -> None:
    """Raises PlanError if the total of `loss` over the samples of a batch is not the sum over its parts.

    `outputs` have the shapes of the model's outputs for `batch`. A loss that cannot be computed of random
    outputs is not checked.
    """
    num_samples, length = len(next(iter(batch.values()))), _num_tokens(batch)
    tensors = tree_tensors(outputs)
    # an output without rows of samples may be a sum over them
    has_rows = all(_num_rows(each, num_samples, length) for each in tensors if each.is_floating_point())
    numel = sum(_shorten(tensor, length).numel() for tensor in tensors)
    if loss.whole_batch or num_samples < 2 or numel > MAX_CHECKED_NUMEL or not has_rows:
        return
    with unset_fake_temporarily(), torch.no_grad():
        try:
            whole, parts = _totals(loss, batch, outputs, num_samples)
        except Exception:
            return  # it needs other values than random ones: verify compares the numbers
    if abs(whole - sum(parts)) <= SUM_TOLERANCE * max(abs(whole), abs(sum(parts))):
        return
    kind = "it is a mean" if abs(whole) < 0.9 * abs(sum(parts)) else "samples depend on each other"
    text = (
        f"Loss.total is {whole:.4g} of {num_samples} samples, and {parts[0]:.4g} + {parts[1]:.4g} of 1 and "
        f"{num_samples - 1} of them: {kind}"
    )
    fix = (
        "return a sum (reduction='sum') and let Loss.count return what divides it; a loss that compares "
        "samples sets whole_batch=True"
    )
    raise PlanError(text, fix=fix, location="loss")


def _totals(loss: Loss, batch: Batch, outputs: Any, num_samples: int) -> tuple[float, list[float]]:
    length = _num_tokens(batch)
    generator = torch.Generator().manual_seed(0)

    def draw(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = _shorten(leaf, length).shape
        if not leaf.is_floating_point():
            return torch.zeros(shape, dtype=leaf.dtype)
        return torch.randn(shape, generator=generator).to(leaf.dtype)

    def rows(value: Any, first: int, end: int) -> Any:
        def cut(leaf: Any) -> Any:
            num = _num_rows(leaf, num_samples, length) if isinstance(leaf, torch.Tensor) else 0
            return leaf[first * num : end * num] if num else leaf

        return map_leaves(value, cut)

    whole_outputs = map_leaves(outputs, draw)
    whole_batch = {key: _shorten(value, length) for key, value in batch.items()}
    total = float(loss.total(whole_outputs, whole_batch))
    parts = [
        float(loss.total(rows(whole_outputs, first, end), rows(whole_batch, first, end)))
        for first, end in ((0, 1), (1, num_samples))
    ]
    return total, parts


def _num_rows(tensor: torch.Tensor, num_samples: int, length: int) -> int:
    """Returns the rows of each sample: 1, or `length` where tokens have rows, as router logits do; else 0."""
    if not tensor.ndim or tensor.shape[0] not in (num_samples, num_samples * length):
        return 0
    return tensor.shape[0] // num_samples


def _num_tokens(batch: Batch) -> int:
    labels = batch.get(LABELS_KEY)
    return labels.shape[1] if labels is not None and labels.ndim > 1 else 0


def _shorten(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Returns `tensor` with a few of its tokens, if it has `length` of them in dim 1."""
    has_tokens = length > 0 and tensor.ndim > 1 and tensor.shape[1] == length
    return tensor[:, :MAX_CHECKED_TOKENS] if has_tokens else tensor
