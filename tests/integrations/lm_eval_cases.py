"""What lm-evaluation-harness asks of small models, on data that lie here: its requests, tasks of each kind,
and its own class for models of transformers as the reference.

The harness is an extra: whoever imports this module has it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import meshwright as mw
from meshwright.model.tensors.float64_mode import run_in_float64

ENDS = {"bos_token_id": 257, "eos_token_id": 258}
SIZES = {"vocab_size": 259, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, **ENDS}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 48}
GPT2 = {"vocab_size": 259, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 48, **ENDS}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
}
TEXTS = [
    "A cat sat on the mat.",
    "",
    "Two dogs ran over the hill, and one of them came back by night; nobody saw.",
]
CHOICES = [" yes", " no", " perhaps not"]
ANSWERS = [{"until": ["\n", "ab"], "max_gen_toks": 9}, {"until": "e", "max_gen_toks": 5, "do_sample": False}]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte, and ends of a text; made without any file."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        clean_up_tokenization_spaces=False,
        chat_template="{% for each in messages %}{{ each['role'] }}: {{ each['content'] }}\n{% endfor %}",
    )  # fmt: skip


@cache
def analyzed(family: str = "llama") -> mw.AnalyzedModel:
    """The model that the tasks ask; cached, because nothing writes into it."""
    torch.manual_seed(0)
    model, tokens = FAMILIES[family](), torch.randint(0, 256, (4, 9))
    return mw.analyze(model, {"input_ids": tokens, "labels": tokens})


@cache
def reference(family: str = "llama") -> HFLM:
    """The harness's own class, in float64 on one device."""
    torch.manual_seed(0)
    model = FAMILIES[family]().double().eval()
    run_in_float64(model)
    return HFLM(pretrained=model, tokenizer=tokenizer(), batch_size=3, device="cpu")


def instances(kind: Any, requests: list[tuple[Any, ...]]) -> list[Instance]:
    """Requests of a task as the harness makes them."""
    return [Instance(kind, {}, request, index) for index, request in enumerate(requests)]


LIKELIHOODS = [(text, choice) for text in TEXTS for choice in CHOICES]
ROLLING = [(text,) for text in TEXTS if text]
GENERATED = [(text, dict(options)) for options in ANSWERS for text in TEXTS if text]


def responses(lm: Any) -> tuple[list[tuple[float, bool]], list[float], list[str]]:
    """What a model says to all kinds of requests."""
    return (
        lm.loglikelihood(instances("loglikelihood", LIKELIHOODS)),
        lm.loglikelihood_rolling(instances("loglikelihood_rolling", ROLLING)),
        lm.generate_until(instances("generate_until", GENERATED)),
    )


def local_task(name: str, **config: Any) -> ConfigurableTask:
    """A task on data that lie here."""
    rows = [{"text": text, "choices": CHOICES, "answer": index} for index, text in enumerate(TEXTS) if text]
    config |= {"custom_dataset": lambda **more: {"test": Dataset.from_list(rows)}, "test_split": "test"}
    return ConfigurableTask(config={"task": name, "doc_to_text": "{{text}}", **config})


def local_tasks() -> list[ConfigurableTask]:
    """One of each kind."""
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "answer"}
    texts = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    answer = {"output_type": "generate_until", "doc_to_target": "x", "generation_kwargs": ANSWERS[0]}
    metrics = [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")]
    return [
        local_task("choices", **choice, metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}]),
        local_task("texts", **texts, metric_list=metrics),
        local_task("answers", **answer, metric_list=[{"metric": "exact_match"}]),
    ]
