"""Finds the tensors of a recording that have the dtype of the parameters, whatever dtype these get.

    embed.weight --> embedding --> mul 8.0 --> select      as the parameters
                               --> float() --> mul         float32, also if the parameters are bfloat16

All of a recording is in one dtype, in which `x.float()` and `x.to(y.dtype)` look alike. So nothing that a
call returns which may name a dtype is among those found, nor what is computed of it.
"""

from collections.abc import Collection
from typing import Any

import torch

from meshwright.model.recording.forward_recording import AtenOp, Recording, TensorRecord, tensor_records
from meshwright.model.recording.model_operations import recorded_leaves

CASTS = frozenset(("to", "type", "type_as", "float", "double", "half", "bfloat16"))


def tensors_in_parameter_dtype(recording: Recording, other_dtype: Collection[str]) -> frozenset[int]:
    """Returns the ids of these tensors; the parameters `other_dtype` keep their own."""
    cast = {
        record.id
        for call in recording.calls()
        if call.name in CASTS or _names_dtype((call.args, call.kwargs))
        for record in call.outputs
    }
    parameters = {
        record.id
        for name, record in recording.parameters.items()
        if name not in other_dtype and record.dtype.is_floating_point
    }
    found = parameters - cast
    for event in recording.events:
        if type(event) is not AtenOp or _names_dtype((event.args, event.kwargs)):
            continue
        inputs = {record.id for record in event.inputs if record.dtype.is_floating_point}
        if inputs and inputs <= found:
            # the others of a kernel are its statistics, which may have a dtype of their own
            found.update(record.id for record in tensor_records(event.results)[:1] if record.id not in cast)
    return frozenset(found)


def _names_dtype(value: Any) -> bool:
    leaves = recorded_leaves(value)
    return any(isinstance(leaf, torch.dtype) for leaf in leaves if not isinstance(leaf, TensorRecord))
