"""What every operation of torch does to the features that its tensors carry (model/carried.py), by the name of the operation.

    views, copies           the same numbers, laid out as the tensor
    element by element      an element that is computed from several ties their numbers
    along a dim             a sum, a norm, a softmax ties all numbers along it
    products                tie along what is summed over; the first factor uses what the second carries
    all else                ties everything that goes in, and what comes out carries nothing: such a layer stays whole; so does
                            a known operation that is called in a form of which nothing is known

Limits: an operation that picks single elements by an index that is not known ties all along that dim.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from meshwright.model.carried import NONE, Carried, Numbers, aligned, viewed
from meshwright.model.values import tensors

Effect = Callable[[Carried, Any, Sequence[Any], Mapping[str, Any], Any], None]
aten: Any = torch.ops.aten


def follow(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Note what the results `out` of one operation carry."""
    packet = func._overloadpacket
    if packet in CONSTANTS:
        carried.constant(out)
        return
    given = tensors((args, kwargs))
    if not any(carried.known(tensor) for tensor in given):
        return
    if packet in FRESH:
        return
    effect = EFFECTS.get(packet)
    if effect is None:
        effect = _pointwise if torch.Tag.pointwise in func.tags else _lost
    if packet in AS_IS or effect is _pointwise or any(carried.of(tensor) is not None for tensor in given):
        try:
            effect(carried, func, args, kwargs, out)
        except (IndexError, KeyError, TypeError, ValueError):  # called in a form that is not known here
            _lost(carried, func, args, kwargs, out)


