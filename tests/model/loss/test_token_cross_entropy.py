"""Labels are aligned with the logits, or a copy of the inputs that is shifted once; others are refused."""

import pytest
import torch

from meshwright.model.loss.loss_definition import IGNORE_INDEX
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.plan.job.errors import PlanError

TOKENS = torch.tensor([[5, 6, 7, 8], [9, 5, 5, 6]])
NEXT = torch.tensor([[6, 7, 8, IGNORE_INDEX], [5, 5, 6, IGNORE_INDEX]])
COPY = {"input_ids": TOKENS, "labels": TOKENS.clone()}
ALIGNED = {"input_ids": TOKENS, "labels": NEXT}


def test_a_copy_of_the_inputs_is_shifted_by_one_token():
    prepared = token_cross_entropy(shift_labels=True).prepare(COPY)
    assert torch.equal(prepared["labels"], NEXT)
    assert torch.equal(COPY["labels"], TOKENS)  # the batch of the user is unchanged


def test_loss_weights_are_shifted_with_the_labels():
    weights = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    prepared = token_cross_entropy(shift_labels=True).prepare({**COPY, "loss_weights": weights})
    assert prepared["loss_weights"].tolist() == [[2, 3, 4, 0], [6, 7, 8, 0]]


def test_labels_that_transformers_takes_as_shifted_stay_as_they_are():
    prepared = token_cross_entropy(shift_labels=True).prepare({**COPY, "shift_labels": NEXT})
    assert torch.equal(prepared["labels"], NEXT)
    assert "shift_labels" not in prepared


def test_another_label_may_be_the_one_that_is_ignored():
    prepared = token_cross_entropy(ignore_index=5).prepare({"labels": TOKENS})
    assert prepared["labels"].tolist() == [[IGNORE_INDEX, 6, 7, 8], [9, IGNORE_INDEX, IGNORE_INDEX, 6]]


def test_aligned_labels_are_not_changed():
    assert torch.equal(token_cross_entropy().prepare(ALIGNED)["labels"], NEXT)


def test_aligned_labels_where_a_copy_is_shifted_are_refused():
    with pytest.raises(PlanError, match=r"labels\[t\] is input_ids\[t \+ 1\](?s:.*)token_cross_entropy\(\)"):
        token_cross_entropy(shift_labels=True).prepare(ALIGNED)


def test_a_copy_where_aligned_labels_are_taken_is_refused():
    with pytest.raises(PlanError, match=r"labels are a copy of input_ids(?s:.*)shift_labels=True"):
        token_cross_entropy().prepare(COPY)


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": torch.full((2, 4), 7), "labels": torch.full((2, 4), 7)},  # either way the same
        {**COPY, "decoder_input_ids": TOKENS},  # a decoder that learns to copy
        {"input_ids": TOKENS, "labels": torch.where(TOKENS == 9, TOKENS, IGNORE_INDEX)},  # masked tokens
        {"input_ids": torch.ones(2, 3, 8), "labels": TOKENS},
        {"labels": TOKENS},
    ],
    ids=["constant", "decoder", "masked", "no tokens", "labels alone"],
)
@pytest.mark.parametrize("shift", [False, True])
def test_labels_that_may_be_meant_are_taken(batch: dict[str, torch.Tensor], shift: bool):
    assert token_cross_entropy(shift_labels=shift).prepare(batch)["labels"].shape == batch["labels"].shape


@pytest.mark.parametrize(("label", "given"), [(10, "labels from 0 to 10"), (-1, "labels from -1 to 8")])
def test_a_label_outside_of_the_vocabulary_is_refused(label: int, given: str):
    labels = NEXT.clone()
    labels[1, 0] = label
    message = rf"batch\.labels: {given}, and the model has 10 tokens, numbered from 0\n.*-100 leaves a token"
    with pytest.raises(PlanError, match=message):
        token_cross_entropy().total(torch.zeros(2, 4, 10), {"labels": labels})


def test_labels_that_do_not_count_may_be_ignored_with_those_of_the_vocabulary():
    total = token_cross_entropy().total(torch.zeros(2, 4, 10), ALIGNED)
    assert total.item() == pytest.approx(6 * torch.tensor(10.0).log().item())
