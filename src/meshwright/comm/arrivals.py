"""Where the summands of a reduce_scatter arrive, on backends that only move them: two pieces of memory, taken in turn.

    issue 1 -> memory 0      issue 2 -> memory 1      issue 3: wait for 1, sum it -> memory 0 again ...

So the memory of sums under way does not grow with their number, and a steady step makes none. Waiting for the oldest costs
little: the newer one travels meanwhile, and the wire is never idle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from meshwright.comm.group import Work
from meshwright.comm.sums import ordered_sum

NUM_MEMORIES = 2


@dataclass
class _Memory:
    """Bytes, as many as the largest message so far, and the work that fills them."""

    flat: torch.Tensor | None = None
    work: Work | None = None


class Arrivals:
    """The memory of one group on one rank; its works are waited for here when their memory is needed."""

    def __init__(self) -> None:
        self._memories = [_Memory() for _ in range(NUM_MEMORIES)]
        self._issued = 0

    def receive(self, like: torch.Tensor, issue: Callable[[torch.Tensor], Work]) -> Work:
        """The work of `issue(arrived)`, which fills `arrived`: flat memory for the elements of `like`, of its dtype."""
        memory = self._memories[self._issued % NUM_MEMORIES]
        self._issued += 1
        if memory.work is not None:
            memory.work.wait()
        if memory.flat is None or memory.flat.numel() < like.nbytes:
            memory.flat = torch.empty(like.nbytes, dtype=torch.uint8, device=like.device)
        memory.work = issue(memory.flat[: like.nbytes].view(like.dtype))
        return memory.work


@torch.no_grad()
def sum_into(output: torch.Tensor, summands: Sequence[torch.Tensor]) -> None:
    """Fill `output` with the sum of `summands`, added from first to last."""
    ordered_sum(summands, out=output.view(-1))
