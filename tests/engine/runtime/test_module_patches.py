"""Patches of module forwards by strategies: wrappers are outermost, and the original forward is restored."""

from collections.abc import Callable

import torch
from torch import nn

from meshwright.engine.runtime.module_patches import ModulePatches


class Twice(nn.Module):
    """Doubles."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def one_more(inner: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return inner(x) + 1


def test_a_wrapper_is_outside_of_a_replacement_in_any_order():
    model = nn.Sequential(Twice())
    sockets = ModulePatches(model)
    sockets.wrap_forward("0", one_more)
    sockets.replace_forward("0", lambda module, x: 3 * x)
    assert model(torch.ones(())) == 3
    sockets.apply_wrappers()
    assert model(torch.ones(())) == 4


def test_a_module_gets_its_original_forward_back():
    model = nn.Sequential(Twice(), Twice())
    model[1].forward = lambda x: 5 * x  # set by its user
    sockets = ModulePatches(model)
    for name in ("0", "1"):
        sockets.replace_forward(name, lambda module, x: 0 * x)
        sockets.wrap_forward(name, one_more)
    sockets.apply_wrappers()
    assert model(torch.ones(())) == 1
    sockets.restore_forwards()
    assert model(torch.ones(())) == 10
    assert "forward" not in model[0].__dict__


class Compiler:
    """Notes what it compiles, and what it leaves out of it."""

    def __init__(self) -> None:
        self.compiled, self.excluded = list[str](), list[nn.Module]()

    def compile(self, name: str, forward: Callable[..., object]) -> Callable[..., object]:
        self.compiled.append(name)
        return forward

    def exclude(self, module: nn.Module, forward: Callable[..., object]) -> Callable[..., object]:
        self.excluded.append(module)
        return forward


def test_a_compiled_block_contains_replaced_methods_and_no_replaced_forwards():
    def times_five(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return 5 * x

    model, compiler = nn.Sequential(nn.Sequential(Twice(), Twice())), Compiler()
    sockets = ModulePatches(model)
    sockets.replace_method("0.0", times_five)
    sockets.replace_forward("0.1", lambda module, x: 3 * x)
    sockets.compile_forwards(["0"], compiler)
    sockets.apply_wrappers()
    assert model(torch.ones(())) == 15
    assert (compiler.compiled, compiler.excluded) == (["0"], [model[0][1]])
    sockets.restore_forwards()
    assert model(torch.ones(())) == 4
