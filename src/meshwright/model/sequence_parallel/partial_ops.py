"""What glue makes of a few of all tokens, or of their sum: ranks need not send each other all of them for that.

    hidden[:, 0], hidden[:, -1:]     the rank that has the token gives it, the others zeros          sum of [rows, width]
    hidden[rows, last]               each rank gives those of the tokens that it has                 sum of [rows, width]
    hidden.mean(1), hidden.sum()     each rank gives the sum of its own                              sum of [rows, width]

Backward is a sum too: what each rank makes of the result is a summand of its gradient, and goes to who gave the token.
"""

from math import prod
from typing import Any

import torch

from meshwright.model.tensors.token_slices import span_positions
from meshwright.plan.model_spec.sequence_info import TokenRange

SUM_OPS = ("sum", "mean")
INDEX_DTYPES = (torch.int64, torch.int32)


def partial_sum(name: str, tensor: Any, dim: Any = None, keepdim: Any = False, **more: Any) -> Any:
    """The `sum` or `mean` of an Apart over its tokens; None where it is not over them, or is asked for in another way."""
    dims = (
        tuple(range(tensor.ndim))
        if dim is None or dim == ()
        else dim
        if isinstance(dim, (tuple, list))
        else (dim,)
    )
    plain = all(type(each) is int for each in dims) and type(keepdim) is bool and not more
    if (
        not plain
        or not tensor.dtype.is_floating_point
        or tensor.sequence_dim not in (each % tensor.ndim for each in dims)
    ):
        return None
    local, share = tensor.local_tensor, tensor.token_shard
    own = local.narrow(tensor.sequence_dim, 0, share.num_tokens)  # behind them stand-ins may run
    total = own.sum(dims, keepdim=keepdim, dtype=torch.promote_types(local.dtype, torch.float32))
    if name == "mean":  # before they are added: a sum of many may leave a narrow dtype
        total = total / prod(tensor.shape[each] for each in dims)
    return share.sum_over_ranks(total).to(local.dtype)


def partial_index(tensor: Any, index: Any) -> Any:
    """An Apart at an `index` by which all ranks know the places of the tokens that it takes, a few; None for any other."""
    found = _index_by_dim(index if isinstance(index, tuple) else (index,), tensor.ndim)
    if found is None or not tensor.dtype.is_floating_point or tensor.sequence_dim not in found:
        return None
    at, share = found[tensor.sequence_dim], tensor.token_shard
    if isinstance(at, torch.Tensor):
        return _index_by_tensor(tensor, found, at)
    places = range(share.length)[at]
    if isinstance(places, range) and len(places) != 1:
        return None
    place = _local_position(share.spans, places[0] if isinstance(places, range) else places)
    mine = slice(place or 0, (place or 0) + 1) if isinstance(at, slice) else place or 0
    part = tensor.local_tensor[_rebuild_index(found, tensor.sequence_dim, mine)]
    if place is None:  # no product with 0: what stands there may be no number
        part = part.masked_fill(torch.ones((), dtype=torch.bool, device=part.device), 0)
    return share.sum_over_ranks(part)


def _index_by_tensor(tensor: Any, found: dict[int, Any], at: torch.Tensor) -> Any:
    """What this rank has of the tokens that an index of whole numbers takes, amid zeros, and the sum of that."""
    share, along = tensor.token_shard, tensor.sequence_dim
    places = torch.tensor(span_positions(share.spans), dtype=torch.int64)
    where = torch.zeros(share.length, dtype=torch.int64)
    here = torch.zeros(share.length, dtype=torch.bool)
    where[places], here[places] = torch.arange(len(places)), True
    where, here = where.to(at.device), here.to(at.device)
    form = [1] * tensor.ndim
    form[along] = share.length
    mine = here.view(form).expand(tensor.shape)[_rebuild_index(found, along, at)]
    part = tensor.local_tensor[_rebuild_index(found, along, where[at])]
    return share.sum_over_ranks(part.masked_fill(~mine, 0))


def _index_by_dim(index: tuple[Any, ...], ndim: int) -> dict[int, Any] | None:
    """What an index says of each dim, and of new ones under numbers below 0; None where it is none of places alone."""
    plain = all(each is None or each is Ellipsis or type(each) in (int, slice) for each in index)
    if not plain and not all(type(each) in (int, slice) or _is_integer_index(each) for each in index):
        return None
    if Ellipsis in [each for each in index if not isinstance(each, torch.Tensor)]:
        at = next(number for number, each in enumerate(index) if each is Ellipsis)
        named = sum(each is not None and each is not Ellipsis for each in index)
        index = (*index[:at], *[slice(None)] * (ndim - named), *index[at + 1 :])
    found, dim, new = dict[int, Any](), 0, 0
    for each in index:
        if each is None:
            new -= 1
            found[new] = None
        else:
            found[dim] = each
            dim += 1
    return found


def _is_integer_index(each: Any) -> bool:
    return isinstance(each, torch.Tensor) and each.dtype in INDEX_DTYPES


def _rebuild_index(found: dict[int, Any], along: int, at: Any) -> tuple[Any, ...]:
    """The index again, with another entry for tokens."""
    return tuple(at if dim == along else each for dim, each in found.items())


def _local_position(spans: tuple[TokenRange, ...], position: int) -> int | None:
    """Where the token at a `position` stands among those in `spans`; None where it does not."""
    before = 0
    for begin, end in spans:
        if begin <= position < end:
            return before + position - begin
        before += end - begin
    return None
