"""Returns the torch calls that the code of a model makes in a recorded forward, without the tensors.

mlp.py:12   linear   layers.0.up.weight             runs of one forward are compared by them, and so are
mlp.py:13   mul                             0.5     two block calls
"""

import linecache
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.model.recording.forward_recording import Opaque, Recording, TensorRecord


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
            leaves = list(_leaves((call.args, call.kwargs)))
            params = tuple(
                names[leaf.id] for leaf in leaves if isinstance(leaf, TensorRecord) and leaf.id in names
            )
            constants = tuple(_constant(leaf) for leaf in leaves if not isinstance(leaf, TensorRecord))
            yield call.block_call, Operation(call.file, call.line, call.name, params, constants)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def _constant(leaf: Any) -> str:
    """Returns text that two constants share if they are equal; objects of other classes are taken as such."""
    if isinstance(leaf, Opaque):
        return leaf.text
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str)):
        return repr(leaf)
    return type(leaf).__name__
