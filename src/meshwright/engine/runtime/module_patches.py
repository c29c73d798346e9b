"""Replaces or wraps the forwards of modules of a model, and restores them at the end.

replace_forward    a layer computes something else
replace_method     likewise, by a function that compiled blocks contain
wrap_forward       something runs before and after a module's forward, replaced or not; wrappers come last
compile_forwards   compiled functions run in place of modules' own forwards, within all wrappers
"""

from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Protocol

from torch import nn

from meshwright.model.blocks.discovery import WHOLE_MODEL

Forward = Callable[..., Any]
ForwardWrapper = Callable[..., Any]  # called with what the module computes, then with its arguments


class ForwardCompiler(Protocol):
    """What compiles the forwards of modules."""

    def compile(self, name: str, forward: Forward) -> Forward:
        """Returns `forward`, of the module `name`, compiled."""

    def exclude(self, module: nn.Module, forward: Forward) -> Forward:
        """Returns `forward`, of `module`, as it runs inside a compiled one: uncompiled."""


class ModulePatches:
    """The replaced forwards of a module, under the name WHOLE_MODEL, and of its submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._original_forwards: list[tuple[nn.Module, Any]] = []
        self._wrappers: list[tuple[nn.Module, ForwardWrapper]] = []
        self._compiled: list[tuple[str, ForwardCompiler]] = []
        self._traced = set[nn.Module]()

    def replace_forward(self, name: str, forward: Forward) -> None:
        """Makes the module `name` compute `forward(module, *its arguments)`."""
        module = self._find_module(name)
        self._set_forward(module, partial(forward, module))

    def replace_method(self, name: str, function: FunctionType) -> None:
        """Makes the module `name` compute `function(module, *its arguments)`, inside a compiled block as a
        part of its graph. Give equal blocks one function: they share graphs of the same code only.
        """
        module = self._find_module(name)
        self._set_forward(module, MethodType(function, module))
        self._traced.add(module)

    def wrap_forward(self, name: str, wrapper: ForwardWrapper) -> None:
        """Makes the module `name` compute `wrapper(forward, *its arguments)`, from `apply_wrappers` on."""
        self._wrappers.append((self._find_module(name), wrapper))

    def compile_forwards(self, names: Iterable[str], compiler: ForwardCompiler) -> None:
        """Makes each module of `names` run compiled, from `apply_wrappers` on.

        A forward that is replaced runs as it is, and so do the submodules whose forwards are replaced or
        wrapped; those of `replace_method` are compiled with the block.
        """
        self._compiled += [(name, compiler) for name in names]

    def apply_wrappers(self) -> None:
        """Applies the wrappers, and compiles, once all forwards are replaced."""
        replaced = [module for module, _ in self._original_forwards if module not in self._traced]
        patched = dict.fromkeys((*replaced, *(module for module, _ in self._wrappers)))
        modules = {name: self._find_module(name) for name, _ in self._compiled}
        for name, compiler in self._compiled:
            if modules[name] not in replaced:
                self._set_forward(modules[name], compiler.compile(name, modules[name].forward))
        for module, around in self._wrappers:
            self._set_forward(module, partial(around, module.forward))
        for name, compiler in self._compiled:
            for inner in modules[name].modules():
                if inner in patched and inner is not modules[name]:
                    self._set_forward(inner, compiler.exclude(inner, inner.forward))
        self._wrappers.clear()
        self._compiled.clear()

    def restore_forwards(self) -> None:
        """Restores the modules' own forwards."""
        for module, original in reversed(self._original_forwards):
            module.__dict__.pop("forward", None)
            if original is not None:
                module.__dict__["forward"] = original
        self._original_forwards.clear()

    def _find_module(self, name: str) -> nn.Module:
        return self._module if name == WHOLE_MODEL else self._module.get_submodule(name)

    def _set_forward(self, module: nn.Module, forward: Forward) -> None:
        self._original_forwards.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward
