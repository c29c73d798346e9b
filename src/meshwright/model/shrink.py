"""A scaled-down copy of a transformers model: the same architecture, so the same code, at a size that verifies in seconds."""

from dataclasses import replace
from typing import Any

from meshwright.core.errors import PlanError
from meshwright.core.job import Job
from meshwright.model.sources import load_model

LAYERS, WIDTH_PER_HEAD, HEADS, SEQUENCE = 2, 8, 4, 48


def shrunk(job: Job) -> Job:
    """`job` with a model of 2 layers, at most 4 heads of width 8, on samples of at most 48 tokens; the rest stays.

    Raises PlanError for a model that comes from a factory: only its author knows its sizes.
    """
    if ".py" in job.model.source:
        fix = "write a second factory with smaller sizes, and verify that"
        raise PlanError("a model from a factory cannot be scaled down", fix=fix, where="--shrink")
    config: Any = load_model(job.model, job.train.seed).blueprint.instance().config
    names = {**{key: key for key in config.to_dict()}, **config.attribute_map}
    now = {key: config.to_dict().get(name) for key, name in names.items()}
    heads = min(HEADS, now.get("num_attention_heads") or HEADS)
    width = heads * WIDTH_PER_HEAD
    kv_heads = max(1, heads * (now.get("num_key_value_heads") or heads) // (now.get("num_attention_heads") or heads))
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": width}
    sizes |= {"head_dim": WIDTH_PER_HEAD, "intermediate_size": 3 * width}
    known = {key: size for key, size in sizes.items() if now.get(key) is not None}
    data = replace(job.data, sequence=min(job.data.sequence, SEQUENCE))
    return replace(job, model=replace(job.model, overrides={**job.model.overrides, **known}), data=data)
