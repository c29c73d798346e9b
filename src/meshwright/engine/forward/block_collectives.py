"""Collectives inside of a block: a tensor that is moved along an axis, once however many ask for it.

q, k and v each need the block's input in the same place. A move belongs to the tensor: within one run of a block the first who
asks moves it, the others get what it got, and backward sums their gradients before it moves them back, once.

    input  --move I -> R-->  input'  --> q, k, v         backward: one all_reduce of the sum of three gradients

What backward needs of a moved tensor is kept, or, where a technique asks for it, moved once more: also once for all who need it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.comm.collectives.redistribute import redistribute
from meshwright.engine.runtime.state import RankState
from meshwright.model.tensors.pytree import storage_id
from meshwright.plan.sharding.placement import Placement
from meshwright.plan.step.action import neighbour_indices

OverlapFn = Callable[[], None] | None  # what is done while a tensor is under way
RedistributionKey = tuple[
    int, int, str, Placement, Placement
]  # a tensor and its version, the axis, from where, to where


class BlockCollectives:
    """The moves of one rank inside of blocks; the ledger books them under the action of the program that is under way."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        # the tensor, which must not be forgotten, and what it became
        self._moved: dict[RedistributionKey, tuple[torch.Tensor, torch.Tensor]] = {}
        self._anew: dict[RedistributionKey, _RedistributedInBackward] = {}

    def begin_block(self, action: str) -> None:
        """Another block runs, for `action`: nothing has been moved in it."""
        self._state.current_action = action
        if self._moved:  # where nothing is divided there never is: this runs for every block
            self._moved.clear()
            self._anew.clear()

    def redistribute(
        self, tensor: torch.Tensor, axis: str, src: Placement, dst: Placement, overlap_fn: OverlapFn = None
    ) -> torch.Tensor:
        """`tensor`, which is in `src` along `axis`, in `dst`; differentiable. `meanwhile()` is called while it is under way.

        Under autocast it travels as products take it, unless it is a parameter.
        """
        if not torch.is_grad_enabled():  # no block begins, and nothing would ever be forgotten
            return self.redistribute_uncached(tensor, axis, src, dst, overlap_fn=overlap_fn)
        key = (id(tensor), tensor._version, axis, src, dst)
        if key not in self._moved:
            self._moved[key] = (
                tensor,
                self.redistribute_uncached(tensor, axis, src, dst, overlap_fn=overlap_fn),
            )
        elif overlap_fn is not None:
            overlap_fn()
        return self._moved[key][1]

    def redistribute_in_backward(
        self, tensor: torch.Tensor, axis: str, src: Placement, dst: Placement
    ) -> AbstractContextManager[object]:
        """While it lasts, autograd keeps nothing of what `tensor` became by this move: backward moves it once more."""
        if not torch.is_grad_enabled():
            return nullcontext()
        key = (id(tensor), tensor._version, axis, src, dst)
        if key not in self._anew:
            became, mine = self.redistribute(tensor, axis, src, dst), _cast(tensor).detach()
            self._anew[key] = _RedistributedInBackward(
                storage_id(became), lambda: self.redistribute_uncached(mine, axis, src, dst)
            )
        return saved_tensors_hooks(self._anew[key].pack, self._anew[key].unpack)

    def redistribute_uncached(
        self,
        tensor: torch.Tensor,
        axis: str,
        src: Placement,
        dst: Placement,
        num_neighbours: int = 0,
        overlap_fn: OverlapFn = None,
    ) -> torch.Tensor:
        """The same as often as it is asked, and nobody holds on to either tensor; places are those among `near` neighbours."""
        world = self._state.world
        group = world.group(
            (axis,), neighbour_indices(world.mesh.coordinate(world.rank)[axis], num_neighbours)
        )
        return redistribute(_cast(tensor), group, src, dst, lambda: self._state.current_action, overlap_fn)


@dataclass(frozen=True)
class _StorageView:
    """How a tensor that autograd would keep lies in the storage of the one that is moved once more."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class _RedistributedInBackward:
    """The tensor with this storage is let go of; `move` brings it back: for the first who unpacks it, until the last has."""

    storage: int
    redistribute: Callable[[], torch.Tensor]
    num_packed: int = 0
    results: list[torch.Tensor] = field(default_factory=list)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _StorageView:
        if storage_id(tensor) != self.storage:
            return tensor.detach()
        self.num_packed += 1
        return _StorageView(tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, kept: torch.Tensor | _StorageView) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        found = self.results or [self.redistribute()]
        self.num_packed -= 1
        self.results = found if self.num_packed else []
        return found[0].as_strided(kept.size, kept.stride, kept.offset)


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """As products take it under autocast, unless it is a parameter, or no number."""
    kind = tensor.device.type
    casts = (
        torch.is_autocast_enabled(kind)
        and tensor.is_floating_point()
        and not isinstance(tensor, nn.Parameter)
    )
    return tensor.to(torch.get_autocast_dtype(kind)) if casts else tensor
