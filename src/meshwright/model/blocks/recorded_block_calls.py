"""Finds block calls of a recording that compute the same, and makes inputs like those of a block call.

    layers.0   layers.1   layers.2   layers.3        a decoder of two kinds of layers
    dense      experts    experts    experts         layers.2 and layers.3 equal layers.1

A trial that asks what a block does asks one block of each kind. Two block calls are equal if

    the modules       have the same tree of classes, attributes and shapes; only its number differs
    the inputs        have the same structure, shapes, strides and dtypes, and the same constants
    the operations    of the model's code are the same, line by line, with the same constants and parameters

so both ran the same code in the recorded forward. A block call that writes buffers, or that computes a tensor
which is used elsewhere without being returned, equals no other: what it does is more than its outputs.

Limit: a block whose code asks for its own layer number, and at other shapes than the recorded ones takes
another way than its neighbour, is not told apart.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.model.recording.forward_recording import (
    AtenOp,
    BlockEnd,
    BlockStart,
    ModuleStart,
    Opaque,
    Recording,
    TensorRecord,
    tensor_records,
)
from meshwright.model.recording.model_operations import Operation
from meshwright.model.tensors.inplace_leaf_alias import make_alias
from meshwright.model.tensors.pytree import map_leaves, named_tensors, tree_tensors, value_leaves
from meshwright.plan.model_spec.model_spec import block_call_name, block_of

LAYER_NUMBERS = frozenset(("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx", "idx"))
_CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.Size)
_INTERNALS = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))


@dataclass(eq=False)
class RecordedBlockCall:
    """One block call of a recording: what it was given by the caller and by the graph that is cut, and what
    it returned.

    `given` is None if the block's forward was called without the block.
    """

    start: BlockStart
    given: ModuleStart | None
    outputs: Any = None
    first_id: int = 0  # ids of tensors that it made: first_id to last_id
    last_id: int = 0
    is_closed: bool = True  # all that it makes leaves by its outputs

    @property
    def inputs(self) -> list[TensorRecord]:
        """The tensors that the block was given, in order."""
        return [] if self.given is None else tensor_records((self.given.args, self.given.kwargs))

    def make_inputs(self, made: "MadeTensors") -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments like the recorded ones, with tensors of `made`.

        Raises TypeError if an argument is an object that is unknown.
        """
        if self.given is None:
            raise TypeError(f"{self.start.block_call} was called by its forward")
        return tuple(made.replace(each) for each in self.given.args), made.replace(dict(self.given.kwargs))


class MadeTensors:
    """Tensors without values that stand for recorded ones."""

    def __init__(self) -> None:
        self._by_id: dict[int, torch.Tensor] = {}
        self._by_view: dict[Any, torch.Tensor] = {}

    def find(self, record: TensorRecord) -> torch.Tensor | None:
        """Returns the tensor that stands for the recorded one, or for another view of all of it."""
        found = self._by_id.get(record.id)
        return self._by_view.get(_view_key(record)) if found is None else found

    def sliced_shapes(self, records: Sequence[TensorRecord]) -> tuple[torch.Size | None, ...]:
        """Returns the shapes of the tensors that stand for `records`, where they differ from these, else
        None.
        """
        found = ((record, self.find(record)) for record in records)
        return tuple(
            None if tensor is None or tensor.shape == record.shape else tensor.shape
            for record, tensor in found
        )

    def add_outputs(self, recorded: Any, outputs: Any) -> None:
        """Lets the tensors in the `outputs` of a block call stand for the `recorded` ones."""
        records, tensors = tensor_records(recorded), tree_tensors(outputs)
        if len(records) == len(tensors):
            self._by_view |= {_view_key(record): each for record, each in zip(records, tensors, strict=True)}

    def replace(self, value: Any) -> Any:
        """Returns `value` with a tensor in place of every record; new ones are made."""
        if isinstance(value, TensorRecord):
            found = self.find(value)
            if found is None:
                if not value.is_strided:
                    raise TypeError("a sparse tensor cannot be made from its record")
                found = torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
                self._by_id[value.id] = found.requires_grad_(value.requires_grad)
            return found
        if isinstance(value, Opaque):
            raise TypeError(f"{value.text} cannot be made from its record")
        if isinstance(value, dict):
            return {key: self.replace(each) for key, each in value.items()}
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            return type(value)(self.replace(each) for each in value)
        return value


