"""A forward that fails on a batch that does not fit the model is explained; other errors are the model's."""

import logging
import re
from collections.abc import Mapping

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright.model.analysis.forward_errors import explain_forward_errors
from meshwright.model.tensors.fake_tensor_limits import FAKE_TENSOR_LOGGER
from meshwright.plan.job.errors import PlanError
from tests.tiny_model import VOCABULARY, Tiny, analyzed_model, tiny_job, token_samples

EXAMPLE = {"input_ids": token_samples(2)["input_ids"]}
BEYOND = torch.tensor([[1, VOCABULARY]])


def run(module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
    with explain_forward_errors(module, inputs, EXAMPLE):
        module(**inputs)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"input_ids": BEYOND},
            f"batch.input_ids: ids from 1 to {VOCABULARY}, and the largest embedding of the model has "
            f"{VOCABULARY} rows, numbered from 0\n  repair: use the tokenizer that belongs to the model",
        ),
        ({"input_ids": torch.tensor([[-1, 1]])}, "batch.input_ids: ids from -1 to 1"),
        (
            {"ids": BEYOND},
            "batch: it has ids and lacks input_ids; the model was analyzed with input_ids\n"
            "  repair: give each batch the keys of the example that the model was analyzed with: "
            "'ids': did you mean 'input_ids'?",
        ),
        ({}, "batch: it lacks input_ids; the model was analyzed with input_ids"),
    ],
)
def test_a_batch_that_does_not_fit_is_named(inputs: dict[str, torch.Tensor], message: str):
    with pytest.raises(PlanError) as caught:
        run(Tiny(), inputs)
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value.__cause__, (IndexError, TypeError))


def test_samples_longer_than_the_positions_are_named():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=4))
    with pytest.raises(
        PlanError, match=r"batch\.input_ids: samples of 6 tokens; the model has 4 positions\n"
    ):
        run(gpt2, {"input_ids": torch.zeros(1, 6, dtype=torch.long)})


def test_an_error_of_the_model_itself_is_not_explained():
    class Broken(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            raise IndexError("a list of its own")

    with pytest.raises(IndexError, match="a list of its own"):
        run(Broken(), EXAMPLE)


def test_steps_evaluations_and_verify_explain_a_batch_that_does_not_fit():
    analyzed, good = analyzed_model(), token_samples(12)
    wrong = {**good, "input_ids": good["input_ids"] + VOCABULARY}
    plan = mw.make_plan(analyzed, tiny_job())
    refused = pytest.raises(PlanError, match=re.escape(f"has {VOCABULARY} rows, numbered from 0"))
    with mw.parallelize(analyzed, plan) as trainer:
        with refused:
            trainer.step(trainer.local_batch(wrong))
        with refused:
            trainer.evaluate([wrong])
    with refused:
        mw.verify(analyzed, plan, [wrong])


@pytest.mark.parametrize("key", ["weights", "y"])
def test_a_key_that_the_forward_does_not_take_is_named_at_the_analysis(key: str):
    with pytest.raises(PlanError) as caught:
        mw.analyze(Tiny(), {**token_samples(2), key: torch.ones(2)})
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.location == f"batch.{key}"
    assert diagnostic.problem == f"the forward of Tiny takes input_ids, and the batch has '{key}'"
    assert f"targets=('{key}',)" in diagnostic.fix
    assert "leave it out of the batch" in diagnostic.fix


def test_a_forward_whose_outputs_need_no_gradient_is_refused():
    class Detached(Tiny):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids).detach()

    with pytest.raises(PlanError, match=r"model: no output of the model needs a gradient.*\n.*\.detach\(\)"):
        mw.analyze(Detached(), token_samples(2))


def test_torch_logs_no_traceback_of_an_operation_that_fails_on_fake_tensors(caplog):
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))
    tokens, torch_logger = torch.zeros(2, 4, dtype=torch.long), logging.getLogger(FAKE_TENSOR_LOGGER)
    torch_logger.addHandler(caplog.handler)
    try:
        with pytest.raises(PlanError, match="loss: the forward of the model fails with labels"):
            mw.analyze(llama, {"input_ids": tokens, "labels": tokens.float()})
    finally:
        torch_logger.removeHandler(caplog.handler)
    assert not caplog.messages
