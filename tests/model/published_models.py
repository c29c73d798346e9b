"""Small models of several families as transformers saves them, and their declared tensor-parallel plans."""

from pathlib import Path

import torch
import transformers
from torch import nn

from meshwright.model.loading.loader import LoadedModel, load_model
from meshwright.plan.job.model_config import ModelConfig

DECODER = {
    **{
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    **{
        "intermediate_size": 24,
        "max_position_embeddings": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
}
GPT2 = {
    "vocab_size": 40,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5 = {
    "vocab_size": 40,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
FAMILIES = {
    "llama": ("LlamaForCausalLM", DECODER),
    "gpt2": ("GPT2LMHeadModel", GPT2),  # Conv1D, tied
    "qwen2": ("Qwen2ForCausalLM", DECODER),  # biases
    "mixtral": ("MixtralForCausalLM", {**DECODER, "num_local_experts": 4}),  # experts are joined on loading
    "bert": ("BertForMaskedLM", DECODER),
    "t5": ("T5ForConditionalGeneration", T5),  # one embedding under three names
}


def published(folder: Path, family: str = "llama", *, seed: int = 3, **changes: object) -> nn.Module:
    """The model of `family` that transformers has written into `folder`, with its own initial values."""
    architecture, fields = FAMILIES[family]
    config = transformers.CONFIG_MAPPING[family].from_dict(
        {**fields, **changes, "architectures": [architecture]}
    )
    torch.manual_seed(seed)
    transformers.utils.logging.disable_progress_bar()  # a bar leaves a thread behind
    model = getattr(transformers, architecture)(config)
    model.save_pretrained(folder)
    return model.eval()


def load_published(folder: Path, source: Path | None = None, **fields: object) -> LoadedModel:
    """The model here of the config in `source` (or `folder`) with the weights in `folder`."""
    return load_model(ModelConfig(str(source or folder), weights=str(folder), **fields), seed=0)


def made(loaded: LoadedModel) -> nn.Module:
    """The model with its values, in eval mode."""
    module = loaded.deferred_init.instantiate()
    loaded.deferred_init.materialize(module)
    return module.eval()


def logits(module: nn.Module) -> torch.Tensor:
    """Returns what `module` says to a few tokens."""
    tokens = torch.arange(12).view(2, 6)
    decoder = {"decoder_input_ids": tokens} if module.config.to_dict().get("is_encoder_decoder") else {}
    with torch.no_grad():
        return module(input_ids=tokens, **decoder).logits
