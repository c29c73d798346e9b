"""Collectives inside a block: a tensor is redistributed along an axis once, however many layers need it.

q, k and v each need the block's input in the same placement. A redistribution belongs to the tensor: within
one run of a block the first layer that asks redistributes it, the others get its result, and backward sums
their gradients before it redistributes them back, once.

    input  --redistribute I -> R-->  input'  --> q, k, v         backward: one all_reduce of their sum

Autograd saves the result, or, where a technique asks for it, backward redistributes again: also once for all
users. What a strategy names may travel as codes, forth and back, where it has given a codec for the axis
(`compress_activations`); without gradients, as in an evaluation, it travels as it is.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.comm.collectives.coded_redistribution import CodedRedistribution
from meshwright.comm.collectives.group import Group, Work
from meshwright.comm.collectives.redistribute import CarryFn, OverlapFn, redistribute
from meshwright.engine.forward_backward.observed_codes import BlockCodeObserver, ObservedUse
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.tensors.pytree import storage_id
from meshwright.plan.sharding.tensor_placements import Placement, redistribution_name
from meshwright.plan.step.program import neighbour_indices
from meshwright.plan.strategy_interface import ActivationCodec, ActivationName

# a tensor's id and version, the axis, src, dst
RedistributionKey = tuple[int, int, str, Placement, Placement]


class BlockCollectives:
    """The redistributions of one rank inside blocks; the ledger records them under the current action."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        # the tensor, which must stay alive because its id is the key, and its result
        self._redistributed: dict[RedistributionKey, tuple[torch.Tensor, torch.Tensor]] = {}
        self._regathered: dict[RedistributionKey, _RedistributedInBackward] = {}
        self._observer = BlockCodeObserver(state)

    def begin_block(self, action: str) -> None:
        """Begins a block, for `action`: nothing has been redistributed in it."""
        self._state.current_action = action
        self._observer.begin_block()
        if self._redistributed:  # this runs for every block: skip it where there is nothing
            self._redistributed.clear()
            self._regathered.clear()

    def redistribute(
        self,
        tensor: torch.Tensor,
        axis: str,
        src: Placement,
        dst: Placement,
        overlap_fn: OverlapFn = None,
        name: ActivationName | None = None,
    ) -> torch.Tensor:
        """Returns `tensor`, placed as `src` along `axis`, in placement `dst`; differentiable, once per block.

        `overlap_fn()` is called while the collective runs. Under autocast the tensor is sent in the autocast
        dtype, unless it is a parameter. With a `name` it may travel as codes.
        """
        if not torch.is_grad_enabled():  # no block begins, so the cache would never be cleared
            return self.redistribute_uncached(tensor, axis, src, dst, overlap_fn=overlap_fn)
        key = (id(tensor), tensor._version, axis, src, dst)
        if key not in self._redistributed:
            self._redistributed[key] = (
                tensor,
                self.redistribute_uncached(tensor, axis, src, dst, overlap_fn=overlap_fn, name=name),
            )
        else:
            self._carry(axis, name)  # notes that this layer takes it too
            if overlap_fn is not None:
                overlap_fn()
        return self._redistributed[key][1]

    def redistribute_in_backward(
        self,
        tensor: torch.Tensor,
        axis: str,
        src: Placement,
        dst: Placement,
        name: ActivationName | None = None,
    ) -> AbstractContextManager[object]:
        """Makes autograd drop the redistributed `tensor` inside the context.

        Backward redistributes it again.
        """
        if not torch.is_grad_enabled():
            return nullcontext()
        key = (id(tensor), tensor._version, axis, src, dst)
        if key not in self._regathered:
            moved, local = self.redistribute(tensor, axis, src, dst), _cast(tensor).detach()
            carry = self._carry(axis, name, is_observed=False)
            self._regathered[key] = _RedistributedInBackward(
                storage_id(moved), lambda: self._redistribute(local, axis, src, dst, carry=carry)
            )
        return saved_tensors_hooks(self._regathered[key].pack, self._regathered[key].unpack)

    def redistribute_uncached(
        self,
        tensor: torch.Tensor,
        axis: str,
        src: Placement,
        dst: Placement,
        num_neighbours: int = 0,
        overlap_fn: OverlapFn = None,
        name: ActivationName | None = None,
    ) -> torch.Tensor:
        """Redistributes `tensor` at every call, and keeps neither tensor.

        With `num_neighbours`, placements are those among so many neighbours along the axis.
        """
        carry = self._carry(axis, name)
        return self._redistribute(_cast(tensor), axis, src, dst, num_neighbours, overlap_fn, carry)

    def _redistribute(
        self,
        tensor: torch.Tensor,
        axis: str,
        src: Placement,
        dst: Placement,
        num_neighbours: int = 0,
        overlap_fn: OverlapFn = None,
        carry: CarryFn | None = None,
    ) -> torch.Tensor:
        world = self._state.world
        group = world.group(
            (axis,), neighbour_indices(world.mesh.coordinate(world.rank)[axis], num_neighbours)
        )
        return redistribute(tensor, group, src, dst, lambda: self._state.current_action, overlap_fn, carry)

    def _carry(
        self, axis: str, name: ActivationName | None, *, is_observed: bool = True
    ) -> "_CodedMove | None":
        """Returns what carries the activation `name` along `axis` as codes, and notes that a layer takes it;
        None: it travels as it is.
        """
        codec = self._state.activation_codecs.get(axis)
        if codec is None or name is None or not torch.is_grad_enabled():
            return None
        if not codec.is_used_in(self._state.step.number):
            return None
        return _CodedMove(codec, self._observer.take(name) if is_observed else None, name.part_dim)

    def codes(self, axis: str, name: ActivationName) -> tuple[ActivationCodec, ObservedUse | None] | None:
        """Returns the codec of the activation `name`, which a strategy sends along `axis` itself, and what
        notes what its codes lose; None: it travels as it is.
        """
        carry = self._carry(axis, name)
        return None if carry is None else (carry.codec, carry.use)

    def shift(self, output: torch.Tensor, tensor: torch.Tensor, axis: str, offset: int = 1) -> Work:
        """Starts sending `tensor` to the rank `offset` positions on around `axis`, for the current action.

        Receives `output` from as far behind.
        """
        return self._state.world.group((axis,)).shift(
            output, tensor, offset=offset, action=self._state.current_action
        )


