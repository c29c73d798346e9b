"""An optimizer that the user made over the parameters of a module, as a pattern for the one of a rank.

    optimizer = AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": norms}], lr=1e-3)
    a rank    = AdamW([{"params": shards of matrices, "weight_decay": 0.1}, {"params": shards of norms}], ...)

A rank steps shards, slices or masters, which are other tensors than the module's. So the optimizer is made
again: the same class, the same groups by name of parameter, the same options. What would get lost on the way
is refused: state of steps already taken, and options that are kept outside of the groups and that the
constructor does not take.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.plan.job.errors import PlanError

FACTORY_FIX = "pass what makes it: optimizer=lambda groups: {kind}(groups, ...)"
PARAM_KEYS = ("params", "param_names")


@dataclass(frozen=True)
class OptimizerTemplate:
    """The class of an optimizer, its options, and its groups: names of parameters, and options."""

    kind: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    groups: tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def make(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """Returns the same optimizer over `parameters`, by name; names that are not among them are left out.

        Raises PlanError if it would differ in an option.
        """
        groups = [
            {"params": [parameters[name] for name in names if name in parameters], **copy.deepcopy(options)}
            for names, options in self.groups
        ]
        options = inspect.signature(self.kind).parameters
        made = self.kind(groups, **{key: value for key, value in self.defaults.items() if key in options})  # type: ignore[call-arg]  the constructor of a subclass
        if differing := sorted(self._differences(made)):
            text = f"{self.kind.__name__} keeps {', '.join(differing)} where a copy of it does not get them"
            fix = FACTORY_FIX.format(kind=self.kind.__name__)
            raise PlanError(text, fix=fix, location="optimizer")
        return made

    def _differences(self, made: torch.optim.Optimizer) -> Iterator[str]:
        for group, (_, options) in zip(made.param_groups, self.groups, strict=True):
            yield from (key for key, value in options.items() if key not in group or group[key] != value)
        attributes = _attributes(made)
        yield from (
            key for key, value in self.attributes.items() if key not in attributes or attributes[key] != value
        )


def optimizer_template(optimizer: torch.optim.Optimizer, module: nn.Module) -> OptimizerTemplate:
    """Returns the template of `optimizer`, which is over parameters of `module`.

    Raises PlanError if it has taken steps, or holds a parameter that is none of the module's.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    kind, groups = type(optimizer), optimizer.param_groups
    if any(_has_stepped(state) for state in optimizer.state.values()):
        text = f"the {kind.__name__} has taken steps already, and their state would get lost"
        fix = "pass it before its first step; or continue from a checkpoint: trainer.load(folder)"
        raise PlanError(text, fix=fix, location="optimizer")
    strangers = sum(id(parameter) not in names for group in groups for parameter in group["params"])
    if strangers:
        text = f"the {kind.__name__} holds {strangers} parameters that are not of the model passed with it"
        fix = f"pass the module that it was made over, or {FACTORY_FIX.format(kind=kind.__name__)}"
        raise PlanError(text, fix=fix, location="optimizer")
    return OptimizerTemplate(
        kind,
        dict(optimizer.defaults),
        tuple(
            (
                tuple(names[id(parameter)] for parameter in group["params"]),
                {key: value for key, value in group.items() if key not in PARAM_KEYS},
            )
            for group in groups
        ),
        _attributes(optimizer),
    )


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Returns whether the state of a parameter is more than a constructor made (Adagrad's makes its sums)."""
    return bool(state) and ("step" not in state or float(state["step"]) > 0)


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the plain values that an optimizer keeps outside of its groups."""
    return {
        key: value
        for key, value in vars(optimizer).items()
        if not key.startswith("_") and isinstance(value, (bool, int, float, str, tuple, type(None)))
    }
