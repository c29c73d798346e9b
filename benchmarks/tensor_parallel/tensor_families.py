"""The model families of `tensor_parity` and `tensor_bytes`: unmodified classes of transformers, small, in two
sizes.

    odd    6 heads, 3 KV heads with grouped queries, vocabulary 61, MLP width 29: shard sizes differ by rank
    even   24 heads, 12 KV heads, vocabulary 72: sizes that 2 x 2, 3 x 3 and 2 x 2 x 2 ranks divide equally
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
import transformers
from torch import nn

from meshwright.api import analyze
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy

TOKENS, CLASSES, PIXELS = 12, 5, 12
ODD = {"vocab": 61, "hidden": 24, "inner": 29, "heads": 6, "keys": 3, "head": 4}
EVEN = {"vocab": 72, "hidden": 48, "inner": 72, "heads": 24, "keys": 12, "head": 2}


@dataclass(frozen=True)
class Family:
    """One family: its config and head in transformers, and the fields of the config.

    `sizes` maps the config's names of sizes to keys of `ODD` and `EVEN`. `sequence_parallel_on` are the
    numbers of ranks that divide its tokens. `decoder`: whether 2d, 2.5d and 3d tensor parallelism take it.
    """

    name: str
    config: str
    head: str
    sizes: Mapping[str, str]
    fields: Mapping[str, Any]
    decoder: bool = True
    sequence_parallel_on: tuple[int, ...] = (2, 3, 4, 6)


STANDARD_SIZES = {
    "vocab_size": "vocab",
    "hidden_size": "hidden",
    "intermediate_size": "inner",
    "num_attention_heads": "heads",
}
GROUPED_QUERY_SIZES = {**STANDARD_SIZES, "num_key_value_heads": "keys"}
LAYERS = {"num_hidden_layers": 2, "max_position_embeddings": 32, "use_cache": False}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
NO_DROPOUT_PROB = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2_SIZES = {"vocab_size": "vocab", "n_embd": "hidden", "n_inner": "inner", "n_head": "heads"}
GPT2 = {
    "n_layer": 2,
    "n_positions": 32,
    "use_cache": False,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    **SPECIAL_TOKENS,
}
FALCON_SIZES = {**STANDARD_SIZES, "num_kv_heads": "keys", "ffn_hidden_size": "inner"}
FALCON_SIZES = {name: size for name, size in FALCON_SIZES.items() if name != "intermediate_size"}
FALCON = {
    "num_hidden_layers": 2,
    "use_cache": False,
    **NO_DROPOUT,
    **SPECIAL_TOKENS,
    "bias": True,
    "new_decoder_architecture": True,
}
T5_SIZES = {"vocab_size": "vocab", "d_model": "hidden", "d_ff": "inner", "num_heads": "heads", "d_kv": "head"}
T5 = {"num_layers": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False}
VIT_SIZES = {name: size for name, size in STANDARD_SIZES.items() if name != "vocab_size"}
VIT = {
    "num_hidden_layers": 2,
    **NO_DROPOUT_PROB,
    "image_size": PIXELS,
    "patch_size": 4,
    "num_labels": CLASSES,
}

FAMILIES = (
    Family("llama", "Llama", "ForCausalLM", GROUPED_QUERY_SIZES, LAYERS),
    Family("gpt2", "GPT2", "LMHeadModel", GPT2_SIZES, GPT2),
    Family("qwen3", "Qwen3", "ForCausalLM", {**GROUPED_QUERY_SIZES, "head_dim": "head"}, LAYERS),
    Family("gpt-neox", "GPTNeoX", "ForCausalLM", STANDARD_SIZES, {**LAYERS, **NO_DROPOUT}),
    Family("falcon", "Falcon", "ForCausalLM", FALCON_SIZES, FALCON),
    Family("phi3", "Phi3", "ForCausalLM", GROUPED_QUERY_SIZES, {**LAYERS, **SPECIAL_TOKENS}),
    Family("bert", "Bert", "ForMaskedLM", STANDARD_SIZES, {**LAYERS, **NO_DROPOUT_PROB}, decoder=False),
    Family(
        "vit", "ViT", "ForImageClassification", VIT_SIZES, VIT, decoder=False, sequence_parallel_on=(2,)
    ),  # 9 patches and the class token
    Family("t5", "T5", "ForConditionalGeneration", T5_SIZES, T5, decoder=False),
)


def named(name: str) -> Family:
    """Returns the family of that name."""
    return {family.name: family for family in FAMILIES}[name]


def model_of(family: Family, *, even: bool = False, **more: object) -> nn.Module:
    """Returns the model with transformers' own initial values; `more` are other fields of its config."""
    sizes = EVEN if even else ODD
    fields = {**family.fields, **{field: sizes[size] for field, size in family.sizes.items()}, **more}
    config, head = (getattr(transformers, f"{family.config}{suffix}") for suffix in ("Config", family.head))
    return head(config(**fields))


@cache
def analyzed_model(name: str, *, even: bool = False) -> AnalyzedModel:
    """Returns the analyzed model of the family of that name; the trial batch has two samples."""
    family = named(name)
    transformers.utils.logging.set_verbosity_error()
    return analyze(lambda: model_of(family, even=even), batches(family, 1, 2)[0], loss=loss_of(family))


def batches(
    family: Family, count: int, num_samples: int, length: int = TOKENS
) -> list[dict[str, torch.Tensor]]:
    """Returns `count` global batches of random values, each `num_samples` samples of `length` tokens."""
    generator = torch.Generator().manual_seed(0)

    def tokens() -> torch.Tensor:
        return torch.randint(3, ODD["vocab"], (num_samples, length), generator=generator)

    def batch() -> dict[str, torch.Tensor]:
        if family.name == "vit":
            pixels = torch.randn(num_samples, 3, PIXELS, PIXELS, generator=generator)
            return {
                "pixel_values": pixels,
                "labels": torch.randint(0, CLASSES, (num_samples,), generator=generator),
            }
        more = {"decoder_input_ids": tokens()} if family.name == "t5" else {}
        return {"input_ids": tokens(), **more, "labels": tokens()}

    return [batch() for _ in range(count)]


def loss_of(family: Family) -> Loss:
    """Returns the loss of the family: cross-entropy of image classes, else of next tokens."""
    return Loss(_class_loss, _num_labels) if family.name == "vit" else token_cross_entropy()


def _class_loss(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(outputs.logits, batch["labels"], reduction="sum")


def _num_labels(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.tensor(batch["labels"].numel())
