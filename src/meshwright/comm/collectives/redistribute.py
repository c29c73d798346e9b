"""Differentiable redistribution.

Moves a tensor between placements along a group, and its gradient between their adjoints. `REDISTRIBUTIONS`
(plan/sharding/tensor_placements.py) names the operation for every pair of placements; this module executes
it. `redistribute` is differentiable: its backward is the redistribution between the adjoint placements, done
by the same code, so no gradient is written by hand.

    y = redistribute(x, group, src, dst)        dL/dx = redistribute(dL/dy, group, dst.adjoint, src.adjoint)

[Note: local shapes] `full` is the shape of the value; along a group of n ranks a tensor in R, I or P has that
shape on every rank, and in S(d) it has full[d] / n along dim d. Shards are equal: full[d] is a multiple of n.

    operation        local shape in -> out        what rank i gets
    keep             full -> full                 its own tensor (shared memory)
    all_reduce       full -> full                 the sum over ranks
    all_gather       full / n along d -> full     the slices of all ranks, concatenated along d
    reduce_scatter   full -> full / n along d     slice i of the sum over ranks
    all_to_all       / n along a -> / n along b   slice i along b, of all slices along a
    slice            full -> full / n along d     slice i of its own tensor
    zero_pad         full / n along d -> full     its own slice between zeros
    first_rank_only  full -> full                 rank 0 its own tensor, the others zeros

Other computation can overlap with the communication: `overlap_fn` in the forward, `deferred_backward_calls`
in the backward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from meshwright.comm.collectives.group import Group, Work
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.tensor_placements import COLLECTIVES, Placement, S, redistribution_name

OverlapFn = Callable[[], None] | None  # runs while a collective is under way
DeferredCalls = list[Callable[[], None]]
# the name of an action, or a function that returns it when a collective is issued
ActionName = str | Callable[[], str]


class CarryFn(Protocol):
    """Carries out a redistribution, or that of its gradient, by other messages (coded_redistribution.py)."""

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
        """Returns the local tensor in `dst`; None: it travels as it is, and `overlap_fn` was not called."""


def redistribute(
    tensor: torch.Tensor,
    group: Group,
    src: Placement,
    dst: Placement,
    action: ActionName = "",
    overlap_fn: OverlapFn = None,
    carry: CarryFn | None = None,
) -> torch.Tensor:
    """Returns the local tensor in placement `dst` of the value whose local tensor in `src` is `tensor`.

    Differentiable. For shapes see the module's note; strides may be any. The ledger records the backward
    under "`action` backward", or under what `action()` returns then. All ranks of the group call this, and
    all or none of them need the gradient. `overlap_fn()` is called while the communication is in flight. An
    operation that keeps the values ("keep", and "first_rank_only" on rank 0) returns a view of `tensor`; all
    others return new memory. `carry` carries the collective, and that of the gradient, by other messages; the
    gradient of a gradient is sent as it is.

    Raises PlanError when a dim to be sharded does not divide by the size of the group, or does not exist.
    """
    src, dst = (_with_nonnegative_dim(place, tensor, _action_name(action)) for place in (src, dst))
    if src == dst or group.size == 1:
        if overlap_fn is not None:
            overlap_fn()
        return tensor
    return _Redistribute.apply(tensor, group, src, dst, action, overlap_fn, carry)


def deferred_backward_calls(tensor: torch.Tensor) -> DeferredCalls | None:
    """Returns the calls that run while the gradient of `tensor`, a result of `redistribute`, is in flight.

    None for others. The consumer of `tensor` may append to the list in its own backward: so the weight
    gradient waits until the input gradient, for which other ranks wait, has been sent.
    """
    node = tensor.grad_fn
    return node.later if isinstance(node, _Redistribute._backward_cls) else None


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        group: Group,
        src: Placement,
        dst: Placement,
        action: ActionName,
        overlap_fn: OverlapFn,
        carry: CarryFn | None,
    ) -> torch.Tensor:
        ctx.way = group, src, dst, action
        ctx.later, ctx.carry = [], carry
        return _apply(tensor, group, src, dst, _action_name(action), overlap_fn, carry)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, src, dst, action = ctx.way
        (grad,) = grads
        back = f"{action} backward".strip() if isinstance(action, str) else action
        after = partial(_run_all, ctx.later)
        if torch.is_grad_enabled():  # somebody wants the gradient of this gradient
            grad = redistribute(grad, group, dst.adjoint, src.adjoint, back, after)
        else:
            way = group, dst.adjoint, src.adjoint, _action_name(back), after
            grad = _apply(grad, *way, ctx.carry, is_backward=True)
        return grad, None, None, None, None, None, None


def _run_all(calls: DeferredCalls) -> None:
    while calls:
        calls.pop(0)()


def _action_name(action: ActionName) -> str:
    return action if isinstance(action, str) else action()


def _apply(
    tensor: torch.Tensor,
    group: Group,
    src: Placement,
    dst: Placement,
    action: str,
    overlap_fn: OverlapFn,
    carry: CarryFn | None = None,
    *,
    is_backward: bool = False,
) -> torch.Tensor:
    collective = redistribution_name(src, dst)
    if collective in COLLECTIVES and carry is not None:
        carried = carry(tensor, group, src, dst, action, overlap_fn, is_backward=is_backward)
        if carried is not None:
            return carried
    if collective not in COLLECTIVES and overlap_fn is not None:
        overlap_fn()
    # read only where the letter is S
    src_dim, dst_dim = (-1 if place.dim is None else place.dim for place in (src, dst))
    match collective:
        case "keep":
            return tensor.view_as(tensor)
        case "all_reduce":
            return all_reduce(tensor, group, action, overlap_fn)
        case "all_gather":
            return all_gather(tensor, group, src_dim, action, overlap_fn)
        case "reduce_scatter":
            return reduce_scatter(tensor, group, dst_dim, action, overlap_fn)
        case "all_to_all":
            return all_to_all(tensor, group, src_dim, dst_dim, action, overlap_fn)
        case "slice":
            return stack_slices(tensor, group, dst_dim, action)[group.index].clone(
                memory_format=torch.contiguous_format
            )
        case "zero_pad":
            return zero_pad(tensor, group, src_dim)
        case "first_rank_only":
            return tensor.view_as(tensor) if group.index == 0 else torch.zeros_like(tensor)
        case other:
            raise NotImplementedError(
                f"REDISTRIBUTIONS names the operation '{other}' for {src} -> {dst}, without an "
                "implementation. Add it here"
            )


def all_reduce(
    tensor: torch.Tensor, group: Group, action: str = "", overlap_fn: OverlapFn = None
) -> torch.Tensor:
    """Returns the sum of all ranks' `tensor`; same shape, new memory."""
    total, work = group.all_reduce_copy(tensor, action=action)
    wait_overlapped(work, overlap_fn)
    return total


