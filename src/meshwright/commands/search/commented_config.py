"""Writes the tables of a config with comments, ready to be read, changed and run.

For a model that is given by its sizes, `sizes_to_model_config` makes a transformers config: Llama with a
gated MLP, Starcoder2 without, both of which take any number of key/value heads; with experts Qwen3, Qwen2 if
some of them are shared, DeepSeek-V3 if attention is latent.
"""

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

import tomli_w

from meshwright.commands.search.resolve_model_sizes import LATENT_KEYS
from meshwright.parallel import STRATEGIES
from meshwright.planner.analytic.model_shape import ModelShape

COMMENTS = {
    "micro_batch": "sequences of a micro-batch",
    "model.source": "a transformers config, or file.py:factory",
    "data.source": "`verify` and `train` need it: a text file, a folder",
    "data.sequence": "tokens of a sequence",
    "train.steps": "optimizer steps",
    "train.batch": "sequences of one step, over all ranks",
    "train.clip": "largest norm of the gradient; 0: no clipping",
    "train.seed": "of initial values, order of data, dropout",
    "optimizer.lr": "not searched: choose it for your model",
    "lr_schedule.warmup": "steps",
    "lr_schedule.floor": "of optimizer.lr, at the last step",
    "precision.parameters": "what blocks compute with",
    "precision.compute": "operands of matrix products",
    "precision.reduce": "gradients in collectives",
    "precision.master": "what the optimizer updates",
    "precision.gradients": "the sum over micro-batches",
    "mesh.pp": "pipeline stages",
    "mesh.dp_replicate": "data-parallel ranks with full copies",
    "mesh.dp_shard": "data-parallel ranks that share the states",
    "mesh.ep": "ranks with different experts, and samples",
    "mesh.cp": "ranks that share the tokens of a sequence",
    "mesh.tp": "ranks that share each matrix",
    "run.folder": "checkpoints, metrics and logs",
    "run.save_every": "steps between checkpoints",
    "run.hardware": "for predicted step times",
    "run.cluster": "measured links",
}
WIDTH = 78  # of a comment
COMMENT_COLUMN = 26


def commented_config(tables: Mapping[str, Any], head: Sequence[str]) -> str:
    """Returns `tables` as TOML with comments; `head` are the first lines, as comments."""
    plain = {key: value for key, value in tables.items() if not isinstance(value, (Mapping, list))}
    comments = [f"# {line}" for text in head for line in wrap(text, WIDTH, break_long_words=False)]
    lines = [*comments, "", *_lines(plain, "")]
    for name, table in tables.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{name}]", *_lines(table, f"{name}.")]
    for strategy in tables["strategies"]:
        idea = wrap(_idea(strategy), WIDTH, break_long_words=False)
        lines += ["", *(f"# {line}" for line in idea), "[[strategies]]", *_lines(strategy, "strategies.")]
    if not tables["strategies"]:
        lines.insert(lines.index("") + 1, "strategies = []")
    return "\n".join(lines) + "\n"


def _lines(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        text = tomli_w.dumps({key: value}).strip()
        comment = COMMENTS.get(f"{prefix}{key}")
        if comment is not None and len(text) > COMMENT_COLUMN:
            yield f"# {comment}"
        is_beside = comment is not None and len(text) <= COMMENT_COLUMN
        yield f"{text:<{COMMENT_COLUMN}} # {comment}" if is_beside else text


def _idea(strategy: Mapping[str, Any]) -> str:
    modes = STRATEGIES[strategy["name"]]
    doc = modes[strategy.get("mode", next(iter(modes)))].__doc__ or ""
    return " ".join(doc.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def sizes_to_model_config(shape: ModelShape) -> dict[str, Any]:
    """Returns a transformers config with the sizes of `shape`."""
    kind, own = _family(shape)
    sizes = {
        "model_type": kind[0],
        "architectures": [kind[1]],
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn_dim,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": shape.sequence,
        "tie_word_embeddings": shape.tied,
    }
    return sizes | own


def _family(shape: ModelShape) -> tuple[tuple[str, str], dict[str, Any]]:
    """The model type and class of transformers with the parts of `shape`, and the sizes that only it has."""
    head = {"head_dim": shape.head} if shape.head else {}
    if not shape.experts:
        if shape.gated:
            return ("llama", "LlamaForCausalLM"), head
        return ("starcoder2", "Starcoder2ForCausalLM"), head | {"use_bias": False}
    experts = {"num_experts_per_tok": shape.top_k, "moe_intermediate_size": shape.expert_ffn_dim}
    if shape.kv_rank:
        latent = {theirs: vars(shape)[ours] for ours, theirs in LATENT_KEYS.items()}
        return ("deepseek_v3", "DeepseekV3ForCausalLM"), experts | latent | {
            "q_lora_rank": shape.q_rank or None,
            "n_routed_experts": shape.experts,
            "n_shared_experts": shape.shared_ffn // shape.expert_ffn_dim,
            "first_k_dense_replace": shape.dense_layers,
            "n_group": 1,
            "topk_group": 1,
        }
    experts |= {"num_experts": shape.experts, "mlp_only_layers": list(range(shape.dense_layers))}
    if shape.shared_ffn:
        shared = {"shared_expert_intermediate_size": shape.shared_ffn}
        return ("qwen2_moe", "Qwen2MoeForCausalLM"), head | experts | shared
    return ("qwen3_moe", "Qwen3MoeForCausalLM"), {"head_dim": int(shape.head_dim)} | experts
