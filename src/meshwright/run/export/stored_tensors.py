"""The tensors of a model as they are stored: names, shapes and dtypes before any value is read, then the
values of one conversion after the other.

    model of transformers    names that transformers writes; a tied tensor once; experts one by one
    model of peft            the tensors of its adapter, under peft's names
    any other module         names of its state_dict

Floating-point parameters get one dtype: the given one, or that of the first of them. Buffers, and frozen
parameters that were made in another dtype on purpose, keep their own: rounded statistics would be others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from meshwright.model.hf.declared_tp_plan import is_transformers_model
from meshwright.model.hf.peft_name_map import is_adapted
from meshwright.model.loading.deferred_init import DeferredInit
from meshwright.model.loading.weight_conversion import KeyConversion, save_conversions
from meshwright.run.export.adapter_export import adapter_tensor_names, only_adapter

ReadDtype = Callable[[str], torch.dtype]


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of `module`, which has no values. `sources` are those of its state, in the dtype in which
    they are stored, also without values; `conversions` make the stored ones of them.
    """

    module: nn.Module
    sources: Mapping[str, torch.Tensor]
    conversions: Sequence[KeyConversion]

    @classmethod
    def of_model(
        cls, deferred_init: DeferredInit, read_dtype: ReadDtype, dtype: torch.dtype | None
    ) -> "StoredTensors":
        """Returns the tensors of the model, floating-point parameters in `dtype` (None: as they are).

        `read_dtype(name)` returns the dtype of the value of a parameter.
        """
        module = deferred_init.instantiate()
        if is_adapted(module):
            return cls._of_adapter(module, read_dtype, dtype)
        sources = _sources(deferred_init, module, read_dtype, dtype)
        return cls(module, sources, save_conversions(module, sources))

    @classmethod
    def _of_adapter(
        cls, module: nn.Module, read_dtype: ReadDtype, dtype: torch.dtype | None
    ) -> "StoredTensors":
        names, state = adapter_tensor_names(module, only_adapter(module)), module.state_dict()
        sources = {}
        for name in names.values():
            kept = read_dtype(name)
            kept = dtype or kept if kept.is_floating_point else kept
            sources[name] = torch.empty(state[name].shape, dtype=kept, device="meta")
        plain = [KeyConversion(stored, ((name, name),)) for stored, name in names.items()]
        return cls(module, sources, plain)

    def without_values(self) -> dict[str, torch.Tensor]:
        """Returns the stored tensors by name, in order, on the meta device."""
        found = dict[str, torch.Tensor]()
        for conversion in self.conversions:
            found |= conversion.apply(self.module, self.sources.__getitem__)
        return found

    def convert(
        self, conversion: KeyConversion, read_value: Callable[[str], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns the stored tensors that `conversion` makes of the values of its sources, by name."""
        return conversion.apply(self.module, lambda name: read_value(name).to(self.sources[name].dtype))


def _sources(
    deferred_init: DeferredInit, module: nn.Module, read_dtype: ReadDtype, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    named = dict(module.state_dict())
    if is_transformers_model(module):
        pretrained: Any = module
        ignored = pretrained._keys_to_ignore_on_save or ()
        named = {name: tensor for name, tensor in named.items() if name not in ignored}
        named = dict(transformers.modeling_utils.remove_tied_weights_from_state_dict(named, pretrained))
    else:
        known: dict[int, str] = {}
        live = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        named = {
            name: tensor for name, tensor in named.items() if known.setdefault(id(live[name]), name) == name
        }
    parameters = {
        name for name, p in module.named_parameters(remove_duplicate=False) if p.is_floating_point()
    }
    first = next((name for name in named if name in parameters and not deferred_init.keeps_dtype(name)), None)
    sample = None if first is None else read_dtype(first)
    sources = {}
    for name, tensor in named.items():
        kept = tensor.dtype
        if name in parameters and sample is not None:
            kept = dtype or deferred_init.init_dtype(name, sample)
        sources[name] = torch.empty(tensor.shape, dtype=kept, device="meta")
    return sources
