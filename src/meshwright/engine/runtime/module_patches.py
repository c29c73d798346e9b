"""Replaces or wraps the forwards of modules of a model, and restores them at the end.

replace_forward   a layer computes something else
wrap_forward      something runs before and after a module's forward, replaced or not; wrappers come last
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from meshwright.model.blocks.discovery import WHOLE_MODEL

ForwardWrapper = Callable[..., Any]  # called with what the module computes, then with its arguments


class ModulePatches:
    """The replaced forwards of a module, under the name WHOLE_MODEL, and of its submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._original_forwards: list[tuple[nn.Module, Any]] = []
        self._wrappers: list[tuple[nn.Module, ForwardWrapper]] = []

    def replace_forward(self, name: str, forward: Callable[..., Any]) -> None:
        """Makes the module `name` compute `forward(module, *its arguments)`."""
        module = self._find_module(name)
        self._set_forward(module, partial(forward, module))

    def wrap_forward(self, name: str, wrapper: ForwardWrapper) -> None:
        """Makes the module `name` compute `wrapper(forward, *its arguments)`, from `apply_wrappers` on."""
        self._wrappers.append((self._find_module(name), wrapper))

    def apply_wrappers(self) -> None:
        """Applies the wrappers, once all forwards are replaced."""
        for module, around in self._wrappers:
            self._set_forward(module, partial(around, module.forward))
        self._wrappers.clear()

    def restore_forwards(self) -> None:
        """Restores the modules' own forwards."""
        for module, original in reversed(self._original_forwards):
            module.__dict__.pop("forward", None)
            if original is not None:
                module.__dict__["forward"] = original
        self._original_forwards.clear()

    def _find_module(self, name: str) -> nn.Module:
        return self._module if name == WHOLE_MODEL else self._module.get_submodule(name)

    def _set_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._original_forwards.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward
