"""Placeholder tensor for a value of another pipeline stage: shape, dtype, device and a name, without values.

hidden = model.embed(ids)          of another stage: a placeholder, made by a stub
hidden.shape, hidden.device        as they would be
torch.zeros_like(hidden)           a real tensor: only the shape is needed
hidden * 8                         another placeholder; the recorded forward gives its name and shape
hidden.sum().item()                an error that names the value
"""

from typing import Any, Protocol

import torch

from meshwright.model.tensors.pytree import tree_tensors


class PlaceholderHandler(Protocol):
    """The run of one stage: computes with placeholders, and reports those whose values are needed."""

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of `func` on arguments that contain a placeholder."""

    def missing_value_error(self, computation: str, name: str) -> Exception:
        """Returns the error for `computation`, which needs the values of the tensor `name`."""


class PlaceholderTensor(torch.Tensor):
    """The value `value_name` of a stage that runs on another rank; it has no storage."""

    value_name: str
    handler: PlaceholderHandler
    needs_grad: bool

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the value needs a gradient; autograd itself does not track a placeholder."""
        return self.needs_grad

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"PlaceholderTensor({self.value_name!r})"

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
    """Returns a placeholder of this shape, dtype and device; `needs_grad` says whether the value needs a
    gradient.
    """
    placeholder: Any = torch.Tensor._make_wrapper_subclass(
        PlaceholderTensor, shape, dtype=dtype, device=device
    )
    placeholder.value_name, placeholder.handler, placeholder.needs_grad = name, handler, needs_grad
    return placeholder


def find_placeholders(value: Any) -> list[PlaceholderTensor]:
    """Returns the placeholders among the tensors in `value`."""
    return [tensor for tensor in tree_tensors(value) if type(tensor) is PlaceholderTensor]


def call_without_override(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of `func` on the wrapper itself: shape, dtype, device; what needs values fails."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
