"""The recording of one forward: a list of events in the order in which they happened.

    ModuleStart   model.layers.0                     the call of a module, before its forward BlockStart
    model.layers.0                     the forward of a block begins, on leaves FunctionCall  linear
    llama.py:58            a torch call of the model; the next `num_inner` are inside AtenOp        aten.mm
    [3, 7, 8] -> ...       an operation below autograd SavedTensor   ...
    autograd keeps a tensor for the backward RandomDraw    model.layers.0/0                   a draw of
    random numbers TensorFreed   12                                 the last reference to a tensor is gone
    BlockEnd      model.layers.0 ModuleEnd     model.layers.0

A tensor is a `TensorRecord`: an id, the id of its storage, its version, and what its metadata were at the
time of the event; a tensor whose metadata change has several records with one id. Containers keep their
structure (a dataclass becomes a dict), and objects that are neither tensors nor constants become `Opaque`.
An analysis goes through the events in order, with its own state by tensor id, and needs neither the model nor
live tensors. So it runs as well on a recording that was saved (recording_json.py).

Limits: the autograd graph itself is not recorded; what is read off it (which block calls use a parameter)
is part of the trial (trial/fake_tensor_forward.py).

An fx graph by `make_fx` was tried as the record. It refuses every read of a value, even of real tensors
(`if mask.all():`, with which transformers' own mask code begins, so that already a plain Llama fails), and
holds neither module calls, versions, `requires_grad`, lifetimes, nor what autograd saves.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor at one time: `id` and `storage` are numbers that belong to it and to its memory alone.

    `storage_nbytes` is the size of that memory. `values` are the elements of an index tensor, where they are
    known; `is_strided` is False for a sparse tensor.
    """

    id: int
    storage: int
    version: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    storage_nbytes: int
    is_strided: bool = True
    values: tuple[int, ...] | None = None

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def numel(self) -> int:
        """Returns the number of elements."""
        return prod(self.shape)

    def is_full_view(self, other: "TensorRecord") -> bool:
        """Returns whether it has the same memory, shape and strides as `other`."""
        same = self.storage == other.storage and self.offset == other.offset
        return same and self.shape == other.shape and self.stride == other.stride


@dataclass(frozen=True, slots=True)
class Opaque:
    """An object among the arguments that is neither a tensor nor a constant, as text."""

    text: str


@dataclass(frozen=True, slots=True)
class AtenOp:
    """One operation below autograd; `block_call` is the running block call ("" in glue)."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: Any
    block_call: str
    grad_enabled: bool

    @property
    def overload(self) -> Any:
        """The operation, as torch knows it."""
        return find_overload(self.name)

    @property
    def packet(self) -> Any:
        """The operation without its overload, such as `torch.ops.aten.add`."""
        return find_overload(self.name)._overloadpacket

    @property
    def inputs(self) -> list[TensorRecord]:
        """The tensors among the arguments."""
        found: list[TensorRecord] = []
        _collect((self.args, self.kwargs), found)
        return found

    @property
    def outputs(self) -> list[TensorRecord]:
        """The tensors among the results."""
        return tensor_records(self.results)


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One call of a torch function above autograd.

    `owner` is the property that a getter or setter belongs to; `file` and `line` are those of the model's
    code, and `by_model` is False if the library makes the call. `target` is the first argument after a
    setter. The events of its inside are the next `num_inner`.
    """

    name: str
    owner: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: Any
    block_call: str
    file: str
    line: int
    by_model: bool
    grad_enabled: bool
    num_inner: int
    target: TensorRecord | None = None

    @property
    def outputs(self) -> list[TensorRecord]:
        """The tensors among the results."""
        return tensor_records(self.results)

    @property
    def inputs(self) -> list[TensorRecord]:
        """The tensors among the arguments."""
        return tensor_records((self.args, self.kwargs))

    @property
    def code_line(self) -> str:
        """The place of the call in the model's code, as "file:line"."""
        return f"{self.file.rpartition('/')[2]}:{self.line}" if self.file else "?"


