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

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from meshwright.model.recording.forward_recording import (
    FunctionCall,
    ModuleStart,
    Recording,
    TensorRecord,
    tensor_records,
)
from meshwright.model.recording.op_table import find_op
from meshwright.model.tensors.pytree import storage_id
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.step.single_device_program import CHECKPOINTED_FORWARD

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
    first = args[0] if _writes_first(name, kwargs) and args else None
    return first if isinstance(first, torch.Tensor) else None


def _writes_first(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether the torch function `name` writes into its first argument."""
    in_place = name.endswith("_") and not name.startswith("__") and name not in FLAG_FUNCTIONS
    return kwargs.get("out") is None and (in_place or find_op(name).writes_first)


def glue_write_error(name: str) -> PlanError:
    """Returns the error for the function `name` in glue, which writes where not all ranks would see it."""
    text = f"glue writes ('{name}') into a tensor of which each rank has some of the tokens"
    return PlanError(
        text,
        fix="make a new tensor there (torch.where, torch.cat, clone), or write inside a block",
        location="model",
    )


def untracked_write_lines(recording: Recording) -> list[str]:
    """Returns the lines of a model's code in which glue writes, by way of `.data`, into earlier block inputs.

    Inputs with a graph are left out: autograd itself refuses some writes.
    """
    blocks, lines = frozenset(recording.blocks), list[str]()
    memory, untracked = set[int](), set[int]()  # memory of block inputs; ids of untracked views
    for event in recording.events:
        if type(event) is ModuleStart and event.name in blocks:
            inputs = tensor_records((event.args, event.kwargs))
            memory.update(each.storage for each in inputs if not each.requires_grad)
        if type(event) is not FunctionCall or event.block_call:
            continue
        first = event.args[0] if event.args else None
        if not isinstance(first, TensorRecord):
            continue
        first_memory = (event.target or first).storage
        is_data = event.owner == "data"
        is_untracked = is_data or first.id in untracked
        is_set = is_data and event.target is not None
        is_written = is_set or _writes_first(event.name, event.kwargs)
        if is_untracked and is_written and first_memory in memory:
            lines.append(event.code_line)
        if is_untracked:
            untracked.update(each.id for each in event.outputs if each.storage == first_memory)
    return lines


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
