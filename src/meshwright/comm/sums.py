"""Sums whose bits do not depend on who adds them: from first to last, half types in float32."""

from collections.abc import Sequence
from types import MappingProxyType

import torch

SUMMABLE = (  # in this order in shared/sums.h
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)

# half types are summed in float32 and rounded once: n roundings of 8 bits each would show in a parity test
ACCUMULATE = MappingProxyType({torch.bfloat16: torch.float32, torch.float16: torch.float32})


@torch.no_grad()
def ordered_sum(summands: Sequence[torch.Tensor]) -> torch.Tensor:
    """A new tensor: the sum of `summands` (same shape and dtype), added from first to last, so its bits are fixed."""
    first = summands[0]
    total = first.to(ACCUMULATE.get(first.dtype, first.dtype), copy=True)
    for summand in summands[1:]:
        total += summand
    return total.to(first.dtype)