@dataclass(frozen=True, slots=True)
class ModuleStart:
    """The call of a module: its arguments after its forward-pre-hooks."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    block_call: str
    grad_enabled: bool


@dataclass(frozen=True, slots=True)
class ModuleEnd:
    """The end of the call of a module: its first argument, what it returns, and what its forward returned
    before its hooks.
    """

    name: str
    args: tuple[Any, ...]
    results: Any
    own_results: Any
    block_call: str
    grad_enabled: bool


@dataclass(frozen=True, slots=True)
class BlockStart:
    """The forward of a block begins; its inputs that need gradients are leaves."""

    name: str
    block_call: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """The forward of a block returned `results`, which have not been cut yet."""

    name: str
    block_call: str
    results: Any


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Autograd saved a tensor."""

    tensor: TensorRecord
    block_call: str


@dataclass(frozen=True, slots=True)
class RandomDraw:
    """A draw of random numbers, the `number`-th since the last block call began, during `name`."""

    name: str
    number: int
    block_call: str


@dataclass(frozen=True, slots=True)
class TensorFreed:
    """The tensor `id` is no longer referenced."""

    id: int


@dataclass(frozen=True, slots=True)
class ModelRecompute:
    """A block call runs in torch.utils.checkpoint, by the model itself."""

    block_call: str


Event = (
    AtenOp
    | FunctionCall
    | ModuleStart
    | ModuleEnd
    | BlockStart
    | BlockEnd
    | SavedTensor
    | RandomDraw
    | TensorFreed
    | ModelRecompute
)


@dataclass(frozen=True)
class BlockBoundaries:
    """What the autograd graph shows at the boundaries of blocks, where it is cut.

    `output_numel` are the elements that each block call returns with a gradient, `kept_storages` the memory
    that is kept anyway: parameters, buffers, these outputs. `param_users` are the block calls that use each
    parameter, by first name (ROOT for glue), and `num_captured` the tensors that left by each side channel.
    """

    output_numel: tuple[int, ...] = ()
    kept_storages: frozenset[int] = frozenset()
    param_users: Mapping[str, frozenset[str]] = field(default_factory=dict)
    num_captured: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """A recorded forward on `num_samples` samples.

    `parameters` and `buffers` have the tensors before the forward by every name, `blocks` are the names of
    the blocks, `inner_modules` those of the modules inside of them. `layer_roles` are the roles of the
    layers whose uses are read, `layer_kinds` the kinds of the layers whose features are followed; `outputs`
    is what the forward returned. `writes_in_place`: the model writes into outputs of its blocks.
    """

    num_samples: int
    parameters: Mapping[str, TensorRecord]
    buffers: Mapping[str, TensorRecord]
    blocks: tuple[str, ...]
    inner_modules: frozenset[str]
    layer_roles: Mapping[str, str]
    layer_kinds: Mapping[str, str]
    events: Sequence[Event]
    outputs: Any
    written_buffers: tuple[str, ...] = ()
    writes_in_place: bool = False
    boundaries: BlockBoundaries = BlockBoundaries()

    def has_parameter(self, module: str, tensor: TensorRecord) -> bool:
        """Returns whether `tensor` is a parameter of a module."""
        prefix = f"{module}." if module else ""
        return any(name.startswith(prefix) for name in self._names_by_id.get(tensor.id, ()))

    @cached_property
    def _names_by_id(self) -> dict[int, list[str]]:
        names: dict[int, list[str]] = {}
        for name, record in self.parameters.items():
            names.setdefault(record.id, []).append(name)
        return names

    @cached_property
    def parameter_names(self) -> dict[int, str]:
        """The first name of each parameter, by the id of its tensor."""
        return {number: names[0] for number, names in self._names_by_id.items()}

    @cached_property
    def block_calls(self) -> tuple[str, ...]:
        """The block calls in order."""
        return tuple(event.block_call for event in self.events if type(event) is BlockStart)

    def calls(self) -> Iterator[FunctionCall]:
        """Yields the torch calls in order."""
        return (event for event in self.events if type(event) is FunctionCall)


def tensor_records(value: Any) -> list[TensorRecord]:
    """Returns the tensors in a recorded `value`, in order."""
    found: list[TensorRecord] = []
    _collect((value,), found)
    return found


def _collect(values: Any, found: list[TensorRecord]) -> None:
    for value in values:
        kind = type(value)
        if kind is TensorRecord:
            found.append(value)
        elif kind is dict:
            _collect(value.values(), found)
        elif kind is tuple or kind is list:
            _collect(value, found)


@lru_cache(maxsize=4096)
def find_overload(name: str) -> Any:
    """Returns the operation of a name such as "aten.add.Tensor"."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
