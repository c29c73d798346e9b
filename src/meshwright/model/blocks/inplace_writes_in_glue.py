"""In-place writes in glue where a rank has some of the tokens: a gathered tensor is a copy.

    hidden[:, 0] = 0         refused: it would write some ranks' tokens only, and not the gathered ones
    hidden.mul_(2)           done on the local tokens, which stay sharded
    first = hidden[:, :1]
    first.mul_(2)            refused: on one device `hidden` would change too
    table.add_(hidden)       done with all tokens

A refused write would be lost, and on one device it is not.

    mask.data[..., 0] = 0    no version change: saved tensors and checkpointed inputs are silently wrong

The last is refused on one rank too if the plan recomputes blocks, or if stages of the model run elsewhere.
Where memory is exposed in another way (`.numpy()`), ranks with some of the tokens do not reuse for the next
layer what glue computed for one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from meshwright.model.tensors.call_description import caller_line
from meshwright.model.tensors.pytree import storage_id, tree_tensors
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.step.single_device_program import CHECKPOINTED_FORWARD

_WRITE_NAMES = (
    "setitem",
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "ifloordiv",
    "imod",
    "ipow",
    "iand",
    "ior",
    "ixor",
)
WRITE_FUNCTIONS = frozenset(f"__{each}__" for each in _WRITE_NAMES)
FLAG_FUNCTIONS = frozenset(("requires_grad_",))
UNTRACKED_ACCESS = frozenset(
    (
        "data of",
        "numpy",
        "__array__",
        "__dlpack__",
        "untyped_storage",
        "storage",
        "data_ptr",
        "__set__",
        "set_",
    )
)
"""Titles of functions that expose memory, which then is written without a version change of its tensor."""


def written_tensor(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns the tensor into which the torch function `name` (with underscores) writes; None if there is
    none.
    """
    if isinstance(kwargs.get("out"), torch.Tensor):
        return kwargs["out"]
    in_place = name in WRITE_FUNCTIONS or (
        name.endswith("_") and not name.startswith("__") and name not in FLAG_FUNCTIONS
    )
    first = args[0] if in_place and args else None
    return first if isinstance(first, torch.Tensor) else None


def glue_write_error(name: str) -> PlanError:
    """Returns the error for the function `name` in glue, which writes where not all ranks would see it."""
    text = f"glue writes ('{name}') into a tensor of which each rank has some of the tokens"
    return PlanError(
        text,
        fix="make a new tensor there (torch.where, torch.cat, clone), or write inside a block",
        location="model",
    )


class UntrackedWrites:
    """Writes in glue, by way of `.data`, into tensors that were block inputs; `lines` of the model's code."""

    def __init__(self) -> None:
        self.lines = list[str]()
        self._kept = list[torch.Tensor]()  # keeps the memory from being reused
        self._memory, self._untracked = (
            set[int](),
            set[int](),
        )  # memory of block inputs; ids of untracked views

    def add_block_inputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """Adds inputs of a block. Tensors with a graph are left out: autograd itself refuses some writes."""
        for tensor in tensors:
            if not tensor.requires_grad:
                self._kept.append(tensor)
                self._memory.add(_memory(tensor))

    def check_call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Checks a call of `func` in glue, which returned `result`."""
        name, first = func.__name__, args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is None:
            return
        is_data = name in ("__get__", "__set__") and func.__self__.__name__ == "data"
        is_untracked = is_data or id(first) in self._untracked
        target = first if is_data and name == "__set__" else written_tensor(name, args, kwargs)
        if is_untracked and target is first and _memory(first) in self._memory:
            self.lines.append(caller_line())
        for returned in tree_tensors(result) if is_untracked else ():
            if _memory(returned) == _memory(first):
                self._kept.append(returned)
                self._untracked.add(id(returned))


def untracked_write_diagnostics(plan: Plan, lines: Sequence[str]) -> Iterator[Diagnostic]:
    """Yields diagnostics of `plan` for glue that writes, in these `lines`, without a version change."""
    recomputes = CHECKPOINTED_FORWARD in plan.program.kinds
    if lines and (
        recomputes or plan.sharding.block_calls_by_pp_rank or plan.sharding.sequence_sharding is not None
    ):
        text = (
            f"glue writes through '.data' into an earlier input of a block (at {lines[0]}), without a "
            "version change"
        )
        yield Diagnostic(
            text, "make a new tensor there (torch.where, clone), or write into the tensor itself", "model"
        )


class GatheredTensors:
    """Gathered tensors that glue received in a trial, where they share memory with the sharded ones."""

    def __init__(self, sharded_type: type[torch.Tensor]) -> None:
        self._sharded_type = sharded_type
        self._kept = list[torch.Tensor]()  # keeps the memory from being reused
        self._memory = set[int]()

    def add(self, tensor: torch.Tensor) -> None:
        """Adds a tensor that glue receives."""
        self._kept.append(tensor)
        self._memory.add(_memory(tensor))

    def check_write(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises PlanError if the function `name` in glue writes into one of them."""
        target = written_tensor(name, args, kwargs)
        if target is not None and type(target) is not self._sharded_type and _memory(target) in self._memory:
            raise glue_write_error(name)


def _memory(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return storage_id(tensor)
