"""Finds the results of ReLU and max pooling that autograd saves in each block call of a recorded forward.

relu      saves its result, of which its backward needs the sign; what reads the result next may save the
          same tensor, and needs its values
square    of such a result (squared ReLU): zero at the same places
max_pool2d    saves the position of each maximum, as int64
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from meshwright.model.recording.forward_recording import AtenOp, Recording, SavedTensor, TensorRecord
from meshwright.plan.model_spec.model_spec import ReluActivations

_IN_PLACE = torch.ops.aten.relu_
_RELU = (torch.ops.aten.relu, _IN_PLACE)
_SQUARE = torch.ops.aten.pow
_PRODUCT = torch.ops.aten.mul
_POOL = torch.ops.aten.max_pool2d_with_indices

_Key = tuple[int, int]  # storage and version


@dataclass
class _Result:
    """A result of ReLU or of squaring one, in `block_call`."""

    tensor: TensorRecord
    block_call: str
    awaits_own_save: bool
    has_mask: bool = False
    has_values: bool = False


@dataclass
class _ReluTensors:
    results: dict[_Key, _Result] = field(default_factory=dict)
    positions: dict[int, str] = field(default_factory=dict)  # block call by storage
    saved_positions: dict[int, int] = field(default_factory=dict)  # elements by storage


def relu_activations(recording: Recording, kept_storages: Iterable[int]) -> Iterator[ReluActivations]:
    """Yields what is saved of ReLU and max pooling, per block call that saves some.

    `kept_storages` are those that more than autograd holds: weights, inputs and outputs of block calls.
    """
    found, kept, of_samples = _ReluTensors(), {*kept_storages}, recording.num_samples
    for event in recording.events:
        if type(event) is AtenOp and event.block_call and event.grad_enabled:
            _note_op(found, event)
        elif type(event) is SavedTensor:
            _note_saved(found, event)
    for block_call in recording.block_calls:
        results = [each for each in found.results.values() if each.block_call == block_call and each.has_mask]
        indices = [
            numel for key, numel in found.saved_positions.items() if found.positions[key] == block_call
        ]
        sizes = [each.tensor.numel() for each in results]
        values = [each.tensor.numel() for each in results if each.has_values]
        freed = [each.tensor.numel() for each in results if each.tensor.storage not in kept]
        if results or indices:
            yield ReluActivations(
                block_call,
                sum(sizes) // of_samples,
                sum(freed) // of_samples,
                sum(values) // of_samples,
                max(sizes, default=0) // of_samples,
                sum(indices) // of_samples,
            )


def _note_op(found: _ReluTensors, event: AtenOp) -> None:
    if event.packet in _RELU:
        (result,) = event.outputs
        storage, version = _key(result)
        version += event.packet is _IN_PLACE  # counted after the operation
        found.results[storage, version] = _Result(result, event.block_call, awaits_own_save=True)
    elif _is_square(event) and _key(event.inputs[0]) in found.results:
        (result,) = event.outputs
        found.results[_key(result)] = _Result(result, event.block_call, awaits_own_save=False)
    elif event.packet is _POOL:
        found.positions[event.outputs[1].storage] = event.block_call


def _is_square(event: AtenOp) -> bool:
    if event.packet is _SQUARE:
        return event.args[1] == 2
    return event.packet is _PRODUCT and len({_key(each) for each in event.inputs}) == 1 < len(event.inputs)


def _note_saved(found: _ReluTensors, event: SavedTensor) -> None:
    tensor, result = event.tensor, found.results.get(_key(event.tensor))
    if tensor.storage in found.positions and not tensor.dtype.is_floating_point:
        found.saved_positions[tensor.storage] = tensor.numel()
    if result is not None and result.block_call == event.block_call:
        result.has_mask = True
        result.has_values |= not result.awaits_own_save
        result.awaits_own_save = False


def _key(tensor: TensorRecord) -> _Key:
    return tensor.storage, tensor.version
