"""The parameters of a module that the user built, as the initial values of ranks: read where they lie.

A copy of the module has the same layers and no values; each rank reads the rows that it keeps from the
user's own parameters when it builds its part. So a process holds the user's module and a rank's share, and no
third copy.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from meshwright.model.loading.loader import LoadedModel, load_factory
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import PretrainedSource


class ModuleWeights:
    """The parameters of a module by name; `read` copies what they hold at that moment."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters: Mapping[str, nn.Parameter] = dict(module.named_parameters(remove_duplicate=False))

    @property
    def pretrained_source(self) -> PretrainedSource | None:
        """None: they are in memory."""
        return None

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def read(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rows: range | None = None,
    ) -> torch.Tensor:
        """Returns a copy of the parameter `name`, or of its `rows` along dim 0, in `dtype` on `device`.

        Floating-point values are cast to `dtype`; others keep their own.
        """
        value = self._parameters[name].detach()
        value = value if rows is None else value[rows.start : rows.stop]
        wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return torch.empty(value.shape, dtype=wanted, device=device).copy_(value)


def load_in_place(module: nn.Module, seed: int) -> LoadedModel:
    """Returns the model of `module`, whose initial values are read from its parameters when they are
    needed.

    Raises PlanError for a module under torch.compile, whose parameters have other names than the model's.
    """
    loaded = load_factory(lambda: _copy_without_values(module), seed, type(module).__name__)
    weights = ModuleWeights(module)
    if unknown := [name for name in loaded.deferred_init.logical_params if name not in weights]:
        text = f"{unknown[0]} of the model is no parameter of the module passed"
        fix = "pass the model before torch.compile(...): its blocks run as they are"
        raise PlanError(text, fix=fix, location="model")
    return replace(loaded, deferred_init=loaded.deferred_init.with_weights(weights))


def _copy_without_values(module: nn.Module) -> nn.Module:
    """Returns a deep copy of `module` whose parameters have one element of memory."""
    memo: dict[int, object] = {}
    for parameter in module.parameters():
        blank = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        memo[id(parameter)] = nn.Parameter(blank, requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)
