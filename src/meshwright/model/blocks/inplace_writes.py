"""Writing in glue, where a rank has some of the tokens: what is brought together is another tensor than what it came from.

    hidden[:, 0] = 0         refused: of the tokens apart, some would be written, and who asks for all of them gets others
    hidden.mul_(2)           done on the tokens that are here, and apart as before
    first = hidden[:, :1]
    first.mul_(2)            refused: on one device `hidden` would see it
    table.add_(hidden)       done with all tokens

What is refused would be lost, and on one device it is not.

    mask.data[..., 0] = 0    nobody is told: what autograd, a run that is made again, or a rank has kept of it is not what it was

The last is refused on one rank too where runs are made again, or parts of the model run elsewhere. Where memory is handed out in
another way (`.numpy()`), ranks with some of the tokens keep nothing for the next layer of what was made of glue for one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from meshwright.model.tensors.function_modes import caller_line
from meshwright.model.tensors.pytree import storage_id, tree_tensors
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.step.single_device import CHECKPOINTED_FORWARD

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
"""Titles of functions that hand out memory, which then is written without a new version of its tensor."""


def written_tensor(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor into which torch's function of this name, underscores and all, writes; None where it makes a new one."""
    if isinstance(kwargs.get("out"), torch.Tensor):
        return kwargs["out"]
    within = name in WRITE_FUNCTIONS or (
        name.endswith("_") and not name.startswith("__") and name not in FLAG_FUNCTIONS
    )
    first = args[0] if within and args else None
    return first if isinstance(first, torch.Tensor) else None


def glue_write_error(name: str) -> PlanError:
    """What to raise where glue writes, by the function `name`, and not all would see it."""
    text = f"glue writes ('{name}') into a tensor of which each rank has some of the tokens"
    return PlanError(
        text,
        fix="make a new tensor there (torch.where, torch.cat, clone), or write within a block",
        location="model",
    )


class UntrackedWrites:
    """Writes in glue, by way of `.data`, into tensors that blocks were given before; `lines` are those of the model's code."""

    def __init__(self) -> None:
        self.lines = list[str]()
        self._kept = list[torch.Tensor]()  # so that nobody else gets the memory
        self._memory, self._untracked = (
            set[int](),
            set[int](),
        )  # what was given; by identity, tensors that nobody hears of

    def add_block_inputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """A block is given these. What has a graph is left out: autograd itself refuses some of it."""
        for tensor in tensors:
            if not tensor.requires_grad:
                self._kept.append(tensor)
                self._memory.add(_memory(tensor))

    def check_call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Glue has called `func`, which gave `result`."""
        name, first = func.__name__, args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is None:
            return
        about = name in ("__get__", "__set__") and func.__self__.__name__ == "data"
        hidden = about or id(first) in self._untracked
        into = first if about and name == "__set__" else written_tensor(name, args, kwargs)
        if hidden and into is first and _memory(first) in self._memory:
            self.lines.append(caller_line())
        for made in tree_tensors(result) if hidden else ():
            if _memory(made) == _memory(first):
                self._kept.append(made)
                self._untracked.add(id(made))


def untracked_write_diagnostics(plan: Plan, lines: Sequence[str]) -> Iterator[Diagnostic]:
    """What is wrong with `plan` for glue that writes, in these `lines`, and nobody is told."""
    again = CHECKPOINTED_FORWARD in plan.program.kinds
    if lines and (
        again or plan.sharding.block_calls_by_pp_rank or plan.sharding.sequence_sharding is not None
    ):
        text = f"glue writes by way of '.data' into a tensor that a block was given before (at {lines[0]}), and nobody is told"
        yield Diagnostic(
            text, "make a new tensor there (torch.where, clone), or write into the tensor itself", "model"
        )


class GatheredTensors:
    """What glue was given of tokens that are `apart`, a kind of tensor, in a trial where that is the same memory."""

    def __init__(self, sharded_type: type[torch.Tensor]) -> None:
        self._sharded_type = sharded_type
        self._kept = list[torch.Tensor]()  # so that nobody else gets the memory
        self._memory = set[int]()

    def add(self, tensor: torch.Tensor) -> None:
        """Glue is given `tensor`."""
        self._kept.append(tensor)
        self._memory.add(_memory(tensor))

    def check_write(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise PlanError where glue, by the function `name`, writes into some of it."""
        into = written_tensor(name, args, kwargs)
        if into is not None and type(into) is not self._sharded_type and _memory(into) in self._memory:
            raise glue_write_error(name)


def _memory(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return storage_id(tensor)
