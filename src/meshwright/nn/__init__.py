"""Layers for users' own models: plain PyTorch modules, which compute the same under every plan.

mixture_of_experts  the layer: router, experts, shared expert, losses of the router
experts             the experts: their weights, and the computation of the rows that they are given
grouped_linear      one matrix product per group of rows
router              the scores of all experts for a token
whole_samples       something that is computed of all tokens of a sample
routing             which experts a token goes to, one file per paper

A name is imported on first use, as those of `meshwright`.
"""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "ExpertChoice": "routing.expert_choice",
    "ExpertMLP": "experts",
    "Experts": "experts",
    "GShard": "routing.gshard",
    "MixtureOfExperts": "mixture_of_experts",
    "Router": "router",
    "RouterLosses": "routing.losses",
    "Routes": "routing.routes",
    "Routing": "routing.routes",
    "SigmoidGroups": "routing.sigmoid_groups",
    "Switch": "routing.switch",
    "TopK": "routing.top_k",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        text = f"module 'meshwright.nn' has no attribute '{name}'; it has {', '.join(__all__)}"
        raise AttributeError(text)
    return vars(import_module(f"meshwright.nn.{_MODULE_OF[name]}"))[name]


def __dir__() -> list[str]:
    return list(__all__)
