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

from meshwright.model.tensors.function_modes import where
from meshwright.model.tensors.pytree import storage_of, tensors
from meshwright.plan.job.errors import Fault, PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.step.single_device import LEAN

_WRITES = ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")
WRITES = frozenset(f"__{each}__" for each in _WRITES)
FLAGS = frozenset(("requires_grad_",))
BEHIND = frozenset(("data of", "numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "data_ptr", "__set__", "set_"))
"""Titles of functions that hand out memory, which then is written without a new version of its tensor."""


def written(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor into which torch's function of this name, underscores and all, writes; None where it makes a new one."""
    if isinstance(kwargs.get("out"), torch.Tensor):
        return kwargs["out"]
    within = name in WRITES or (name.endswith("_") and not name.startswith("__") and name not in FLAGS)
    first = args[0] if within and args else None
    return first if isinstance(first, torch.Tensor) else None


def refused(name: str) -> PlanError:
    """What to raise where glue writes, by the function `name`, and not all would see it."""
    text = f"glue writes ('{name}') into a tensor of which each rank has some of the tokens"
    return PlanError(text, fix="make a new tensor there (torch.where, torch.cat, clone), or write within a block", where="model")


class Behind:
    """Writes in glue, by way of `.data`, into tensors that blocks were given before; `lines` are those of the model's code."""

    def __init__(self) -> None:
        self.lines = list[str]()
        self._kept = list[torch.Tensor]()  # so that nobody else gets the memory
        self._memory, self._out = set[int](), set[int]()  # what was given; by identity, tensors that nobody hears of

    def give(self, some: Iterable[torch.Tensor]) -> None:
        """A block is given these. What has a graph is left out: autograd itself refuses some of it."""
        for tensor in some:
            if not tensor.requires_grad:
                self._kept.append(tensor)
                self._memory.add(_memory(tensor))

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Glue has called `func`, which gave `result`."""
        name, first = func.__name__, args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is None:
            return
        about = name in ("__get__", "__set__") and func.__self__.__name__ == "data"
        hidden = about or id(first) in self._out
        into = first if about and name == "__set__" else written(name, args, kwargs)
        if hidden and into is first and _memory(first) in self._memory:
            self.lines.append(where())
        for made in tensors(result) if hidden else ():
            if _memory(made) == _memory(first):
                self._kept.append(made)
                self._out.add(id(made))


def unseen_faults(plan: Plan, lines: Sequence[str]) -> Iterator[Fault]:
    """What is wrong with `plan` for glue that writes, in these `lines`, and nobody is told."""
    again = LEAN in plan.program.kinds
    if lines and (again or plan.space.stages or plan.space.deal is not None):
        text = f"glue writes by way of '.data' into a tensor that a block was given before (at {lines[0]}), and nobody is told"
        yield Fault(text, "make a new tensor there (torch.where, clone), or write into the tensor itself", "model")


class Brought:
    """What glue was given of tokens that are `apart`, a kind of tensor, in a trial where that is the same memory."""

    def __init__(self, apart: type[torch.Tensor]) -> None:
        self._apart = apart
        self._kept = list[torch.Tensor]()  # so that nobody else gets the memory
        self._memory = set[int]()

    def add(self, tensor: torch.Tensor) -> None:
        """Glue is given `tensor`."""
        self._kept.append(tensor)
        self._memory.add(_memory(tensor))

    def watch(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise PlanError where glue, by the function `name`, writes into some of it."""
        into = written(name, args, kwargs)
        if into is not None and type(into) is not self._apart and _memory(into) in self._memory:
            raise refused(name)


def _memory(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return storage_of(tensor)
