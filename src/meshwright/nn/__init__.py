"""Layers for users' own models: plain PyTorch modules, which compute the same under every plan.

mixture_of_experts  the layer: router, experts, shared experts, losses of the router
experts             the experts: their weights, and the computation of the rows that they are given
grouped_linear      one matrix product per group of rows
router              the scores of all experts for a token
routing             which experts a token goes to, one file per paper
"""

from meshwright.nn.experts import ExpertMLP, Experts
from meshwright.nn.mixture_of_experts import MixtureOfExperts
from meshwright.nn.router import Router
from meshwright.nn.routing.expert_choice import ExpertChoice
from meshwright.nn.routing.gshard import GShard
from meshwright.nn.routing.losses import RouterLosses
from meshwright.nn.routing.routes import Routes, Routing
from meshwright.nn.routing.sigmoid_groups import SigmoidGroups
from meshwright.nn.routing.switch import Switch
from meshwright.nn.routing.top_k import TopK

__all__ = [
    "ExpertChoice",
    "ExpertMLP",
    "Experts",
    "GShard",
    "MixtureOfExperts",
    "Router",
    "RouterLosses",
    "Routes",
    "Routing",
    "SigmoidGroups",
    "Switch",
    "TopK",
]
