"""A Llama of a few thousand parameters whose tokens are bytes, with a chat template, as it is served."""

from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from meshwright.run.data.tokenizer import PretrainedTokenizer
from meshwright.run.data.tokenizer import Tokenizer as AnyTokenizer
from meshwright.run.serving.openai_requests import ServedModel

TEMPLATE = "{% for each in messages %}{{ each['role'] }}: {{ each['content'] }}\n{% endfor %}assistant:"
END = 258
SIZES = {"vocab_size": 259, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 48, "bos_token_id": 257, "eos_token_id": END}


@cache
def tokenizer_folder(folder: str) -> str:
    """A folder with a tokenizer of a token per byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<s>", "</s>"])
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    PreTrainedTokenizerFast(tokenizer_object=made, **named).save_pretrained(folder)
    return folder


@cache
def llama() -> LlamaForCausalLM:
    """The module; nothing writes into it."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def served_model(tokenizer: AnyTokenizer) -> ServedModel:
    """The module as it is served, at most 4 answers at once."""
    return ServedModel("tiny", llama(), tokenizer, (END,), 48, 4, 0)


def served_with_template(folder: str) -> ServedModel:
    """The same with a tokenizer of transformers."""
    return served_model(PretrainedTokenizer(tokenizer_folder(folder)))
