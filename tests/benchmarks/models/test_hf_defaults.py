"""The checks of `hf_defaults` see a wrong loss, tell a refusal from a fault, and batches are padded."""

import pytest
import torch

import meshwright as mw
from benchmarks.models.head_batches import IGNORED
from benchmarks.models.head_families import ALL_HEADS, Head
from benchmarks.models.hf_defaults import (
    BAR,
    check_head,
    is_refused,
    one_device_error,
    plan_outcome,
    worst_error,
)


def head_named(name: str) -> Head:
    (head,) = [head for head in ALL_HEADS if head.name == name]
    return head


def test_more_heads_are_checked_than_claimed_and_none_twice():
    names = [head.name for head in ALL_HEADS]
    assert len(set(names)) == len(names) > BAR


def test_rows_of_a_batch_have_different_numbers_of_labels_that_count():
    for name in ("LlamaForCausalLM", "T5ForConditionalGeneration", "BertForTokenClassification"):
        head = head_named(name)
        counts = (head.collate(head.build())["labels"] != IGNORED).sum(dim=1)
        assert len(counts.unique()) > 1


def test_a_loss_that_is_not_the_models_own_is_seen():
    head = head_named("GPT2LMHeadModel")
    model = head.build()
    batch = head.collate(model)
    smoothed = mw.token_cross_entropy(0.1, shift_labels=True)
    analyzed = mw.analyze(model, batch, loss=smoothed)
    assert one_device_error(analyzed, batch) > 1e-3


def test_a_plan_that_is_refused_is_told_from_one_that_differs():
    head = head_named("ResNetForImageClassification")
    model = head.build()
    batch = head.collate(model)
    refused = plan_outcome(mw.analyze(model, batch), batch, "tp 2")
    assert is_refused(refused)
    assert "a convolution: only linear layers" in str(refused)
    row = {"one device": 1e-15, "plans": {"tp 2": refused, "tp 3": 2e-15}}
    assert worst_error(row) == 2e-15
    row["plans"]["pp 2"] = "differs: by a factor"
    assert worst_error(row) == float("inf")


@pytest.mark.parametrize("name", ["CLIPModel", "Wav2Vec2ForCTC", "BartForCausalLM"])
def test_a_head_without_a_loss_that_can_be_stated_is_refused_with_a_repair(name: str):
    row = check_head(head_named(name))
    assert "repair: " in row["refused"]
    assert "plans" not in row


def test_a_head_is_the_same_each_time_it_is_built():
    head = head_named("ViTForImageClassification")
    for first, second in zip(head.build().parameters(), head.build().parameters(), strict=True):
        assert torch.equal(first, second)