@dataclass(frozen=True)
class _CodedMove:
    """Carries one redistribution, and that of its gradient, as codes, and notes them at `use`."""

    codec: ActivationCodec
    use: ObservedUse | None
    part_dim: int | None = None

    def __call__(
        self,
        tensor: torch.Tensor,
        group: Group,
        src: Placement,
        dst: Placement,
        action: str,
        overlap_fn: OverlapFn,
        *,
        is_backward: bool,
    ) -> torch.Tensor | None:
        dtype, part_dim, num_parts = str(tensor.dtype).removeprefix("torch."), self.part_dim, 1
        if part_dim is not None:
            num_parts = tensor.shape[part_dim] * (1 if dst.dim == part_dim else group.size)
        collective = redistribution_name(src, dst)
        if not self.codec.messages(collective, tensor.numel(), dtype, group.size, num_parts):
            return None
        note = None
        if self.use is not None:
            note = self.use.note(self.codec, tensor, src, group, is_backward=is_backward)
        coded = CodedRedistribution(self.codec, group, action, overlap_fn, note, part_dim)
        return coded.run(tensor, src, dst)


@dataclass(frozen=True)
class _StorageView:
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class _RedistributedInBackward:
    """Drops tensors with this storage.

    `redistribute` restores it for the first that is unpacked, until the last is.
    """

    storage: int
    redistribute: Callable[[], torch.Tensor]
    num_packed: int = 0
    results: list[torch.Tensor] = field(default_factory=list)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _StorageView:
        if storage_id(tensor) != self.storage:
            return tensor.detach()
        self.num_packed += 1
        return _StorageView(tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: torch.Tensor | _StorageView) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        results = self.results or [self.redistribute()]
        self.num_packed -= 1
        self.results = results if self.num_packed else []
        return results[0].as_strided(saved.size, saved.stride, saved.offset)


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    kind = tensor.device.type
    casts = (
        torch.is_autocast_enabled(kind)
        and tensor.is_floating_point()
        and not isinstance(tensor, nn.Parameter)
    )
    return tensor.to(torch.get_autocast_dtype(kind)) if casts else tensor
