"""Optimizers over logical parameters: torch's own fused ones, with groups by name.

The state is saved and restored by logical name (`exp_avg/lm_head.weight`), so that it survives any change of layout.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from meshwright.core.errors import PlanError
from meshwright.core.job import Optimizer

Groups = list[dict[str, Any]]
MakeOptimizer = Callable[[Groups], torch.optim.Optimizer]


def parameter_groups(spec: Optimizer, parameters: Mapping[str, nn.Parameter]) -> Groups:
    """Groups of parameters with equal learning rate and weight decay, for torch.optim.

    The first pattern of `spec.groups` that matches a parameter's logical name decides; without one, 1-D parameters
    (norms, biases) take no decay. Raises PlanError for patterns that match nothing.
    """
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    unused = {group.pattern for group in spec.groups}
    for name, parameter in parameters.items():
        lr, decay = spec.lr, spec.weight_decay if parameter.ndim > 1 else 0.0
        rule = next((group for group in spec.groups if fnmatchcase(name, group.pattern)), None)
        if rule is not None:
            unused.discard(rule.pattern)
            lr = spec.lr * rule.lr_factor
            decay = decay if rule.weight_decay is None else rule.weight_decay
        group = groups.setdefault((lr, decay), {"params": [], "lr": lr, "weight_decay": decay})
        group["params"].append(parameter)
    if unused:
        text = (
            f"the patterns {', '.join(sorted(unused))} match no trainable parameter (or an earlier pattern takes all of theirs)"
        )
        raise PlanError(
            text, fix=f"write patterns such as '*.weight'; a name here is '{next(iter(parameters))}'", where="optimizer.groups"
        )
    return list(groups.values())


def make_optimizer(spec: Optimizer, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW or SGD as `spec` says, fused: one pass over memory per step."""
    groups = parameter_groups(spec, parameters)
    if spec.name == "sgd":
        return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, fused=True)
    return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)


def state_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """The optimizer's state by `key/logical name`; non-tensor numbers as 0-dim float64 tensors."""
    found = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state[parameter].items() if parameter in optimizer.state else ():
            if value is not None:
                found[f"{key}/{name}"] = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
    return found


def restore_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], saved: Mapping[str, torch.Tensor]
) -> None:
    """Put `saved` (as `state_tensors` gave it) back, on each parameter's device; `step` counters stay where torch wants them."""
    for entry, tensor in saved.items():
        key, _, name = entry.partition("/")
        parameter = parameters[name]
        device = torch.device("cpu") if tensor.ndim == 0 and parameter.device.type == "cpu" else parameter.device
        optimizer.state[parameter][key] = tensor.to(device)
