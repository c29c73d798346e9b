"""Sums whose bits do not depend on the rank that computes them.

From first to last, half types accumulated in float32.
"""

from collections.abc import Sequence
from types import MappingProxyType

import torch

SUMMABLE_DTYPES = (  # in this order in comm/shared_memory/sums.h
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
ACCUMULATION_DTYPES = MappingProxyType({torch.bfloat16: torch.float32, torch.float16: torch.float32})


@torch.no_grad()
def ordered_sum(summands: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the sum of `summands` (same shape and dtype), added from first to last; into `out` if given.

    `out` shares no memory with any of them, or is one of two.
    """
    first = summands[0]
    out = torch.empty_like(first) if out is None else out
    if len(summands) == 1:
        return out.copy_(first)
    if len(summands) > 2 and first.dtype in ACCUMULATION_DTYPES:
        total = first.to(ACCUMULATION_DTYPES[first.dtype])
        for summand in summands[1:]:
            total += summand
        return out.copy_(total)
    torch.add(first, summands[1], out=out)  # of half types too: computed in float32, and rounded once
    for summand in summands[2:]:
        out += summand
    return out
