"""The user's model while ranks of a plan train it: its parameters have no memory, and then the new values.

    before train     parameters hold values     the truth; ranks read their shares from here
    in train         one element each, NaN      the values are on the ranks
    after train      parameters hold values     gathered from the ranks, into the same Parameter objects

Parameters keep their identity, shape and dtype, so optimizers and ties that refer to them stay valid. Old
values would be a silent fault wherever somebody reads them; so calling the model or its state_dict says where
the values are, and any other use gives NaN.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from meshwright.plan.job.errors import PlanError

RELEASED_FIX = (
    "use `with trainer.full_params() as model: ...` on every rank, or trainer.save_model(folder), or wait "
    "for the end of train()"
)


class ReleasedParameters:
    """Takes the memory of the parameters of `module`, until `restore`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = dict(module.named_parameters())
        self._devices = {name: parameter.device for name, parameter in self._parameters.items()}
        for parameter in self._parameters.values():
            blank = torch.nan if parameter.is_floating_point() or parameter.is_complex() else 0
            parameter.grad = None
            parameter.data = parameter.detach().new_full((), blank).expand(parameter.shape)
        self._hooks = (
            module.register_forward_pre_hook(_refuse_forward, with_kwargs=True),
            module.register_state_dict_pre_hook(_refuse_state_dict),
        )

    def restore(self, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        """Gives the parameters memory and the values `parameters`, and sets `buffers`; by full name."""
        for hook in self._hooks:
            hook.remove()
        for name, parameter in self._parameters.items():
            value = parameters[name]
            parameter.data = torch.empty(
                value.shape, dtype=parameter.dtype, device=self._devices[name]
            ).copy_(value)
        own = dict(self._module.named_buffers())
        with torch.no_grad():
            for name, value in buffers.items():
                own[name].copy_(value)


def _refuse_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _released("is called")


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise _released("is asked for its state_dict")


def _released(use: str) -> PlanError:
    text = f"the model {use} while MeshwrightTrainer trains it; its parameters are on the ranks of the plan"
    return PlanError(text, fix=RELEASED_FIX, location="model")
