"""A tensor that another part of the model makes: its shape, dtype and device, and a name instead of numbers.

hidden = model.embed(ids)          of another part: a Foreign, made by a stub
hidden.shape, hidden.device        as they would be
torch.zeros_like(hidden)           real: nothing but its shape is looked at
hidden * 8                         a Foreign again, whose name and shape the course of the forward tells
hidden.sum().item()                a fault that names it
"""

from typing import Any, Protocol

import torch

from meshwright.model.tensors.pytree import tree_tensors


class PlaceholderHandler(Protocol):
    """A run of a part: what is to be done where somebody computes with a Foreign of it."""

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outcome of `func` on arguments among which there is a Foreign."""

    def missing_value_error(self, computation: str, name: str) -> Exception:
        """The error for `what`, a computation that needs the numbers of the value `name`."""


class PlaceholderTensor(torch.Tensor):
    """The value of that name in a forward, which `run` runs a part of, without its numbers."""

    value_name: str
    handler: PlaceholderHandler
    needs_grad: bool

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the value needs a gradient: autograd itself knows nothing of it."""
        return self.needs_grad

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Foreign({self.value_name!r})"

    def __format__(self, format_spec: str) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = find_placeholders((args, kwargs))
        if not found:  # a property that torch asks for with the tensor somewhere else
            return call_without_override(func, args, kwargs)
        return found[0].handler.compute(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out `func`
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        one = find_placeholders((args, kwargs or {}))[0]
        raise one.handler.missing_value_error(func.overloadpacket.__name__, one.value_name)


def make_placeholder(
    name: str,
    handler: PlaceholderHandler,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    needs_grad: bool,
) -> PlaceholderTensor:
    """A Foreign of this shape, dtype and device; `needed` says whether the value needs a gradient."""
    made: Any = torch.Tensor._make_wrapper_subclass(PlaceholderTensor, shape, dtype=dtype, device=device)
    made.value, made.run, made.needed = name, handler, needs_grad
    return made


def find_placeholders(value: Any) -> list[PlaceholderTensor]:
    """Those among the tensors in `value`."""
    return [tensor for tensor in tree_tensors(value) if type(tensor) is PlaceholderTensor]


def call_without_override(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch says of a Foreign itself: shape, dtype, device; whatever needs its numbers fails."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