def _pointwise(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    if not isinstance(out, torch.Tensor):
        _lost(carried, func, args, kwargs, out)
        return
    given = [tensor for tensor in tensors((args, kwargs)) if tensor.ndim <= out.ndim]
    found = [aligned(numbers, out.ndim) for tensor in given if (numbers := carried.of(tensor)) is not None]
    plain = [tensor for tensor in given if carried.of(tensor) is None]
    if not found:
        loose = [False] * out.ndim
        for tensor in plain:
            for dim, changes in enumerate(carried.loose(tensor)):
                loose[out.ndim - tensor.ndim + dim] |= changes
        carried.constant(out, loose)
        return
    for tensor in plain:
        found = [carried.beside(numbers, tensor, out.ndim) for numbers in found]
    for other in found[1:]:
        carried.ties.unite(found[0], other)
    carried.put(out, _joined(found))


def _joined(found: Sequence[Numbers]) -> Numbers:
    """The first number that stands at each place."""
    joined = found[0]
    for other in found[1:]:
        joined, other = np.broadcast_arrays(joined, other)
        joined = np.where(joined == NONE, other, joined)
    return joined


def _same(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    if carried.of(args[0]) is None:
        carried.constant(out, carried.loose(args[0]))
    else:
        carried.put(out, carried.of(args[0]))


def _view(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    if out.numel():
        carried.put(out, viewed(_first(carried, args), args[0].shape, out.shape))


def _transpose(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    carried.put(out, np.swapaxes(_first(carried, args), args[1], args[2]))


def _turned(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    carried.put(out, np.transpose(_first(carried, args), args[1] if len(args) > 1 else None))


def _expand(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    if carried.of(args[0]) is None:
        loose = carried.loose(args[0])
        carried.constant(out, (*[False] * (out.ndim - len(loose)), *loose))
    else:
        carried.put(out, aligned(_first(carried, args), out.ndim))


def _slice(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    numbers = _first(carried, args)
    given: tuple[Any, ...] = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
    dim, start, end, step = given
    if numbers.shape[dim] > 1:
        places = range(args[0].shape[dim])[start:end:step]
        numbers = numbers.take(list(places), axis=dim)
    carried.put(out, numbers)


def _select(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    numbers, dim, index = _first(carried, args), args[1], args[2]
    carried.put(out, numbers.take(index if numbers.shape[dim] > 1 else 0, axis=dim))


def _split(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    numbers, dim, start = _first(carried, args), _dim(func, args, kwargs), 0
    for part in out:
        end = start + part.shape[dim]
        carried.put(part, numbers if numbers.shape[dim] == 1 else numbers.take(range(start, end), axis=dim))
        start = end


def _unbind(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    numbers, dim = _first(carried, args), _dim(func, args, kwargs)
    for i, part in enumerate(out):
        carried.put(part, numbers.take(i if numbers.shape[dim] > 1 else 0, axis=dim))


def _cat(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    dim = _dim(func, args, kwargs)
    _put_side_by_side(carried, [part for part in args[0] if part.ndim == out.ndim], dim % out.ndim, out)


def _stack(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    dim = _dim(func, args, kwargs) % out.ndim
    found = [carried.of(part) for part in args[0]]
    ndim = out.ndim - 1
    shapes = np.broadcast_shapes(*(numbers.shape for numbers in found if numbers is not None))
    rows = [np.full((1,) * ndim, NONE) if numbers is None else numbers for numbers in found]
    carried.put(out, np.stack([np.broadcast_to(numbers, shapes) for numbers in rows], axis=dim))


def _put_side_by_side(carried: Carried, parts: Sequence[torch.Tensor], dim: int, out: torch.Tensor) -> None:
    found = [carried.of(part) for part in parts]
    shape = list(np.broadcast_shapes(*(_without(numbers.shape, dim) for numbers in found if numbers is not None)))
    rows = []
    for part, numbers in zip(parts, found, strict=True):
        shape[dim] = part.shape[dim]
        rows.append(np.broadcast_to(np.full((1,) * out.ndim, NONE) if numbers is None else numbers, shape))
    carried.put(out, np.concatenate(rows, axis=dim))


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return tuple(1 if i == dim else size for i, size in enumerate(shape))


def _along(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """One number for all that a sum, a norm or a softmax takes in along its dims."""
    numbers = _first(carried, args)
    dims = _dim(func, args, kwargs)
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        dims = range(args[0].ndim)
    dims = [dim % max(1, args[0].ndim) for dim in (dims if isinstance(dims, (list, tuple, range)) else [dims])]
    numbers = carried.ties.along(numbers, [dim for dim in dims if dim < numbers.ndim])
    for each in tensors(out):
        fits = each.ndim == numbers.ndim
        carried.put(each, numbers if fits else np.squeeze(numbers, axis=tuple(dims)))


def _layer_norm(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    numbers = _first(carried, args)
    ndim = len(args[1])
    found = carried.ties.along(numbers, range(numbers.ndim - ndim, numbers.ndim))
    for each in tensors(out):
        if each.ndim == found.ndim:
            carried.put(each, found)


def _product(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    left, right = args[-2:] if func._overloadpacket in (aten.mm, aten.bmm) else args[1:3]
    first, second = carried.of(left), carried.of(right)
    if func._overloadpacket not in (aten.mm, aten.bmm) and kwargs.get("beta", 1) != 0 and carried.of(args[0]) is not None:
        _lost(carried, func, args, kwargs, out)
        return
    first = None if first is None else carried.ties.along(first, [-1])
    second = None if second is None else carried.ties.along(second, [-2])
    if first is not None and second is not None:
        carried.ties.use(first, carried.ties.along(second, [-1]))
    elif out.ndim == 3 and first is not None:
        first = carried.ties.along(first, [0] if right.shape[0] > 1 else [])
    elif out.ndim == 3 and second is not None:
        second = carried.ties.along(second, [0] if left.shape[0] > 1 else [])
    carried.put(out, second if first is None else first)


def _glu(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    numbers, dim = _first(carried, args), _dim(func, args, kwargs)
    if numbers.shape[dim] > 1:
        numbers, gate = np.split(numbers, 2, axis=dim)
        carried.ties.unite(numbers, gate)
    carried.put(out, numbers)


def _index(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Rows picked along one dim, by an index that is known or not."""
    numbers = _first(carried, args)
    if func._overloadpacket is aten.index:
        picked = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
    else:
        picked = [(args[1], args[2])]
    if len(picked) != 1 or picked[0][1].ndim != 1 or picked[0][1].dtype == torch.bool:
        _lost(carried, func, args, kwargs, out)
        return
    ((dim, index),) = picked
    if numbers.shape[dim] > 1:
        places = _places(index)
        numbers = carried.ties.along(numbers, [dim]) if places is None else numbers.take(places, axis=dim)
    carried.put(out, numbers)


def _places(index: torch.Tensor) -> list[int] | None:
    """The values of `index`, if they are there: a fake tensor keeps those of a list that was written down."""
    known = index.constant if isinstance(index, FakeTensor) else index
    with no_dispatch():
        return None if known is None else known.tolist()


def _lost(carried: Carried, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Everything that goes in is tied; nobody knows what comes out."""
    met = [numbers for tensor in tensors((args, kwargs)) if (numbers := carried.of(tensor)) is not None]
    ones = [carried.ties.along(numbers, range(numbers.ndim)).reshape(()) for numbers in met]
    for one in ones[1:]:
        carried.ties.unite(ones[0], one)
    for each in tensors(out):
        carried.put(each, None)


def _first(carried: Carried, args: Sequence[Any]) -> Numbers:
    numbers = carried.of(args[0])
    return np.full((1,) * args[0].ndim, NONE) if numbers is None else numbers


def _dim(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dim", "dims"):
            return args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
    return None


CONSTANTS = {aten.zeros, aten.ones, aten.full, aten.scalar_tensor, aten.new_zeros, aten.new_ones, aten.new_full}
CONSTANTS |= {aten.zeros_like, aten.ones_like, aten.full_like}
FRESH = {aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.rand_like, aten.randn_like, torch.ops.prim.device}
EFFECTS: Mapping[Any, Effect] = {
    **dict.fromkeys((aten.clone, aten.detach, aten.alias, aten._to_copy, aten.lift_fresh, aten.contiguous), _same),
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.squeeze, aten.unsqueeze), _view),
    **dict.fromkeys((aten.mean, aten.sum, aten.amax, aten.amin, aten.prod, aten.logsumexp, aten.var, aten.std), _along),
    **dict.fromkeys((aten._softmax, aten._log_softmax, aten.linalg_vector_norm, aten.cumsum, aten.var_mean), _along),
    **dict.fromkeys((aten.mm, aten.bmm, aten.addmm, aten.baddbmm), _product),
    **dict.fromkeys((aten.permute, aten.t), _turned),
    **dict.fromkeys((aten.split, aten.split_with_sizes), _split),
    **dict.fromkeys((aten.index, aten.index_select), _index),
    **dict.fromkeys((aten.masked_fill_, aten.copy_), _pointwise),
    aten.transpose: _transpose,
    aten.expand: _expand,
    aten.slice: _slice,
    aten.select: _select,
    aten.unbind: _unbind,
    aten.cat: _cat,
    aten.stack: _stack,
    aten.native_layer_norm: _layer_norm,
    aten.glu: _glu,
}
AS_IS = {packet for packet, effect in EFFECTS.items() if effect in (_same, _expand)}
