"""A module that treats tokens one by one, run on some of them after others; backward runs each piece once more.

    forward     x0 --> [module] --> y0        x1 --> [module] --> y1        no graph: what is computed within is forgotten
    backward    x1 --> [module] --> y1'  with a graph, from dy1 to dx1 and the weights; then the same for x0

So of what the module computes within there is one piece at any time. A second run finds the modes and the autocast of the first.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from meshwright.core.errors import PlanError

TOKENS = 1  # the dim of them
Run = Callable[..., torch.Tensor]


def in_tiles(name: str, tiles: int, run: Run, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What `run(x)` gives of the module `name`, in so many `tiles` of tokens. Its weights have their gradients afterwards.

    Raises PlanError where it takes in more than [rows, tokens, width], or gives out other tokens.
    """
    if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) or args[0].ndim != 3:
        text = f"the module '{name}' is called with more than one tensor [rows, tokens, width], so nobody knows how to cut that"
        raise PlanError(text, fix="leave `mlp` out of the strategy that runs it in tiles", where="model")
    if not torch.is_grad_enabled():
        return torch.cat([_alone(name, run, x) for x in args[0].tensor_split(_count(args[0], tiles), TOKENS)], TOKENS)
    weighted = torch.zeros((), requires_grad=True)  # there is a backward, whether `x` needs a gradient or weights alone do
    return _Tiled.apply(args[0], weighted, name, tiles, run)


class _Alone(TorchFunctionMode):
    """Refuses what looks at several tokens at once."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            text = f"the module '{self._name}' attends, and cannot run on some of the tokens"
            raise PlanError(text, fix="leave `mlp` out of the strategy that runs it in tiles", where="model")
        return func(*args, **(kwargs or {}))


def _alone(name: str, run: Run, x: torch.Tensor) -> torch.Tensor:
    with _Alone(name):
        y = run(x.contiguous())  # what it was given whole was that, and it may view it so
    if not isinstance(y, torch.Tensor) or y.shape[: TOKENS + 1] != x.shape[: TOKENS + 1]:
        text = f"the module '{name}' does not give out a tensor with the tokens that it takes in"
        raise PlanError(text, fix="leave `mlp` out of the strategy that runs it in tiles", where="model")
    return y


def _count(x: torch.Tensor, tiles: int) -> int:
    return max(1, min(tiles, x.shape[TOKENS]))


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weighted: torch.Tensor, name: str, tiles: int, run: Run) -> torch.Tensor:
        ctx.save_for_backward(x)
        kind = x.device.type
        ctx.how, ctx.modes = (name, tiles, run), _get_current_function_mode_stack()
        ctx.autocast = kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return torch.cat([_alone(name, run, each) for each in x.tensor_split(_count(x, tiles), TOKENS)], TOKENS)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), (name, tiles, run) = ctx.saved_tensors, ctx.how
        kind, enabled, dtype = ctx.autocast
        gradient = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        pieces = _count(x, tiles)
        with ExitStack() as stack:
            # no cache: a cached cast would join the graphs of two tiles
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            active = {id(mode) for mode in _get_current_function_mode_stack()}
            for mode in (mode for mode in ctx.modes if id(mode) not in active):
                stack.enter_context(mode)
            parts = (each.tensor_split(pieces, TOKENS) for each in (x, grads[0], x if gradient is None else gradient))
            for taken, came, place in zip(*parts, strict=True):
                with torch.enable_grad():
                    leaf = taken.detach().contiguous().requires_grad_(gradient is not None)
                    y = _alone(name, run, leaf)
                if y.requires_grad:
                    torch.autograd.backward([y], [came])
                if leaf.grad is not None:
                    place.copy_(leaf.grad)
        return gradient, None, None, None, None
