"""Computes the loss of a batch as the plan states it and as the model computes it itself, on one device.

A parity proves that a plan computes what one device computes; whether that is what the author of the model
meant, it cannot know. The model's own loss of the same samples shows a wrong intent: labels that are shifted
twice or never, an auxiliary loss that was dropped, a mean in place of a sum.

    labels of the plan    b c d e     aligned with the logits
    labels of the model   - b c d     it shifts them itself, so the last one is left out on both sides
"""

from dataclasses import replace
from warnings import catch_warnings

import torch

from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.analysis.find_model_loss import find_model_loss
from meshwright.model.loss.loss_definition import IGNORE_INDEX, Batch, Loss
from meshwright.model.loss.model_loss import LABEL_KEYS, returned_loss
from meshwright.model.loss.token_cross_entropy import LABELS_KEY
from meshwright.plan.job.errors import PlanError
from meshwright.verifier.verdict_and_cause import Verdict


def with_model_loss(verdict: Verdict, analyzed: AnalyzedModel, loss: Loss, batch: Batch) -> Verdict:
    """Returns `verdict` with the loss of a prepared `batch`, and the model's own, if it computes one."""
    stated, own = loss_and_model_loss(analyzed, loss, batch) or (None, None)
    return replace(verdict, loss=stated, model_loss=own)


def loss_and_model_loss(analyzed: AnalyzedModel, loss: Loss, batch: Batch) -> tuple[float, float] | None:
    """Returns `loss` of a prepared `batch`, and the loss that the model computes itself of it, in eval mode.

    None where the model computes none, or one that cannot be stated.
    """
    if loss.whole_batch or not any(key in batch for key in LABEL_KEYS):
        return None
    try:
        own = find_model_loss(analyzed.loaded_model, {key: value[:1] for key, value in batch.items()})
    except PlanError:
        return None
    if own is None:
        return None
    raw = dict(batch)
    if own.shifts_labels:
        labels = batch[LABELS_KEY]
        labels = torch.cat([labels[..., :-1], torch.full_like(labels[..., :1], IGNORE_INDEX)], dim=-1)
        raw[LABELS_KEY] = labels.roll(1, dims=-1)
        batch = {**batch, LABELS_KEY: labels}
    weight = loss.count_weight_and_tokens(batch)[0]
    if not weight:
        return None
    module = analyzed.make_module("cpu", torch.float32)[0]
    module.eval()
    raw = {key: value.contiguous() for key, value in raw.items()}  # models take views of their labels
    # layers that checkpoint themselves warn of a forward without gradients
    with torch.no_grad(), catch_warnings(action="ignore", category=UserWarning):
        outputs = module(**raw)
        stated = loss.whole_total(module(**loss.model_inputs(batch)), batch) / weight
    returned = returned_loss(outputs)
    return None if returned is None else (float(stated), float(returned))
