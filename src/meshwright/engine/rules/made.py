"""The optimizer that a job names, over groups of parameters: torch's own, fused (one pass over memory), or a rule of ours."""

from typing import Any

import torch

from meshwright.core.job import Optimizer, RuleName
from meshwright.engine.rules.adafactor import Adafactor
from meshwright.engine.rules.block_adamw import BlockAdamW
from meshwright.engine.rules.lean_adamw import LeanAdamW
from meshwright.engine.rules.lion import Lion
from meshwright.engine.rules.muon import Muon


def made(rule: RuleName, momentum: float, spec: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """`rule` over `groups`, which say their learning rates and weight decays; all else is as `spec` has it."""
    lr, betas, eps = spec.lr, spec.betas, spec.eps
    match rule:
        case "sgd":
            return torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=True)
        case "adamw":
            return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
        case "adamw_bf16":
            return LeanAdamW(groups, lr, betas, eps)
        case "adamw_8bit":
            return BlockAdamW(groups, lr, betas, eps)
        case "lion":
            return Lion(groups, lr, betas)
        case "lion_bf16":
            return Lion(groups, lr, betas, torch.bfloat16)
        case "adafactor":
            return Adafactor(groups, lr)
        case "muon":
            return Muon(groups, lr, momentum)