@dataclass(eq=False)
class EqualBlocksOnce:
    """Runs the first of equal block calls, and gives the others outputs like its own, without values.

    It takes the place of the blocks in a forward (`ForwardDriver.use_interceptor`) on fake tensors.
    `on_repeat(block_call, first)` is called in place of a block call; `repeated` are those so far.
    """

    equal_calls: Mapping[str, str]
    on_repeat: Callable[[str, str], None]
    repeated: set[str] = field(default_factory=set)
    _num_calls: Counter[str] = field(default_factory=Counter)
    _finished: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def __call__(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns the outputs of the next call of the block `name`."""
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        self._num_calls[name] += 1
        block_call = block_call_name(name, self._num_calls[name])
        first = self.equal_calls.get(block_call, block_call)
        given = _live_signature((args, kwargs))
        known_given, known_outputs = self._finished.get(first, (None, None))
        if known_given == given:
            self.on_repeat(block_call, first)
            self.repeated.add(block_call)
            inputs = tree_tensors((args, kwargs))
            return map_leaves(
                known_outputs,
                lambda leaf: leaf.find_or_make(inputs) if isinstance(leaf, OutputTensor) else leaf,
            )
        numbers = input_numbers((args, kwargs))
        outputs = run(*args, **kwargs)
        if first == block_call:
            self._finished[block_call] = (
                given,
                map_leaves(
                    outputs,
                    lambda leaf: OutputTensor(leaf, numbers) if isinstance(leaf, torch.Tensor) else leaf,
                ),
            )
        return outputs


class OutputTensor:
    """What a tensor that a block call returned is like: which of its inputs it is (-1: a new one), shape,
    stride, dtype, and whether it needs a gradient. It does not keep the tensor alive.
    """

    def __init__(self, tensor: torch.Tensor, input_numbers: Mapping[int, int]) -> None:
        self.input_number = input_numbers.get(id(tensor), -1)
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.needs_grad = tensor.requires_grad

    def make(self) -> torch.Tensor:
        """Returns a new tensor like it, without a gradient."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)

    def find_or_make(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the input that it is, or a new tensor like it, which the model may write in place."""
        if self.input_number >= 0:
            return inputs[self.input_number]
        return make_alias(self.make().requires_grad_(self.needs_grad))


def input_numbers(given: Any) -> dict[int, int]:
    """Returns the number of each tensor in the arguments `given`, by its id; the first of equal ones."""
    return {id(each): number for number, each in reversed([*enumerate(tree_tensors(given))])}


def call_signature(given: Any, tensor_signature: Callable[[torch.Tensor], Any]) -> Any:
    """Returns what equal arguments share: structure, constants, and `tensor_signature` of each tensor."""
    paths = tuple(path for path, _ in named_tensors(given))
    leaves = tuple(
        tensor_signature(leaf)
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        if isinstance(leaf, (*_CONSTANTS, torch.device))
        else id(leaf)
        for leaf in value_leaves(given)
    )
    return paths, leaves


def _live_signature(given: Any) -> Any:
    seen: dict[int, int] = {}

    def tensor_signature(tensor: torch.Tensor) -> Any:
        number = seen.setdefault(id(tensor), len(seen))
        return number, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad

    return call_signature(given, tensor_signature)


def _view_key(record: TensorRecord) -> Any:
    return record.storage, record.version, record.offset, record.shape, record.stride


@dataclass
class RecordedBlockCalls:
    """The block calls of a recording by name; `equal_calls` names the first equal one of those that have one
    before them.
    """

    calls: dict[str, RecordedBlockCall] = field(default_factory=dict)
    equal_calls: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        recording: Recording,
        operations: Iterable[tuple[str, Operation]],
        blocks: Mapping[str, nn.Module],
    ) -> "RecordedBlockCalls":
        """Returns the block calls of a recording of `operations` (model_operations.py), of a module with
        `blocks`.
        """
        found = cls(_find_calls(recording))
        by_call: dict[str, list[Operation]] = {}
        for block_call, operation in operations:
            by_call.setdefault(block_call, []).append(operation)
        written = {name.rpartition(".")[0] for name in recording.written_buffers}
        structures = {name: _structure(name, block) for name, block in blocks.items()}
        firsts: dict[Any, str] = {}
        for name, call in found.calls.items():
            block = block_of(name)
            writes = any(f"{owner}.".startswith(f"{block}.") for owner in written)
            given = _signature((call.start.args, call.start.kwargs))
            if not call.is_closed or call.given is None or writes or given is None:
                continue
            code = tuple(_relative(each, f"{block}.") for each in by_call.get(name, ()))
            first = firsts.setdefault((structures[block], given, code), name)
            if first != name:
                found.equal_calls[name] = first
        return found


def _find_calls(recording: Recording) -> dict[str, RecordedBlockCall]:
    """Returns the block calls, and notes those whose tensors are used elsewhere."""
    calls: dict[str, RecordedBlockCall] = {}
    finished: list[RecordedBlockCall] = []
    running: RecordedBlockCall | None = None
    pending: ModuleStart | None = None
    last_ids: list[int] = []
    newest, output_ids = 0, set[int]()
    for event in recording.events:
        if type(event) is AtenOp:
            for record in event.inputs:
                if last_ids and record.id <= last_ids[-1] and record.id not in output_ids:
                    maker = finished[bisect_left(last_ids, record.id)]
                    maker.is_closed = maker.is_closed and record.id < maker.first_id
            newest = max((newest, *(record.id for record in event.outputs)))
        elif type(event) is ModuleStart and running is None:
            pending = event if event.name in recording.blocks else pending
        elif type(event) is BlockStart:
            given = pending if pending is not None and pending.name == event.name else None
            newest = max((newest, *(each.id for each in tensor_records((event.args, event.kwargs)))))
            running = calls[event.block_call] = RecordedBlockCall(event, given, first_id=newest + 1)
            pending = None
        elif type(event) is BlockEnd and running is not None:
            returned = [each.id for each in tensor_records(event.results)]
            running.outputs, running.last_id = event.results, max((newest, *returned))
            output_ids.update(returned)
            finished.append(running)
            last_ids.append(running.last_id)
            running = None
    return calls


def _signature(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Returns what equal arguments share, tensors by shape and by which of them are the same; None if they
    hold an object that is unknown.
    """
    seen = {} if seen is None else seen
    if isinstance(value, TensorRecord):
        return (
            seen.setdefault(value.id, len(seen)),
            value.shape,
            value.stride,
            value.dtype,
            value.requires_grad,
            value.values,
        )
    if isinstance(value, Opaque):
        return None
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        found = tuple(_signature(each, seen) if each is not None else "None" for each in value)
        return None if None in found else (type(value).__name__, found)
    return type(value).__name__, repr(value)


def _relative(operation: Operation, prefix: str) -> Operation:
    return operation._replace(params=tuple(name.removeprefix(prefix) for name in operation.params))


def _structure(name: str, block: nn.Module) -> Any:
    number = next((int(part) for part in reversed(name.split(".")) if part.isdigit()), None)
    return tuple(
        (
            inner,
            type(module),
            _attributes(module, number),
            _tensors(module._parameters),
            _tensors(module._buffers),
        )
        for inner, module in block.named_modules(remove_duplicate=False)
    )


def _attributes(module: nn.Module, number: int | None) -> Any:
    return tuple(
        (key, "its number" if key in LAYER_NUMBERS and value == number else _attribute(value))
        for key, value in sorted(vars(module).items())
        if key not in _INTERNALS
    )


def _attribute(value: Any) -> Any:
    """Returns what two attributes share if they are known to be equal; objects are equal if they are one."""
    if isinstance(value, _CONSTANTS):
        return type(value).__name__, repr(value)
    if isinstance(value, (tuple, list)):
        return tuple(_attribute(each) for each in value)
    if isinstance(value, dict):  # hooks, among others
        return tuple(
            (repr(key) if isinstance(key, _CONSTANTS) else "", _attribute(value[key])) for key in value
        )
    return id(value)


def _tensors(tensors: Mapping[str, torch.Tensor | None]) -> Any:
    return tuple(
        (key, None if value is None else (value.shape, value.dtype, value.requires_grad))
        for key, value in tensors.items()
    )