def all_gather(
    tensor: torch.Tensor,
    group: Group,
    dim: int,
    action: str = "",
    overlap_fn: OverlapFn = None,
) -> torch.Tensor:
    """Returns all ranks' `tensor` concatenated along `dim`: [.., s, ..] -> [.., size * s, ..], contiguous."""
    if group.size == 1:
        if overlap_fn is not None:
            overlap_fn()
        return tensor.clone(memory_format=torch.contiguous_format)
    gathered = tensor.new_empty(group.size, *tensor.shape)
    wait_overlapped(group.all_gather(gathered, tensor.contiguous(), action=action), overlap_fn)
    return concat_slices(gathered, dim)


def reduce_scatter(
    tensor: torch.Tensor,
    group: Group,
    dim: int,
    action: str = "",
    overlap_fn: OverlapFn = None,
) -> torch.Tensor:
    """Returns this rank's slice along `dim` of the sum of all ranks' `tensor`.

    [.., size * s, ..] -> [.., s, ..]. The result is contiguous. Raises PlanError when the dim does not
    divide.
    """
    stacked = stack_slices(tensor, group, dim, action).contiguous()
    mine = stacked.new_empty(stacked.shape[1:])
    wait_overlapped(group.reduce_scatter(mine, stacked, action=action), overlap_fn)
    return mine


def all_to_all(
    tensor: torch.Tensor,
    group: Group,
    src: int,
    dst: int,
    action: str = "",
    overlap_fn: OverlapFn = None,
) -> torch.Tensor:
    """Returns the value sharded along dim `dst` instead of `src`.

    [.., a, .., size * b, ..] -> [.., size * a, .., b, ..]. Contiguous. Raises PlanError when the dim `dst`
    does not divide.
    """
    stacked = stack_slices(tensor, group, dst, action).contiguous()
    arrived = torch.empty_like(stacked)
    wait_overlapped(group.all_to_all(arrived, stacked, action=action), overlap_fn)
    del stacked  # it would live beside what is joined
    return concat_slices(arrived, src)


def zero_pad(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Returns this rank's slice between zeros: [.., s, ..] -> [.., size * s, ..].

    The sum over ranks is the whole value.
    """
    full = tensor.new_zeros(*tensor.shape[:dim], tensor.shape[dim] * group.size, *tensor.shape[dim + 1 :])
    full.narrow(dim, group.index * tensor.shape[dim], tensor.shape[dim]).copy_(tensor)
    return full


def wait_overlapped(work: Work, overlap_fn: OverlapFn) -> None:
    """Calls `overlap_fn`, then waits for `work`."""
    if overlap_fn is not None:
        overlap_fn()
    work.wait()


def stack_slices(tensor: torch.Tensor, group: Group, dim: int, action: str) -> torch.Tensor:
    """Returns the slices of `tensor` along `dim`, one for each rank: [size, .., s, ..], a view.

    Raises PlanError when the dim does not divide.
    """
    length = tensor.shape[dim]
    if length % group.size:
        text = f"dim {dim} of a tensor of shape {list(tensor.shape)} has {length} elements"
        text += f", for {group.size} ranks along {' x '.join(group.axes)}"
        fix = (
            f"make it a multiple of {group.size}, or give these axes a number of ranks that divides {length}"
        )
        raise PlanError(f"{text}; needed are equal shards", fix=fix, location=action)
    return tensor.unflatten(dim, (group.size, length // group.size)).movedim(dim, 0)


def concat_slices(stacked: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the slices [size, .., s, ..] concatenated along `dim`: [.., size * s, ..], contiguous."""
    moved = stacked.movedim(0, dim)
    return moved.reshape(*moved.shape[:dim], moved.shape[dim] * moved.shape[dim + 1], *moved.shape[dim + 2 :])


def _with_nonnegative_dim(place: Placement, tensor: torch.Tensor, action: str) -> Placement:
    if place.dim is None:
        return place
    if not -tensor.ndim <= place.dim < tensor.ndim:
        text = f"{place} of a tensor of shape {list(tensor.shape)}, which has {tensor.ndim} dims"
        fix = f"name a dim from 0 to {tensor.ndim - 1}" if tensor.ndim else "keep a scalar whole: R or I"
        raise PlanError(text, fix=fix, location=action)
    return S(place.dim % tensor.ndim)
