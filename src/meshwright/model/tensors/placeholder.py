"""A tensor that another part of the model makes: its shape, dtype and device, and a name instead of numbers.

hidden = model.embed(ids)          of another part: a Foreign, made by a stub
hidden.shape, hidden.device        as they would be
torch.zeros_like(hidden)           real: nothing but its shape is looked at
hidden * 8                         a Foreign again, whose name and shape the course of the forward tells
hidden.sum().item()                a fault that names it
"""

from typing import Any, Protocol

import torch

from meshwright.model.tensors.pytree import tensors


class Knows(Protocol):
    """A run of a part: what is to be done where somebody computes with a Foreign of it."""

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outcome of `func` on arguments among which there is a Foreign."""

    def unknown(self, what: str, name: str) -> Exception:
        """The error for `what`, a computation that needs the numbers of the value `name`."""


class Foreign(torch.Tensor):
    """The value of that name in a forward, which `run` runs a part of, without its numbers."""

    value: str
    run: Knows
    needed: bool

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the value needs a gradient: autograd itself knows nothing of it."""
        return self.needed

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Foreign({self.value!r})"

    def __format__(self, format_spec: str) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = foreigns((args, kwargs))
        if not found:  # a property that torch asks for with the tensor somewhere else
            return natively(func, args, kwargs)
        return found[0].run.compute(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out `func`
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        one = foreigns((args, kwargs or {}))[0]
        raise one.run.unknown(func.overloadpacket.__name__, one.value)


def foreign(name: str, run: Knows, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, needed: bool) -> Foreign:
    """A Foreign of this shape, dtype and device; `needed` says whether the value needs a gradient."""
    made: Any = torch.Tensor._make_wrapper_subclass(Foreign, shape, dtype=dtype, device=device)
    made.value, made.run, made.needed = name, run, needed
    return made


def foreigns(value: Any) -> list[Foreign]:
    """Those among the tensors in `value`."""
    return [tensor for tensor in tensors(value) if type(tensor) is Foreign]


def natively(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch says of a Foreign itself: shape, dtype, device; whatever needs its numbers fails."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
