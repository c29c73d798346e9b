"""Makes the transformers config of a model that Megatron-LM's arguments describe.

RMSNorm, SwiGLU and rotary positions are a Llama; LayerNorm, GELU and learned positions are a GPT-2. Any other
combination has no transformers model that computes the same, and is refused.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

from meshwright.commands.import_config.option_rules import Rule, Translation, dropped, mapped, refused

MODEL_FIX = "name a transformers model that has it: --model SOURCE"
LLAMA_TRAITS = {"normalization": "RMSNorm", "swiglu": True, "position-embedding-type": "rope"}
GPT2_TRAITS = {"normalization": "LayerNorm", "swiglu": False, "position-embedding-type": "learned_absolute"}
DEFAULTS: Mapping[str, Any] = {**GPT2_TRAITS, "disable-bias-linear": False, "add-qkv-bias": False}

ARCHITECTURE: dict[str, Rule] = {
    option: mapped(f"model.{key}", reason="in the config of the model")
    for option, key in {
        "num-layers": "num_hidden_layers",
        "hidden-size": "hidden_size",
        "ffn-hidden-size": "intermediate_size",
        "num-attention-heads": "num_attention_heads",
        "group-query-attention": "num_key_value_heads",
        "num-query-groups": "num_key_value_heads",
        "kv-channels": "head_dim",
        "max-position-embeddings": "max_position_embeddings",
        "position-embedding-type": "model_type",
        "normalization": "model_type",
        "swiglu": "model_type",
        "use-rotary-position-embeddings": "model_type",
        "norm-epsilon": "rms_norm_eps",
        "rotary-base": "rope_theta",
        "vocab-size": "vocab_size",
        "padded-vocab-size": "vocab_size",
        "make-vocab-size-divisible-by": "vocab_size",
        "untie-embeddings-and-output-weights": "tie_word_embeddings",
        "disable-bias-linear": "mlp_bias",
        "add-qkv-bias": "attention_bias",
        "attention-dropout": "attention_dropout",
        "hidden-dropout": "resid_pdrop",
        "init-method-std": "initializer_range",
    }.items()
}
ARCHITECTURE |= refused("no model with it is made here", MODEL_FIX, *(
    *("rotary-interleaved", "rotary-seq-len-interpolation-factor", "use-rope-scaling", "rope-scaling-factor"),
    *("no-rope-freq", "mrope-section", "relative-attention-num-buckets", "relative-attention-max-distance"),
    *("window-size", "window-attn-skip-freq", "softmax-type", "squared-relu", "quick-geglu", "openai-gelu"),
    *("apply-layernorm-1p", "apply-residual-connection-post-layernorm", "qk-layernorm", "qk-l2-norm"),
    *("multi-latent-attention", "q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim"),
    *("v-head-dim", "rotary-scaling-factor", "mscale", "mscale-all-dim", "mtp-num-layers", "rope-type"),
    *("mtp-loss-scaling-factor", "glu-linear-offset", "activation-func-clamp-value", "spec"),
    *("heterogeneous-layers-config-path", "heterogeneous-layers-config-encoded-json", "is-hybrid-model"),
    *("hybrid-attention-ratio", "hybrid-mlp-ratio", "hybrid-override-pattern", "mamba-state-dim"),
    *("mamba-head-dim", "mamba-num-groups", "mamba-num-heads", "no-position-embedding"),
    *("embedding-init-method-std", "init-method-xavier-uniform", "bert-no-binary-head"),
    *("encoder-num-layers", "decoder-num-layers", "encoder-seq-length", "decoder-seq-length"),
    *("vocab-extra-ids", "apply-query-key-layer-scaling", "fp32-residual-connection"),
))  # fmt: skip
ARCHITECTURE |= refused("no model with it is made here", MODEL_FIX, "rotary-percent", harmless=(1.0,))
ARCHITECTURE |= dropped(
    "layers of equal results", "use-legacy-models", "use-mcore-models", "transformer-impl"
)


def transformers_config(config: Translation, tp: int) -> dict[str, Any] | None:
    """Returns the values of a config.json; None, with what is refused, if no model of transformers fits.

    `tp` ranks share the vocabulary, which Megatron pads.
    """
    traits = {name: config.get(name, DEFAULTS[name]) for name in LLAMA_TRAITS}
    if config.get("use-rotary-position-embeddings", False):
        traits["position-embedding-type"] = "rope"
    sizes = ("num-layers", "hidden-size", "num-attention-heads")
    lacking = [f"--{name}" for name in sizes if not config.is_given(name)]
    vocabulary = _vocabulary(config, tp)
    if lacking or not vocabulary:
        words = [*lacking, *(["--vocab-size"] if not vocabulary else [])]
        text = f"the sizes of the model are incomplete: {', '.join(words)} is not given"
        config.refuse(
            "num-layers", text, "add it (a tokenizer may hold the vocabulary), or give --model SOURCE"
        )
        return None
    if traits == LLAMA_TRAITS and config.get("disable-bias-linear", False):
        return _llama(config, vocabulary)
    if traits == GPT2_TRAITS and not config.get("disable-bias-linear", False):
        return _gpt2(config, vocabulary)
    text = f"{', '.join(f'{key} = {value}' for key, value in traits.items())}"
    text += ", without biases" if config.get("disable-bias-linear", False) else ", with biases"
    config.refuse("normalization", f"neither a Llama nor a GPT-2: {text}", MODEL_FIX)
    return None


def _vocabulary(config: Translation, tp: int) -> int:
    if config.is_given("padded-vocab-size"):
        return int(config.get("padded-vocab-size"))
    multiple = config.get("make-vocab-size-divisible-by", 128) * tp
    return ceil(config.get("vocab-size", 0) / multiple) * multiple


def _common(config: Translation, vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "tie_word_embeddings": not config.get("untie-embeddings-and-output-weights", False),
        "initializer_range": config.get("init-method-std", 0.02),
    }


def _positions(config: Translation) -> int:
    return int(config.get("max-position-embeddings", config.get("seq-length", 1024)))


def _llama(config: Translation, vocabulary: int) -> dict[str, Any]:
    hidden, heads = config.get("hidden-size"), config.get("num-attention-heads")
    grouped = config.get("group-query-attention", False)
    # Megatron keeps the parameters of a gated layer equal: 4 h x 2 / 3, in whole multiples of 64
    gated = int(4 * hidden * 2 / 3 / 64) * 64
    if config.get("hidden-dropout", 0.1):
        text = f"dropout of {config.get('hidden-dropout', 0.1)} in the residual stream; a Llama has none"
        config.refuse(
            "hidden-dropout", text, "accept it, or write --hidden-dropout 0 (Megatron's default is 0.1)"
        )
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": config.get("ffn-hidden-size", gated),
        "num_hidden_layers": config.get("num-layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num-query-groups", 1) if grouped else heads,
        "head_dim": config.get("kv-channels", hidden // heads),
        "max_position_embeddings": _positions(config),
        "rms_norm_eps": config.get("norm-epsilon", 1e-5),
        "rope_theta": float(config.get("rotary-base", 10000)),
        "attention_dropout": config.get("attention-dropout", 0.1),
        "attention_bias": config.get("add-qkv-bias", False),
        "mlp_bias": False,
        **_common(config, vocabulary),
    }


def _gpt2(config: Translation, vocabulary: int) -> dict[str, Any]:
    hidden, dropout = config.get("hidden-size"), config.get("hidden-dropout", 0.1)
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": hidden,
        "n_inner": config.get("ffn-hidden-size", 4 * hidden),
        "n_layer": config.get("num-layers"),
        "n_head": config.get("num-attention-heads"),
        "n_positions": _positions(config),
        "layer_norm_epsilon": config.get("norm-epsilon", 1e-5),
        "attn_pdrop": config.get("attention-dropout", 0.1),
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        **_common(config, vocabulary),
    }
