"""Heads of transformers with batches of stock collators and no loss: one device, and a plan each.

Every kind of head and every plan of the benchmark `hf_defaults` is in a case; the benchmark has all of them.
"""

from functools import cache

import pytest

import meshwright as mw
from benchmarks.models.head_batches import Batch
from benchmarks.models.head_families import ALL_HEADS
from benchmarks.models.hf_defaults import PLANS, TOLERANCE, one_device_error, plan_outcome

PLAN_OF_HEAD = {
    "LlamaForCausalLM": "cp 3",
    "BertForMaskedLM": "tp 3",
    "T5ForConditionalGeneration": "pp 3",
    "BartForConditionalGeneration": "dp_replicate 2",
    "WhisperForConditionalGeneration": "pp 2",
    "ASTForAudioClassification": "cp 2",
    "BartForSequenceClassification": "dp_replicate 3",
    "RobertaForSequenceClassification (regression)": "pp 2",
    "ElectraForSequenceClassification (several classes)": "tp 2",
    "BertForTokenClassification": "cp 2",
    "DistilBertForQuestionAnswering": "pp 3",
    "BertForMultipleChoice": "dp_replicate 2",
    "ViTForImageClassification": "tp 2",
    "MixtralForCausalLM": "tp 3",
}


@cache
def analyzed_head(name: str) -> tuple[mw.AnalyzedModel, Batch]:
    (head,) = [head for head in ALL_HEADS if head.name == name]
    model = head.build()
    batch = head.collate(model)
    return mw.analyze(model, batch), batch


@pytest.mark.parametrize("name", PLAN_OF_HEAD)
def test_loss_and_gradients_on_one_device_are_the_models_own(name: str):
    analyzed, batch = analyzed_head(name)
    assert one_device_error(analyzed, batch) <= TOLERANCE


@pytest.mark.parametrize(("name", "plan"), PLAN_OF_HEAD.items())
def test_a_plan_equals_one_device(name: str, plan: str):
    analyzed, batch = analyzed_head(name)
    error = plan_outcome(analyzed, batch, plan)
    assert isinstance(error, float), error
    assert error <= TOLERANCE


def test_every_plan_and_every_kind_of_a_head_that_can_be_trained_is_in_a_case():
    kinds = {head.kind for head in ALL_HEADS if head.name in PLAN_OF_HEAD}
    refused = {"pixel classes", "masked and next sentence", "images and texts"}
    assert set(PLAN_OF_HEAD.values()) == set(PLANS)
    assert {head.kind for head in ALL_HEADS} - kinds == refused
