"""Cross-entropy summed over tokens: the loss of language models, and of classifiers.

    batch of a collator     input_ids  a b c d        the labels are a copy; the model predicts the next token
                            labels     a b c d
    `shift_labels`          labels     b c d -        shifted once, before sequences are divided among ranks
    aligned                 labels     b c d e        as datasets of texts make them: one per logit

Labels of -100 do not count. Of two labels that do not fit together one trains the identity: its loss falls
to 0 and the model learns nothing. So labels that are a copy of the inputs, where they should be aligned, are
refused, and so are aligned ones where they should be a copy.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from meshwright.model.loss.loss_definition import IGNORE_INDEX, Batch, Loss, VocabParallelLoss
from meshwright.model.loss.vocab_parallel_cross_entropy import (
    NUM_TOKEN_STATS,
    VocabShard,
    check_labels,
    vocab_parallel_cross_entropy,
)
from meshwright.plan.job.errors import PlanError

LABELS_KEY = "labels"
LOSS_WEIGHTS_KEY = "loss_weights"
SHIFTED_LABELS_KEY = "shift_labels"  # labels that transformers takes as they are


def token_cross_entropy(
    label_smoothing: float = 0.0, *, shift_labels: bool = False, ignore_index: int = IGNORE_INDEX
) -> Loss:
    """Returns cross-entropy summed over tokens, divided by the global number of labels that count.

    The model's outputs are logits of shape (samples, tokens, vocabulary), or an object with `.logits`.
    Labels of `ignore_index` do not count. The sum is computed in float32 at least. With `label_smoothing` e
    the target is 1 - e on the label, and e spread evenly over the vocabulary.

    Labels are aligned with the logits. With `shift_labels` they are a copy of the inputs, as the collators of
    transformers make them, and the label of a token is the next token; a batch that has the key
    `shift_labels` has them shifted already.

    A batch may hold `loss_weights` (samples, tokens), floats from 0 up, along with the labels: each token's
    loss is multiplied by its weight, and the loss is divided by the sum of the weights of all labels that
    count. Metrics still count tokens, whatever their weights.

    Raises PlanError for a `label_smoothing` outside of 0 to 1.
    """
    if not 0 <= label_smoothing <= 1:
        text = f"label_smoothing = {label_smoothing}"
        raise PlanError(
            text,
            fix="write a number from 0 (the label alone) to 1 (uniform over the vocabulary)",
            location="loss",
        )
    smooth = label_smoothing > 0
    split = VocabParallelLoss(
        get_logits, partial(_vocab_parallel_total, label_smoothing=label_smoothing), NUM_TOKEN_STATS + smooth
    )
    total = partial(_token_total, label_smoothing=label_smoothing)
    targets = (LABELS_KEY, LOSS_WEIGHTS_KEY)
    return Loss(
        total,
        _token_count,
        targets,
        _count_unignored,
        vocab_parallel=split,
        is_token_sum=True,
        is_token_nll=not smooth,
        prepare=partial(_prepare_labels, shift=shift_labels, ignore_index=ignore_index),
        shifts_labels=shift_labels,
    )


def _prepare_labels(batch: Batch, shift: bool, ignore_index: int) -> Batch:
    """Returns `batch` with labels that are aligned with the logits, of which those of -100 do not count."""
    prepared = dict(batch)
    already = prepared.pop(SHIFTED_LABELS_KEY, None) if shift else None
    labels = prepared.get(LABELS_KEY) if already is None else already
    if labels is None:
        return batch
    if ignore_index != IGNORE_INDEX:
        labels = torch.where(labels == ignore_index, IGNORE_INDEX, labels)
    if not shift:
        _refuse_copied_labels({**prepared, LABELS_KEY: labels})
    elif already is None:
        _refuse_aligned_labels({**prepared, LABELS_KEY: labels})
        labels = _shift_left(labels, IGNORE_INDEX)
        if LOSS_WEIGHTS_KEY in prepared:
            prepared[LOSS_WEIGHTS_KEY] = _shift_left(prepared[LOSS_WEIGHTS_KEY], 0)
    return {**prepared, LABELS_KEY: labels}


def _shift_left(values: torch.Tensor, last: float) -> torch.Tensor:
    shifted = torch.full_like(values, last)
    shifted[..., :-1] = values[..., 1:]
    return shifted


def _comparable_tokens(batch: Batch) -> torch.Tensor | None:
    """Returns the token ids (samples, tokens) that have a label each; None without, or on an accelerator,
    where a comparison would wait for the device.
    """
    tokens, labels = batch.get("input_ids"), batch[LABELS_KEY]
    is_comparable = labels.ndim == 2 and labels.device.type == "cpu"
    return tokens if tokens is not None and is_comparable and tokens.shape == labels.shape else None


def _refuse_aligned_labels(batch: Batch) -> None:
    """Raises PlanError for labels that are the next tokens already."""
    tokens, labels = _comparable_tokens(batch), batch[LABELS_KEY]
    if tokens is None:
        return
    counts = labels[:, :-1] != IGNORE_INDEX
    is_next = (labels[:, :-1] == tokens[:, 1:]) | ~counts
    if is_next.all() and ((labels[:, :-1] != tokens[:, :-1]) & counts).any():
        raise PlanError(
            "labels[t] is input_ids[t + 1]: they are shifted already, and this loss shifts them once more",
            fix="pass labels that are a copy of input_ids, as transformers' collators do; "
            "or for labels like these loss=meshwright.token_cross_entropy()",
            location="batch.labels",
        )


def _refuse_copied_labels(batch: Batch) -> None:
    """Raises PlanError for labels that are a copy of the inputs, of which the model would learn the identity.

    A decoder with inputs of its own may copy; of labels for masked tokens, most do not count.
    """
    tokens, labels = _comparable_tokens(batch), batch[LABELS_KEY]
    if tokens is None or "decoder_input_ids" in batch:
        return
    counts = labels != IGNORE_INDEX
    if ((labels != tokens) & counts).any():  # first: it ends here in every step of most runs
        return
    if 2 * counts.sum() > counts.numel() and not (tokens == tokens[:, :1]).all():
        raise PlanError(
            "labels are a copy of input_ids, and this loss takes them as they are: the model would learn to "
            "repeat its input",
            fix="for a causal language model pass loss=meshwright.token_cross_entropy(shift_labels=True), or "
            "leave the loss out if the model shifts labels itself; a masked language model takes inputs with "
            "masked tokens",
            location="batch.labels",
        )


def get_logits(outputs: Any) -> torch.Tensor:
    """Returns the logits among a model's outputs: the tensor itself, the first of a tuple, or `.logits`.

    Raises PlanError for outputs without them.
    """
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, (tuple, list)) and outputs:
        return outputs[0]
    try:
        return outputs["logits"] if isinstance(outputs, Mapping) else outputs.logits
    except (KeyError, AttributeError):
        held = f" with {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else ""
        text = f"the loss reads logits, and the model returns a {type(outputs).__name__}{held}"
        fix = "return the logits, or a dict or dataclass that has them under this name; or state the loss"
        raise PlanError(text, fix=fix, location="loss") from None


def _token_total(outputs: Any, batch: Batch, label_smoothing: float) -> torch.Tensor:
    logits = get_logits(outputs)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    flat, labels = logits.reshape(-1, logits.shape[-1]), batch[LABELS_KEY].reshape(-1)
    if not labels.is_floating_point():
        check_labels(labels, logits.shape[-1], IGNORE_INDEX)
    token_loss = partial(
        F.cross_entropy, flat, labels, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing
    )
    if LOSS_WEIGHTS_KEY in batch:
        token_losses = token_loss(reduction="none")
        return (token_losses * _weights(batch).reshape(-1).to(token_losses.dtype)).sum()
    return token_loss(reduction="sum")


def _vocab_parallel_total(
    outputs: Any, batch: Batch, vocab_shard: VocabShard, label_smoothing: float
) -> torch.Tensor:
    logits, labels = get_logits(outputs), batch[LABELS_KEY].reshape(-1)
    weights = _weights(batch) if LOSS_WEIGHTS_KEY in batch else (batch[LABELS_KEY] != IGNORE_INDEX)
    return vocab_parallel_cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels, weights.reshape(-1), vocab_shard, label_smoothing
    )


def _token_count(batch: Batch) -> torch.Tensor:
    if LOSS_WEIGHTS_KEY not in batch:
        return (batch[LABELS_KEY] != IGNORE_INDEX).sum()
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


def _count_unignored(batch: Batch) -> torch.Tensor | None:
    return (batch[LABELS_KEY] != IGNORE_INDEX).sum() if LOSS_WEIGHTS_KEY in batch else None


def _weights(batch: Batch) -> torch.Tensor:
    """Returns the weights of the labels that count, and 0 for the others.

    Raises PlanError when they do not fit the labels.
    """
    labels, weights = batch[LABELS_KEY], batch[LOSS_WEIGHTS_KEY]
    if weights.shape != labels.shape:
        text = f"loss_weights of shape {list(weights.shape)} with labels of shape {list(labels.shape)}"
        raise PlanError(
            text, fix="give one weight per label: (samples, tokens)", location="batch.loss_weights"
        )
    return torch.where(labels != IGNORE_INDEX, weights, 0)
