"""Takes torch.compile off a module and its submodules: the engine runs between their parts.

    torch.compile(layer)                          an OptimizedModule around the layer
    layer.compile()                               a compiled call, which no copy of the layer keeps
    layer.forward = torch.compile(layer.forward)  a function that runs this layer, in every copy of it
    @torch.compile over def forward               the same in the class

A compiled module is one call for Python: blocks inside of it could not be reached, and a wrapper changes the
names of parameters.
"""

import inspect
from collections.abc import Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any

from torch import nn

WRAPPER, WRAPPED = "OptimizedModule", "_orig_mod"  # known by name: importing torch._dynamo takes seconds
COMPILED_CALL = "_compiled_call_impl"
ORIGINAL_FUNCTION = "_torchdynamo_orig_callable"


def find_compiled(module: nn.Module) -> list[str]:
    """Returns the class names of the modules in `module` that are compiled, in order."""
    return [
        type(remove_wrapper(inner)).__name__
        for inner in module.modules()
        if _is_wrapper(inner) or vars(inner).get(COMPILED_CALL) is not None or _original_forward(inner)
    ]


def remove_compile(module: nn.Module) -> nn.Module:
    """Returns `module` without the wrappers of torch.compile, its own and those of submodules, which are
    removed in place.
    """
    bare = remove_wrapper(module)
    for inner in list(bare.modules()):
        for name, child in inner._modules.items():
            if child is not None and _is_wrapper(child):
                inner._modules[name] = remove_wrapper(child)
    for inner in bare.modules():
        if original := _original_forward(inner):
            inner.forward = MethodType(original, inner)
        vars(inner).pop(COMPILED_CALL, None)
    return bare


def remove_wrapper(module: nn.Module) -> nn.Module:
    """Returns the module that torch.compile wrapped; `module` itself if it is no wrapper."""
    return module.get_submodule(WRAPPED) if _is_wrapper(module) else module


def compile_notes(compiled: Sequence[str]) -> Iterator[str]:
    """Yields a note that says of which modules torch.compile was taken off."""
    if compiled:
        others = f" and {len(compiled) - 1} more modules" if len(compiled) > 1 else ""
        yield (
            f"torch.compile was taken off {compiled[0]}{others}: blocks run as they are written, or compiled "
            'one by one where the plan has the strategy "compile"'
        )


def _is_wrapper(module: nn.Module) -> bool:
    return type(module).__name__ == WRAPPER and WRAPPED in module._modules


def _original_forward(module: nn.Module) -> FunctionType | None:
    """Returns the function that a compiled `forward` compiles; None if it is not compiled."""
    forward: Any = vars(module).get("forward") or inspect.getattr_static(type(module), "forward", None)
    original = None
    while isinstance(forward, FunctionType) and ORIGINAL_FUNCTION in vars(forward):
        original = forward = vars(forward)[ORIGINAL_FUNCTION]
    return original.__func__ if isinstance(original, MethodType) else original
