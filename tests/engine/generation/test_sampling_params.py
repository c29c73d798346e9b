"""What cannot work is refused at once, with what was given, what is needed and the repair."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from meshwright.api import analyze, make_plan, parallelize
from meshwright.engine.generation.sampling_params import SamplingParams, as_token_ids
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from tests.parallel.tensor.odd_llama import analyzed_llama, batches
from tests.tiny_model import tiny_job

DRAWN = SamplingParams(max_new_tokens=4, do_sample=True)
LLAMA = analyzed_llama(num_hidden_layers=1)


def refusal(prompts: Any, params: SamplingParams = DRAWN, model: Any = LLAMA, **how: Any) -> str:
    """The text of the refusal."""
    plan = make_plan(model, tiny_job(), Mesh(), None, 2)
    with parallelize(model, plan) as trainer, pytest.raises(PlanError) as error:
        trainer.generate(prompts, params, **how)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"temperature": 0}, "temperature = 0; needed is a number above 0\n  repair: pass do_sample=False"),
        ({"top_p": 0}, "top_p = 0; needed is a number above 0, up to 1\n  repair: pass do_sample=False"),
        ({"top_p": 2}, "top_p = 2; needed is a number above 0, up to 1"),
        ({"min_p": -1}, "min_p = -1; needed is a number from 0 to 1"),
        ({"top_k": -1}, "top_k = -1; needed is a whole number of at least 0"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0; needed is a whole number of at least 1"),
        ({"repetition_penalty": 0}, "repetition_penalty = 0; needed is a number above 0"),
        ({"do_sample": False, "top_k": 3}, "top_k = 3, and the most likely token is chosen, which does not"),
        ({"stop_strings": ("a",)}, "nothing makes text of token ids\n  repair: pass the tokenizer too"),
        ({"stop_strings": ("",)}, "stop_strings contains an empty text"),
    ],
)
def test_parameters_are_refused(change: dict[str, Any], text: str):
    assert text in refusal([[1]], replace(DRAWN, **change))


@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        ([], "there are no prompts"),
        ([[1], [], []], "prompt 1 is empty (and 1 more): there is nothing to continue"),
        ([[1, 67]], "prompt 0 contains token 67, and the vocabulary of the model has 67"),
        ([[-1]], "prompt 0 contains token -1"),
        (
            [[1], [1] * 29],
            "prompt 1 has 29 tokens, which with max_new_tokens = 4 is more than the 32 positions of the "
            "model\n  repair: shorten it, or pass max_new_tokens=3",
        ),
        (["a text"], "prompt 0 is str 'a text'; needed are token ids\n  repair: encode it"),
        ([torch.tensor([0.5])], "prompt 0 is Tensor"),
    ],
)
def test_prompts_are_refused(prompts: Any, text: str):
    assert text in refusal(prompts)


def test_all_that_is_wrong_is_said_at_once():
    found = refusal([[]], replace(DRAWN, top_p=2.0, temperature=-1.0), max_num_seqs=0, gather="never")
    for part in (
        "top_p = 2.0",
        "temperature = -1.0",
        "prompt 0 is empty",
        "max_num_seqs = 0",
        "gather = 'never'",
    ):
        assert part in found


def test_a_model_without_an_end_token_needs_one():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=67, n_embd=12, n_layer=1, n_head=2, n_positions=32)
    config.eos_token_id = config.bos_token_id = None
    model = analyze(transformers.GPT2LMHeadModel(config), batches(1)[0])
    assert "no end token" in (found := refusal([[1]], model=model))
    assert "pass stop_token_ids=(), which generates max_new_tokens for each prompt" in found


def test_models_that_do_not_continue_prompts_are_refused():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=67, decoder_start_token_id=0, dropout_rate=0, **sizes)
    )
    assert "T5ForConditionalGeneration is an encoder-decoder" in refusal(
        [[1]], model=analyze(t5, batches(1)[0])
    )
    config = transformers.BertConfig(
        vocab_size=67, hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    bert = analyze(transformers.BertForMaskedLM(config), batches(1)[0])
    assert "BertForMaskedLM predicts no next token" in refusal([[1]], model=bert)


def test_ids_may_be_tensors_and_sequences():
    assert as_token_ids(torch.tensor([1, 2]), 0) == as_token_ids((1, 2), 0) == [1, 2]
