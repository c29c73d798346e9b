"""What users pass as a loss becomes a sum and a count, and a mean is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
import transformers as tf
from torch import nn

import meshwright as mw
from meshwright.model.loss.as_loss import as_loss, check_is_sum
from meshwright.model.loss.loss_definition import IGNORE_INDEX, Batch, Loss
from meshwright.plan.job.errors import PlanError

LABELS = torch.tensor([[1, 2, IGNORE_INDEX], [3, 0, 1], [IGNORE_INDEX, IGNORE_INDEX, 2]])
BATCH = {"labels": LABELS}
LOGITS = torch.linspace(-1, 1, 3 * 3 * 4).view(3, 3, 4)


def mean(outputs: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(outputs.reshape(-1, 4), batch["labels"].reshape(-1))


def test_a_cross_entropy_of_torch_keeps_its_smoothing_and_its_ignored_label():
    loss = as_loss(nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=3))
    assert loss is not None
    prepared = loss.prepare(BATCH)
    labels = torch.where(LABELS == IGNORE_INDEX, 3, LABELS).view(-1)
    expected = F.cross_entropy(LOGITS.view(-1, 4), labels, label_smoothing=0.2, ignore_index=3)
    ignored = {"labels": torch.where(LABELS == IGNORE_INDEX, 3, LABELS)}
    prepared = loss.prepare(ignored)
    assert torch.allclose(loss.total(LOGITS, prepared) / loss.count(prepared), expected, rtol=1e-6)


def test_the_loss_function_of_a_model_is_its_own_loss():
    module = tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
    )
    assert as_loss(module.loss_function) is None
    tokens = torch.arange(8).view(2, 4)
    analyzed = mw.analyze(module, {"input_ids": tokens, "labels": tokens}, loss=module.loss_function)
    assert analyzed.loss.shifts_labels


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (nn.CrossEntropyLoss(torch.ones(4)), "with weight"),
        (nn.CrossEntropyLoss(reduction="sum"), "reduction='sum'"),
        (nn.MSELoss(), "the loss is a MSELoss"),
        ("cross_entropy", "the loss is a str"),
    ],
)
def test_anything_else_is_refused(given: object, reason: str):
    with pytest.raises(PlanError, match=reason):
        as_loss(given)


def test_a_mean_is_refused():
    with pytest.raises(PlanError, match=r"of 3 samples, and .* of 1 and 2 of them: it is a mean\n.*'sum'"):
        check_is_sum(Loss(mean, lambda batch: (batch["labels"] != IGNORE_INDEX).sum()), BATCH, LOGITS)


def test_a_loss_that_compares_samples_is_refused_unless_it_takes_the_whole_batch():
    def contrast(outputs: Any, batch: Batch) -> torch.Tensor:
        rows = outputs.flatten(1)
        return (rows @ rows.T).exp().sum()

    count = lambda batch: torch.tensor(len(batch["labels"]))  # noqa: E731
    with pytest.raises(PlanError, match=r"whole_batch=True"):
        check_is_sum(Loss(contrast, count), BATCH, LOGITS)
    check_is_sum(Loss(contrast, count, whole_batch=True), BATCH, LOGITS)


def test_sums_pass_whatever_their_outputs_are():
    check_is_sum(mw.token_cross_entropy(), BATCH, LOGITS)
    check_is_sum(mw.token_cross_entropy(), BATCH, {"logits": LOGITS, "hidden": (LOGITS, [LOGITS])})
    check_is_sum(
        Loss(lambda outputs, batch: outputs["of", 1].sum(), lambda batch: torch.tensor(1)), BATCH, LOGITS
    )


def test_rows_of_all_tokens_of_samples_belong_to_their_samples():
    rows = LOGITS.view(9, 4)
    loss = Loss(lambda outputs, batch: outputs["router_logits"].square().sum(), lambda batch: torch.tensor(1))
    check_is_sum(loss, BATCH, {"logits": LOGITS, "router_logits": rows})


def test_outputs_are_not_changed_by_the_check():
    outputs = {"logits": LOGITS, "hidden": [LOGITS]}
    check_is_sum(mw.token_cross_entropy(), BATCH, outputs)
    assert outputs["logits"] is LOGITS
    assert outputs["hidden"][0] is LOGITS


def test_analysis_refuses_a_mean():
    module = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    with pytest.raises(PlanError, match="it is a mean"):
        mw.analyze(
            lambda: _Named(module),
            {"x": torch.tensor([[0, 1, 2], [2, 1, 0]]), "labels": LABELS[:2]},
            loss=Loss(mean, lambda batch: torch.tensor(1)),
        )


class _Named(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)
