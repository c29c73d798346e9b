"""What every operation of torch does to the features that its tensors carry (model/carried.py), by the name of the operation.

    views, copies           the same numbers, laid out as the tensor
    element by element      an element that is computed from several ties their numbers
    along a dim             a sum, a norm, a softmax ties all numbers along it
    products                tie along what is summed over; the first factor uses what the second carries
    all else                ties everything that goes in, and what comes out carries nothing: such a layer stays whole; so does
                            a known operation that is called in a form of which nothing is known

Limits: an operation that picks single elements by an index that is not known ties all along that dim.

Which features of which layers a tensor carries: numbers that travel with it, through views and products, while a model runs.

Every feature that a layer gives out has a number. What a tensor *carries* is an array of such numbers with the tensor's own dims,
of size 1 along dims in which they do not change:

    q = x W      [3, 9, 8]       carries [1, 1, 8]:  0 1 2 3 4 5 6 7
    as heads     [3, 2, 9, 4]    carries [1, 2, 1, 4]: head 0 has 0 1 2 3, head 1 has 4 5 6 7

An operation that computes one element from several features ties them together: a rank that has one of them must have all.
`unite` ties, and `uses` ties loosely: what uses a feature needs it, and others may need it too (heads that share a key).
Numbers of features that are tied to all others of a dim are left out: the array gets size 1 there. NONE marks what is no feature.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.model.tensors.pytree import tensors

Numbers = np.ndarray
NONE = -1


@dataclass
class Ties:
    """Which numbers belong together, as pairs of arrays: `together` always, `used` by those that read them."""

    together: list[tuple[Numbers, Numbers]] = field(default_factory=list)
    used: list[tuple[Numbers, Numbers]] = field(default_factory=list)

    def unite(self, first: Numbers, second: Numbers) -> None:
        """What computes with an element of both ties their numbers."""
        _tie(self.together, first, second)

    def use(self, reader: Numbers, read: Numbers) -> None:
        """Numbers of `reader` use those of `read`."""
        _tie(self.used, reader, read)

    def along(self, numbers: Numbers, dims: Iterable[int]) -> Numbers:
        """`numbers` after all that differ along `dims` are tied: size 1 there."""
        for dim in dims:
            if numbers.shape[dim] > 1:
                some = numbers.max(axis=dim, keepdims=True)  # where there is a number, it is not NONE
                self.unite(numbers, some)
                numbers = some
        return numbers


def classes(count: int, ties: Iterable[tuple[Numbers, Numbers]]) -> Numbers:
    """For each of `count` numbers, the smallest one that it is tied to."""
    pairs = list(ties)
    label = np.arange(count)
    first = np.concatenate([pair[0] for pair in pairs]) if pairs else label[:0]
    second = np.concatenate([pair[1] for pair in pairs]) if pairs else label[:0]
    while (label[first] != label[second]).any():
        one, other = label[first], label[second]
        np.minimum.at(label, np.maximum(one, other), np.minimum(one, other))
        while (label[label] != label).any():
            label = label[label]
    return label


@dataclass
class Carried:
    """What tensors carry, by identity; and of tensors that carry nothing and are constant along dims, the other dims."""

    ties: Ties = field(default_factory=Ties)
    _numbers: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    _loose: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def of(self, tensor: torch.Tensor) -> Numbers | None:
        """What `tensor` carries, if anything."""
        return self._numbers.get(tensor)

    def put(self, tensor: torch.Tensor, numbers: Numbers | None) -> None:
        """Note what `tensor` carries."""
        if numbers is not None:
            self._numbers[tensor] = compact(np.asarray(numbers))
        elif tensor in self._numbers:
            del self._numbers[tensor]

    def forget(self, keep: Callable[[Numbers], bool]) -> None:
        """Forget what all tensors carry but those of whose numbers `keep` holds."""
        for tensor, numbers in list(self._numbers.items()):
            if not keep(numbers):
                del self._numbers[tensor]

    def loose(self, tensor: torch.Tensor) -> tuple[bool, ...]:
        """Along which dims a tensor that carries nothing may change."""
        known = self._loose.get(tensor)
        return tuple(size > 1 for size in tensor.shape) if known is None else known

    def known(self, tensor: torch.Tensor) -> bool:
        """Whether something is known of `tensor`: what it carries, or that it is constant."""
        return tensor in self._numbers or tensor in self._loose

    def constant(self, tensor: torch.Tensor, loose: Sequence[bool] | None = None) -> None:
        """Note that `tensor` carries nothing, and changes along the dims `loose` only."""
        self._loose[tensor] = tuple(loose) if loose is not None else (False,) * tensor.ndim

    def beside(self, numbers: Numbers, plain: torch.Tensor, ndim: int) -> Numbers:
        """`numbers`, of `ndim` dims, where an element of them meets one of `plain`: tied along dims in which that changes."""
        loose = self.loose(plain)
        changing = [dim + ndim - plain.ndim for dim, changes in enumerate(loose) if changes]
        return self.ties.along(numbers, [dim for dim in changing if dim >= 0])


def given_out(first: int, width: int, ndim: int) -> Numbers:
    """What the output of a layer carries that has `width` features, the first of number `first`."""
    return np.arange(first, first + width).reshape((1,) * (ndim - 1) + (width,))


def compact(numbers: Numbers) -> Numbers:
    """`numbers` with size 1 along dims in which they do not change."""
    for dim, size in enumerate(numbers.shape):
        if size > 1:
            one = numbers.take([0], axis=dim)
            numbers = one if (numbers == one).all() else numbers
    return numbers


def aligned(numbers: Numbers, ndim: int) -> Numbers:
    """`numbers` with dims of size 1 in front, `ndim` in all."""
    return numbers.reshape((1,) * (ndim - numbers.ndim) + numbers.shape)


def viewed(numbers: Numbers, old: Sequence[int], new: Sequence[int]) -> Numbers:
    """What a view of shape `new` carries of a tensor of shape `old`."""
    full, shape = [], []
    for before, after in _groups(list(old), list(new)):
        changes = any(size > 1 for size in numbers.shape[before])
        full += list(old[before]) if changes else [1] * len(old[before])
        shape += list(new[after]) if changes else [1] * len(new[after])
    return np.broadcast_to(numbers, full).reshape(shape)


def _groups(old: list[int], new: list[int]) -> Iterable[tuple[slice, slice]]:
    """The dims of `old` and of `new` that hold the same elements, group by group."""
    i = j = 0
    while i < len(old) or j < len(new):
        first, start = i, j
        left = old[i] if i < len(old) else 1
        right = new[j] if j < len(new) else 1
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        yield slice(first, i), slice(start, j)


def _tie(found: list[tuple[Numbers, Numbers]], first: Numbers, second: Numbers) -> None:
    one, other = np.broadcast_arrays(first, second)
    apart = (one != other) & (one != NONE) & (other != NONE)
    if apart.any():
        found.append((one[apart], other[apart]))


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
