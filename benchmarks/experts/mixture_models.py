"""Small mixtures of experts for random plans: families of transformers, and every routing of the layer.

    families   those of `expert_parity`, unmodified, with 6 heads and 4 layers, so that 4 stages and 6 ranks
               of tensor parallelism have uneven parts
    routings   a Llama of the same sizes whose MLPs are `meshwright.nn.MixtureOfExperts`

BIASED names those with biases of the choice, for `loss_free_balancing`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import transformers
from torch import nn

from benchmarks.experts.expert_parity import FAMILIES
from benchmarks.tensor_parallel.tensor_families import ODD, model_of, named
from meshwright.nn import (
    ExpertChoice,
    ExpertMLP,
    GShard,
    MixtureOfExperts,
    Routing,
    SigmoidGroups,
    Switch,
    TopK,
)

SIZES: Mapping[str, Any] = {
    **{"vocab_size": ODD["vocab"], "num_hidden_layers": 4, "num_attention_heads": 6, "use_cache": False},
    "experts_implementation": "eager",  # grouped products take no odd sizes in bfloat16
}
ROUTINGS: Mapping[str, Routing] = MappingProxyType(
    {
        "llama, top-k": TopK(2),
        "llama, GShard": GShard(1.0, 3, "random"),
        "llama, Switch": Switch(1.0, noise_size=0.3),
        "llama, expert choice": ExpertChoice(),
        "llama, sigmoid groups": SigmoidGroups(2, 3, 2),
    }
)
BIASED = ("DeepSeek-V3", "GLM-4-MoE", "llama, sigmoid groups")


def _family(architecture: str, fields: Mapping[str, Any]) -> nn.Module:
    sizes = {**fields, **SIZES, "num_key_value_heads": 6 if "kv_lora_rank" in fields else 3}
    if "head_dim" in fields:
        sizes["head_dim"] = ODD["head"]
    model = getattr(transformers, f"{architecture}ForCausalLM")
    return model(model.config_class(**sizes))


def _llama(routing: Routing) -> nn.Module:
    model: Any = model_of(named("llama"), num_hidden_layers=4)
    num_experts = 6 if isinstance(routing, SigmoidGroups) else 5
    for layer in model.get_submodule("model.layers").children():
        layer.mlp = MixtureOfExperts(
            ODD["hidden"], 12, num_experts, routing, ExpertMLP(bias=True), shared_intermediate=7
        )
    return model


MIXTURES: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        **{name: partial(_family, *family) for name, family in FAMILIES.items()},
        **{name: partial(_llama, routing) for name, routing in ROUTINGS.items()},
    }
)
