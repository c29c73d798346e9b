"""What modules of a model compute in a plan in place of their own forward, or round it; taken back in the end.

fill    a layer computes something else
wrap    something happens before and behind what a module computes, filled or not: so wraps come last
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

ForwardWrapper = Callable[..., Any]  # called with what the module computes, then with its arguments


class ModulePatches:
    """The replaced forwards of one module's parts."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own: list[tuple[nn.Module, Any]] = []
        self._wraps: list[tuple[nn.Module, ForwardWrapper]] = []

    def replace_forward(self, name: str, forward: Callable[..., Any]) -> None:
        """Have the module `name` compute `forward(module, *its arguments)`."""
        module = self._module.get_submodule(name)
        self._put(module, partial(forward, module))

    def wrap_forward(self, name: str, wrapper: ForwardWrapper) -> None:
        """Have the module `name` compute `around(what it computes, *its arguments)`, from `close` on."""
        self._wraps.append((self._module.get_submodule(name), wrapper))

    def apply_wrappers(self) -> None:
        """All has been filled: wrap what is to be wrapped."""
        for module, around in self._wraps:
            self._put(module, partial(around, module.forward))
        self._wraps.clear()

    def restore_forwards(self) -> None:
        """Give the modules their own forwards back."""
        for module, own in reversed(self._own):
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own
        self._own.clear()

    def _put(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._own.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward
