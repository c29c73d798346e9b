"""Returns the torch calls that the code of a model makes in a forward, without the tensors.

mlp.py:12   linear   layers.0.up.weight             runs of one forward are compared by them, and so are
mlp.py:13   mul                             0.5     two block calls

They are read off a recording, or noted while a forward runs of which nothing else is asked: that is cheaper.
"""

import linecache
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.model.recording.forward_recording import Opaque, Recording, TensorRecord
from meshwright.model.recording.record_forward import CONSTANTS, calling_frame, text_of_object
from meshwright.model.tensors.pytree import dataclass_items, is_dataclass_instance, tree_tensors


class Operation(NamedTuple):
    """One call of a torch function by a model: file and line, name, the parameters and constants it takes."""

    file: str
    line: int
    name: str
    params: tuple[str, ...]
    constants: tuple[str, ...]

    @property
    def code(self) -> str:
        """The line of code that makes the call, with its place."""
        return f"{Path(self.file).name}:{self.line} is {linecache.getline(self.file, self.line).strip()}"

    @property
    def title(self) -> str:
        """The name of the function, with the parameters that it takes."""
        return f"'{self.name}' of {', '.join(self.params)}" if self.params else f"'{self.name}'"


class OperationRecorder(TorchFunctionMode):
    """While active (`with`), notes the `operations` that the code of `module` calls, as a recording does.

    `of_labels` are the numbers of those that take no tensors but `labels`, and what was made of these alone.
    """

    def __init__(self, module: nn.Module, labels: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.of_labels: set[int] = set()
        self._labels = {id(each): each for each in labels}  # alive, so that no id is used twice
        self._params = {id(parameter): name for name, parameter in module.named_parameters()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        frame, by_model = calling_frame(sys._getframe(1))
        leaves = list(_live_leaves((args, kwargs)))
        tensors = [id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        of_labels = bool(tensors) and self._labels.keys() >= set(tensors)
        if by_model:
            if of_labels:
                self.of_labels.add(len(self.operations))
            params = tuple(self._params[key] for key in tensors if key in self._params)
            constants = tuple(_constant(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
            file, line = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
            self.operations.append(Operation(file, line, func.__name__, params, constants))
        result = func(*args, **kwargs)
        if of_labels:
            self._labels |= {id(each): each for each in tree_tensors(result)}
        return result


def model_operations(recording: Recording) -> list[Operation]:
    """Returns the operations that the code of a model calls, those of the library left out."""
    return [operation for _, operation in block_operations(recording)]


def block_operations(recording: Recording) -> Iterator[tuple[str, Operation]]:
    """Yields the operations that the code of a model calls, each with the block call that it is part of ("":
    glue).
    """
    names = recording.parameter_names
    for call in recording.calls():
        if call.by_model:
            leaves = list(recorded_leaves((call.args, call.kwargs)))
            params = tuple(
                names[leaf.id] for leaf in leaves if isinstance(leaf, TensorRecord) and leaf.id in names
            )
            constants = tuple(_constant(leaf) for leaf in leaves if not isinstance(leaf, TensorRecord))
            yield call.block_call, Operation(call.file, call.line, call.name, params, constants)


def recorded_leaves(value: Any) -> Iterator[Any]:
    """Yields the tensors and constants in a recorded `value`, in order."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from recorded_leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from recorded_leaves(item)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def _live_leaves(value: Any) -> Iterator[Any]:
    """Yields the leaves of arguments as `recorded_leaves` yields those of recorded ones, tensors included."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, slice):
        for bound in (value.start, value.stop, value.step):
            yield Opaque(type(bound).__name__) if isinstance(bound, torch.Tensor) else bound
    elif type(value) in CONSTANTS:
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _live_leaves(item)
    elif isinstance(value, dict) or is_dataclass_instance(value):
        for item in (value if isinstance(value, dict) else dataclass_items(value)).values():
            yield from _live_leaves(item)
    else:
        yield Opaque(text_of_object(value))


def _constant(leaf: Any) -> str:
    """Returns text that two constants share if they are equal; objects of other classes are taken as such."""
    if isinstance(leaf, Opaque):
        return leaf.text
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str)):
        return repr(leaf)
    return type(leaf).__name__
