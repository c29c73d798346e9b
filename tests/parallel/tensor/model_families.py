"""Small models of common families, unmodified, with six heads and odd widths, for tests of tensor
parallelism.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
import transformers
from torch import nn

from meshwright.api import analyze, make_plan
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

WORDS, TOKENS, CLASSES, PIXELS = 61, 7, 5, 8
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 29}
DECODER = {**SIZES, "vocab_size": WORDS, "max_position_embeddings": 16, "use_cache": False}
GROUPED = {**DECODER, "num_key_value_heads": 3}  # three groups of two heads
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
NOT_DROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FALCON = {
    name: value
    for name, value in DECODER.items()
    if name not in ("intermediate_size", "max_position_embeddings")
}
FALCON |= {**NO_DROPOUT, "ffn_hidden_size": 29, "bias": True, **ENDS}


def factory_of(family: str, head: str, config: str = "", **fields: object) -> Callable[..., nn.Module]:
    """A factory of the model; what it is called with are more fields of its config, named as the family or
    `config`.
    """

    def build(**more: object) -> nn.Module:
        made = getattr(transformers, config or f"{family}Config")(**{**fields, **more})
        return getattr(transformers, f"{family}{head}")(made)

    return build


FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "llama": factory_of("Llama", "ForCausalLM", **GROUPED),
    "qwen3": factory_of("Qwen3", "ForCausalLM", **GROUPED, head_dim=4),  # norms over single heads
    "gemma3": factory_of(
        "Gemma3", "ForCausalLM", "Gemma3TextConfig", **GROUPED, head_dim=4
    ),  # its norms multiply by 1 + weight
    "gpt2": factory_of(
        *("GPT2", "LMHeadModel"),
        **{
            "vocab_size": WORDS,
            "n_embd": 24,
            "n_layer": 2,
            "n_head": 6,
            "n_positions": 16,
            "n_inner": 29,
            "use_cache": False,
        },
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **ENDS},
    ),  # q, k and v in one weight that lies the other way round
    "gpt-neox": factory_of("GPTNeoX", "ForCausalLM", **DECODER, **NO_DROPOUT),  # q, k and v head by head
    "falcon": factory_of("Falcon", "ForCausalLM", **FALCON, multi_query=True),  # one key for all heads
    "falcon, new": factory_of(
        "Falcon", "ForCausalLM", **FALCON, new_decoder_architecture=True, num_kv_heads=3
    ),
    "falcon, many keys": factory_of(
        "Falcon", "ForCausalLM", **FALCON, multi_query=False, parallel_attn=False
    ),
    "falcon, alibi": factory_of(
        "Falcon", "ForCausalLM", **FALCON, multi_query=False, alibi=True
    ),  # the glue makes a bias by head
    "phi3": factory_of(
        "Phi3", "ForCausalLM", **GROUPED, **ENDS
    ),  # packed q, k, v of unlike sizes, and packed gate and up
    "persimmon": factory_of(
        "Persimmon", "ForCausalLM", **DECODER, **NO_DROPOUT, qk_layernorm=True
    ),  # torch's norms over single heads
    "bert": factory_of("Bert", "ForMaskedLM", **DECODER, **NOT_DROPPED),
    "vit": factory_of(
        "ViT",
        "ForImageClassification",
        **SIZES,
        **NOT_DROPPED,
        image_size=PIXELS,
        patch_size=4,
        num_labels=CLASSES,
    ),
    "t5": factory_of(
        *("T5", "ForConditionalGeneration"),
        **{
            "vocab_size": WORDS,
            "d_model": 24,
            "d_kv": 4,
            "d_ff": 29,
            "num_layers": 2,
            "num_heads": 6,
            "dropout_rate": 0.0,
        },
        **{"decoder_start_token_id": 0, "use_cache": False},
    ),  # a table by head, which the first layer hands to the others
}


def _classification_batch(outputs: object, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(outputs.logits, batch["labels"], reduction="sum")


def loss_of(family: str) -> Loss:
    """The loss with which it is trained here."""
    return (
        Loss(_classification_batch, lambda batch: batch["labels"].numel())
        if family == "vit"
        else token_cross_entropy()
    )


def batches(family: str, count: int, samples: int = 4, length: int = TOKENS) -> list[dict[str, torch.Tensor]]:
    """Global batches of random numbers; of text, so many tokens in a row."""
    generator = torch.Generator().manual_seed(0)

    def tokens() -> torch.Tensor:
        return torch.randint(3, WORDS, (samples, length), generator=generator)

    def batch() -> dict[str, torch.Tensor]:
        if family == "vit":
            pixels = torch.randn(samples, 3, PIXELS, PIXELS, generator=generator)
            return {
                "pixel_values": pixels,
                "labels": torch.randint(0, CLASSES, (samples,), generator=generator),
            }
        more = {"decoder_input_ids": tokens()} if family == "t5" else {}
        return {"input_ids": tokens(), **more, "labels": tokens()}

    return [batch() for _ in range(count)]


@cache
def analyze_family(family: str, length: int = TOKENS, **more: object) -> AnalyzedModel:
    """The analyzed model of `family`, on sequences of `length` tokens; cached."""
    transformers.utils.logging.set_verbosity_error()
    return analyze(FAMILIES[family](**more), batches(family, 1, length=length)[0], loss=loss_of(family))


def planned(analyzed: AnalyzedModel, mesh: Mesh, strategies: Sequence[Strategy], micro: int = 0) -> Plan:
    """Its plan on `mesh` with clipping and weight decay."""
    train, optimizer = TrainConfig(batch=4, clip=0.5), OptimizerConfig("adamw", lr=0.1, weight_decay=0.1)
    job = Job(ModelConfig("family"), DataConfig("random", sequence=TOKENS), train, optimizer)
    return make_plan(analyzed, job, mesh, strategies, micro)
