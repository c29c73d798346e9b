"""Counting the floating-point operations of matrix products, convolutions and attention, also on fake tensors.

torch.utils.flop_counter has the formulas; its own mode also tracks modules, by hooks that every thread of the process
would see and that forbid `torch.autograd.grad` in a forward. This mode only counts.
"""

from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Flops(TorchDispatchMode):
    """While active, adds the operations of what this thread runs to `total`; a multiply-add counts as two."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._overloadpacket is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            self.total += _attention(args[0].shape, args[1].shape, args[2].shape)
        elif func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        return out


def _attention(query: torch.Size, key: torch.Size, value: torch.Size) -> int:
    """Two products, query with key and weights with value, counted as torch counts its other kernels: no mask saves any."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
