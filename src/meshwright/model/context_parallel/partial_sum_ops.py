"""Computes indexing and sums over the sequence as partial sums, without gathering all tokens.

    hidden[:, 0], hidden[:, -1:]   the rank with the token gives it, others zerossum of [samples, width]
    hidden[samples, last]          each rank gives the tokens that it has        sum of [samples, width]
    hidden.mean(1), hidden.sum()   each rank gives the sum of its tokens         sum of [samples, width]

Backward is a sum too: each rank contributes a summand of the gradient of the result, which goes to the rank
with the token.
"""

from math import prod
from typing import Any

import torch

from meshwright.model.tensors.select_token_ranges import span_positions
from meshwright.plan.sharding.sequence_sharding import TokenRange

SUM_OPS = ("sum", "mean")
INDEX_DTYPES = (torch.int64, torch.int32)


def partial_sum(name: str, tensor: Any, dim: Any = None, keepdim: Any = False, **more: Any) -> Any:
    """Returns the `sum` or `mean` of a SequenceShardedTensor over its sequence; None if it reduces other
    dims or unknown options.
    """
    dims = (
        tuple(range(tensor.ndim))
        if dim is None or dim == ()
        else dim
        if isinstance(dim, (tuple, list))
        else (dim,)
    )
    is_supported = all(type(each) is int for each in dims) and type(keepdim) is bool and not more
    if (
        not is_supported
        or not tensor.dtype.is_floating_point
        or tensor.sequence_dim not in (each % tensor.ndim for each in dims)
    ):
        return None
    local, token_shard = tensor.local_tensor, tensor.token_shard
    local_tokens = local.narrow(tensor.sequence_dim, 0, token_shard.num_tokens)  # padding tokens may follow
    total = local_tokens.sum(dims, keepdim=keepdim, dtype=torch.promote_types(local.dtype, torch.float32))
    if name == "mean":  # divide before the reduction: the sum may overflow a narrow dtype
        total = total / prod(tensor.shape[each] for each in dims)
    return token_shard.sum_over_ranks(total).to(local.dtype)


def partial_index(tensor: Any, index: Any) -> Any:
    """Returns a SequenceShardedTensor at an `index` of a few positions that all ranks know; None for any
    other index.
    """
    by_dim = _index_by_dim(index if isinstance(index, tuple) else (index,), tensor.ndim)
    if by_dim is None or not tensor.dtype.is_floating_point or tensor.sequence_dim not in by_dim:
        return None
    sequence_index, token_shard = by_dim[tensor.sequence_dim], tensor.token_shard
    if isinstance(sequence_index, torch.Tensor):
        return _index_by_tensor(tensor, by_dim, sequence_index)
    positions = range(token_shard.length)[sequence_index]
    if isinstance(positions, range) and len(positions) != 1:
        return None
    local_position = _local_position(
        token_shard.spans, positions[0] if isinstance(positions, range) else positions
    )
    local_index = (
        slice(local_position or 0, (local_position or 0) + 1)
        if isinstance(sequence_index, slice)
        else local_position or 0
    )
    selected = tensor.local_tensor[_rebuild_index(by_dim, tensor.sequence_dim, local_index)]
    if local_position is None:  # not multiplied by 0: the element may be nan or inf
        selected = selected.masked_fill(torch.ones((), dtype=torch.bool, device=selected.device), 0)
    return token_shard.sum_over_ranks(selected)


def _index_by_tensor(tensor: Any, by_dim: dict[int, Any], sequence_index: torch.Tensor) -> Any:
    """Returns the tokens that an integer tensor selects: those of this rank, zeros elsewhere, summed over
    ranks.
    """
    token_shard, sequence_dim = tensor.token_shard, tensor.sequence_dim
    positions = torch.tensor(span_positions(token_shard.spans), dtype=torch.int64)
    local_positions = torch.zeros(token_shard.length, dtype=torch.int64)
    is_local = torch.zeros(token_shard.length, dtype=torch.bool)
    local_positions[positions], is_local[positions] = torch.arange(len(positions)), True
    local_positions, is_local = local_positions.to(sequence_index.device), is_local.to(sequence_index.device)
    shape = [1] * tensor.ndim
    shape[sequence_dim] = token_shard.length
    local_index = is_local.view(shape).expand(tensor.shape)[
        _rebuild_index(by_dim, sequence_dim, sequence_index)
    ]
    selected = tensor.local_tensor[_rebuild_index(by_dim, sequence_dim, local_positions[sequence_index])]
    return token_shard.sum_over_ranks(selected.masked_fill(~local_index, 0))


def _index_by_dim(index: tuple[Any, ...], ndim: int) -> dict[int, Any] | None:
    """Returns the index of each dim, and of new dims under negative numbers; None if it has other entries
    than positions.
    """
    is_supported = all(each is None or each is Ellipsis or type(each) in (int, slice) for each in index)
    if not is_supported and not all(type(each) in (int, slice) or _is_integer_index(each) for each in index):
        return None
    if Ellipsis in [each for each in index if not isinstance(each, torch.Tensor)]:
        sequence_index = next(number for number, each in enumerate(index) if each is Ellipsis)
        named = sum(each is not None and each is not Ellipsis for each in index)
        index = (*index[:sequence_index], *[slice(None)] * (ndim - named), *index[sequence_index + 1 :])
    by_dim, dim, new = dict[int, Any](), 0, 0
    for each in index:
        if each is None:
            new -= 1
            by_dim[new] = None
        else:
            by_dim[dim] = each
            dim += 1
    return by_dim


def _is_integer_index(each: Any) -> bool:
    return isinstance(each, torch.Tensor) and each.dtype in INDEX_DTYPES


def _rebuild_index(by_dim: dict[int, Any], sequence_dim: int, sequence_index: Any) -> tuple[Any, ...]:
    return tuple(sequence_index if dim == sequence_dim else each for dim, each in by_dim.items())


def _local_position(spans: tuple[TokenRange, ...], position: int) -> int | None:
    """Returns the local position of the token at `position`; None if this rank does not have it."""
    before = 0
    for begin, end in spans:
        if begin <= position < end:
            return before + position - begin
        before += end - begin
    return None
