"""What every operation of torch does to the features that its tensors carry (model/carried.py), by the name
of the operation.

    views, copies           the same numbers, laid out as the tensor
    element by element      an element that is computed from several ties their numbers
    along a dim             a sum, a norm, a softmax ties all numbers along it
    products                tie along what is summed over; the first factor uses what the second carries
    all else                ties everything that goes in, and what comes out carries nothing: such a layer
                            stays whole; so does
                            a known operation that is called in a form of which nothing is known

Limits: an operation that picks single elements by an index that is not known ties all along that dim.

Which features of which layers a tensor carries: numbers that travel with it, through views and products,
while a model runs.

Every feature that a layer gives out has a number. What a tensor *carries* is an array of such numbers with
the tensor's own dims, of size 1 along dims in which they do not change:

    q = x W      [3, 9, 8]       carries [1, 1, 8]:  0 1 2 3 4 5 6 7
    as heads     [3, 2, 9, 4]    carries [1, 2, 1, 4]: head 0 has 0 1 2 3, head 1 has 4 5 6 7

An operation that computes one element from several features ties them together: a rank that has one of them
must have all. `unite` ties, and `uses` ties loosely: what uses a feature needs it, and others may need it too
(heads that share a key). Numbers of features that are tied to all others of a dim are left out: the array
gets size 1 there. NONE marks what is no feature.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.model.tensors.pytree import tree_tensors

FeatureIds = np.ndarray
NO_FEATURE = -1


@dataclass
class FeatureTies:
    """Which numbers belong together, as pairs of arrays: `together` always,
    `used` by those that read them.
    """

    tied_pairs: list[tuple[FeatureIds, FeatureIds]] = field(default_factory=list)
    used_pairs: list[tuple[FeatureIds, FeatureIds]] = field(default_factory=list)

    def tie(self, first: FeatureIds, second: FeatureIds) -> None:
        """What computes with an element of both ties their numbers."""
        _add_pairs(self.tied_pairs, first, second)

    def tie_reader(self, reader: FeatureIds, read: FeatureIds) -> None:
        """Numbers of `reader` use those of `read`."""
        _add_pairs(self.used_pairs, reader, read)

    def tie_along(self, numbers: FeatureIds, dims: Iterable[int]) -> FeatureIds:
        """`numbers` after all that differ along `dims` are tied: size 1 there."""
        for dim in dims:
            if numbers.shape[dim] > 1:
                some = numbers.max(axis=dim, keepdims=True)  # feature ids are greater than NO_FEATURE
                self.tie(numbers, some)
                numbers = some
        return numbers


def component_labels(count: int, ties: Iterable[tuple[FeatureIds, FeatureIds]]) -> FeatureIds:
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
class CarriedFeatures:
    """What tensors carry, by identity; and of tensors that carry nothing and are constant along dims, the
    other dims.
    """

    ties: FeatureTies = field(default_factory=FeatureTies)
    _feature_ids: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    _varying_dims: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def get(self, tensor: torch.Tensor) -> FeatureIds | None:
        """What `tensor` carries, if anything."""
        return self._feature_ids.get(tensor)

    def record(self, tensor: torch.Tensor, numbers: FeatureIds | None) -> None:
        """Note what `tensor` carries."""
        if numbers is not None:
            self._feature_ids[tensor] = drop_constant_dims(np.asarray(numbers))
        elif tensor in self._feature_ids:
            del self._feature_ids[tensor]

    def forget(self, keep: Callable[[FeatureIds], bool]) -> None:
        """Forget what all tensors carry but those of whose numbers `keep` holds."""
        for tensor, numbers in list(self._feature_ids.items()):
            if not keep(numbers):
                del self._feature_ids[tensor]

    def varying_dims(self, tensor: torch.Tensor) -> tuple[bool, ...]:
        """Along which dims a tensor that carries nothing may change."""
        known = self._varying_dims.get(tensor)
        return tuple(size > 1 for size in tensor.shape) if known is None else known

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether something is known of `tensor`: what it carries, or that it is constant."""
        return tensor in self._feature_ids or tensor in self._varying_dims

    def set_constant(self, tensor: torch.Tensor, varying_dims: Sequence[bool] | None = None) -> None:
        """Note that `tensor` carries nothing, and changes along the dims `loose` only."""
        self._varying_dims[tensor] = (
            tuple(varying_dims) if varying_dims is not None else (False,) * tensor.ndim
        )

    def tie_to_other(self, numbers: FeatureIds, other: torch.Tensor, ndim: int) -> FeatureIds:
        """`numbers`, of `ndim` dims, where an element of them meets one of `plain`: tied along dims in which
        that changes.
        """
        loose = self.varying_dims(other)
        changing = [dim + ndim - other.ndim for dim, changes in enumerate(loose) if changes]
        return self.ties.tie_along(numbers, [dim for dim in changing if dim >= 0])


def output_features(first: int, width: int, ndim: int) -> FeatureIds:
    """What the output of a layer carries that has `width` features, the first of number `first`."""
    return np.arange(first, first + width).reshape((1,) * (ndim - 1) + (width,))


def drop_constant_dims(numbers: FeatureIds) -> FeatureIds:
    """`numbers` with size 1 along dims in which they do not change."""
    for dim, size in enumerate(numbers.shape):
        if size > 1:
            one = numbers.take([0], axis=dim)
            numbers = one if (numbers == one).all() else numbers
    return numbers


def add_leading_dims(numbers: FeatureIds, ndim: int) -> FeatureIds:
    """`numbers` with dims of size 1 in front, `ndim` in all."""
    return numbers.reshape((1,) * (ndim - numbers.ndim) + numbers.shape)


def view_features(numbers: FeatureIds, old: Sequence[int], new: Sequence[int]) -> FeatureIds:
    """What a view of shape `new` carries of a tensor of shape `old`."""
    full, shape = [], []
    for before, after in _view_groups(list(old), list(new)):
        changes = any(size > 1 for size in numbers.shape[before])
        full += list(old[before]) if changes else [1] * len(old[before])
        shape += list(new[after]) if changes else [1] * len(new[after])
    return np.broadcast_to(numbers, full).reshape(shape)


def _view_groups(old: list[int], new: list[int]) -> Iterable[tuple[slice, slice]]:
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


def _add_pairs(found: list[tuple[FeatureIds, FeatureIds]], first: FeatureIds, second: FeatureIds) -> None:
    one, other = np.broadcast_arrays(first, second)
    apart = (one != other) & (one != NO_FEATURE) & (other != NO_FEATURE)
    if apart.any():
        found.append((one[apart], other[apart]))


FeatureRule = Callable[[CarriedFeatures, Any, Sequence[Any], Mapping[str, Any], Any], None]
aten: Any = torch.ops.aten


def propagate_features(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Note what the results `out` of one operation carry."""
    packet = func._overloadpacket
    if packet in CONSTANT_OPS:
        carried.set_constant(out)
        return
    given = tree_tensors((args, kwargs))
    if not any(carried.is_known(tensor) for tensor in given):
        return
    if packet in UNINITIALIZED_OPS:
        return
    effect = FEATURE_RULES.get(packet)
    if effect is None:
        effect = _pointwise if torch.Tag.pointwise in func.tags else _tie_everything
    if packet in COPY_OPS or effect is _pointwise or any(carried.get(tensor) is not None for tensor in given):
        try:
            effect(carried, func, args, kwargs, out)
        except (IndexError, KeyError, TypeError, ValueError):  # called with unknown arguments
            _tie_everything(carried, func, args, kwargs, out)


def _pointwise(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    if not isinstance(out, torch.Tensor):
        _tie_everything(carried, func, args, kwargs, out)
        return
    given = [tensor for tensor in tree_tensors((args, kwargs)) if tensor.ndim <= out.ndim]
    found = [
        add_leading_dims(numbers, out.ndim)
        for tensor in given
        if (numbers := carried.get(tensor)) is not None
    ]
    plain = [tensor for tensor in given if carried.get(tensor) is None]
    if not found:
        loose = [False] * out.ndim
        for tensor in plain:
            for dim, changes in enumerate(carried.varying_dims(tensor)):
                loose[out.ndim - tensor.ndim + dim] |= changes
        carried.set_constant(out, loose)
        return
    for tensor in plain:
        found = [carried.tie_to_other(numbers, tensor, out.ndim) for numbers in found]
    for other in found[1:]:
        carried.ties.tie(found[0], other)
    carried.record(out, _merge_features(found))


def _merge_features(found: Sequence[FeatureIds]) -> FeatureIds:
    """The first number that stands at each place."""
    joined = found[0]
    for other in found[1:]:
        joined, other = np.broadcast_arrays(joined, other)
        joined = np.where(joined == NO_FEATURE, other, joined)
    return joined


def _copy(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    if carried.get(args[0]) is None:
        carried.set_constant(out, carried.varying_dims(args[0]))
    else:
        carried.record(out, carried.get(args[0]))


def _view(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    if out.numel():
        carried.record(out, view_features(_first_features(carried, args), args[0].shape, out.shape))


def _transpose(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    carried.record(out, np.swapaxes(_first_features(carried, args), args[1], args[2]))


def _permute(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    carried.record(out, np.transpose(_first_features(carried, args), args[1] if len(args) > 1 else None))


def _expand(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    if carried.get(args[0]) is None:
        loose = carried.varying_dims(args[0])
        carried.set_constant(out, (*[False] * (out.ndim - len(loose)), *loose))
    else:
        carried.record(out, add_leading_dims(_first_features(carried, args), out.ndim))


def _slice(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    numbers = _first_features(carried, args)
    given: tuple[Any, ...] = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
    dim, start, end, step = given
    if numbers.shape[dim] > 1:
        places = range(args[0].shape[dim])[start:end:step]
        numbers = numbers.take(list(places), axis=dim)
    carried.record(out, numbers)


def _select(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    numbers, dim, index = _first_features(carried, args), args[1], args[2]
    carried.record(out, numbers.take(index if numbers.shape[dim] > 1 else 0, axis=dim))


def _split(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    numbers, dim, start = _first_features(carried, args), _dim_argument(func, args, kwargs), 0
    for part in out:
        end = start + part.shape[dim]
        carried.record(
            part, numbers if numbers.shape[dim] == 1 else numbers.take(range(start, end), axis=dim)
        )
        start = end


def _unbind(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    numbers, dim = _first_features(carried, args), _dim_argument(func, args, kwargs)
    for i, part in enumerate(out):
        carried.record(part, numbers.take(i if numbers.shape[dim] > 1 else 0, axis=dim))


def _cat(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    dim = _dim_argument(func, args, kwargs)
    _concatenate(carried, [part for part in args[0] if part.ndim == out.ndim], dim % out.ndim, out)


def _stack(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    dim = _dim_argument(func, args, kwargs) % out.ndim
    found = [carried.get(part) for part in args[0]]
    ndim = out.ndim - 1
    shapes = np.broadcast_shapes(*(numbers.shape for numbers in found if numbers is not None))
    rows = [np.full((1,) * ndim, NO_FEATURE) if numbers is None else numbers for numbers in found]
    carried.record(out, np.stack([np.broadcast_to(numbers, shapes) for numbers in rows], axis=dim))


def _concatenate(
    carried: CarriedFeatures, parts: Sequence[torch.Tensor], dim: int, out: torch.Tensor
) -> None:
    found = [carried.get(part) for part in parts]
    shape = list(
        np.broadcast_shapes(
            *(_shape_without_dim(numbers.shape, dim) for numbers in found if numbers is not None)
        )
    )
    rows = []
    for part, numbers in zip(parts, found, strict=True):
        shape[dim] = part.shape[dim]
        rows.append(
            np.broadcast_to(np.full((1,) * out.ndim, NO_FEATURE) if numbers is None else numbers, shape)
        )
    carried.record(out, np.concatenate(rows, axis=dim))


def _shape_without_dim(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return tuple(1 if i == dim else size for i, size in enumerate(shape))


def _reduce(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """One number for all that a sum, a norm or a softmax takes in along its dims."""
    numbers = _first_features(carried, args)
    dims = _dim_argument(func, args, kwargs)
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        dims = range(args[0].ndim)
    dims = [
        dim % max(1, args[0].ndim) for dim in (dims if isinstance(dims, (list, tuple, range)) else [dims])
    ]
    numbers = carried.ties.tie_along(numbers, [dim for dim in dims if dim < numbers.ndim])
    for each in tree_tensors(out):
        fits = each.ndim == numbers.ndim
        carried.record(each, numbers if fits else np.squeeze(numbers, axis=tuple(dims)))


def _layer_norm(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    numbers = _first_features(carried, args)
    ndim = len(args[1])
    found = carried.ties.tie_along(numbers, range(numbers.ndim - ndim, numbers.ndim))
    for each in tree_tensors(out):
        if each.ndim == found.ndim:
            carried.record(each, found)


def _product(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    left, right = args[-2:] if func._overloadpacket in (aten.mm, aten.bmm) else args[1:3]
    first, second = carried.get(left), carried.get(right)
    if (
        func._overloadpacket not in (aten.mm, aten.bmm)
        and kwargs.get("beta", 1) != 0
        and carried.get(args[0]) is not None
    ):
        _tie_everything(carried, func, args, kwargs, out)
        return
    first = None if first is None else carried.ties.tie_along(first, [-1])
    second = None if second is None else carried.ties.tie_along(second, [-2])
    if first is not None and second is not None:
        carried.ties.tie_reader(first, carried.ties.tie_along(second, [-1]))
    elif out.ndim == 3 and first is not None:
        first = carried.ties.tie_along(first, [0] if right.shape[0] > 1 else [])
    elif out.ndim == 3 and second is not None:
        second = carried.ties.tie_along(second, [0] if left.shape[0] > 1 else [])
    carried.record(out, second if first is None else first)


def _glu(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    numbers, dim = _first_features(carried, args), _dim_argument(func, args, kwargs)
    if numbers.shape[dim] > 1:
        numbers, gate = np.split(numbers, 2, axis=dim)
        carried.ties.tie(numbers, gate)
    carried.record(out, numbers)


def _index(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Rows picked along one dim, by an index that is known or not."""
    numbers = _first_features(carried, args)
    if func._overloadpacket is aten.index:
        picked = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
    else:
        picked = [(args[1], args[2])]
    if len(picked) != 1 or picked[0][1].ndim != 1 or picked[0][1].dtype == torch.bool:
        _tie_everything(carried, func, args, kwargs, out)
        return
    ((dim, index),) = picked
    if numbers.shape[dim] > 1:
        places = _known_index(index)
        numbers = carried.ties.tie_along(numbers, [dim]) if places is None else numbers.take(places, axis=dim)
    carried.record(out, numbers)


def _known_index(index: torch.Tensor) -> list[int] | None:
    """The values of `index`, if they are there: a fake tensor keeps those of a list that was written down."""
    known = index.constant if isinstance(index, FakeTensor) else index
    with no_dispatch():
        return None if known is None else known.tolist()


def _tie_everything(
    carried: CarriedFeatures, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    """Everything that goes in is tied; nobody knows what comes out."""
    met = [numbers for tensor in tree_tensors((args, kwargs)) if (numbers := carried.get(tensor)) is not None]
    ones = [carried.ties.tie_along(numbers, range(numbers.ndim)).reshape(()) for numbers in met]
    for one in ones[1:]:
        carried.ties.tie(ones[0], one)
    for each in tree_tensors(out):
        carried.record(each, None)


def _first_features(carried: CarriedFeatures, args: Sequence[Any]) -> FeatureIds:
    numbers = carried.get(args[0])
    return np.full((1,) * args[0].ndim, NO_FEATURE) if numbers is None else numbers


def _dim_argument(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dim", "dims"):
            return (
                args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            )
    return None


CONSTANT_OPS = {
    aten.zeros,
    aten.ones,
    aten.full,
    aten.scalar_tensor,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
}
CONSTANT_OPS |= {aten.zeros_like, aten.ones_like, aten.full_like}
UNINITIALIZED_OPS = {
    aten.empty_like,
    aten.new_empty,
    aten.new_empty_strided,
    aten.rand_like,
    aten.randn_like,
    torch.ops.prim.device,
}
FEATURE_RULES: Mapping[Any, FeatureRule] = {
    **dict.fromkeys(
        (aten.clone, aten.detach, aten.alias, aten._to_copy, aten.lift_fresh, aten.contiguous), _copy
    ),
    **dict.fromkeys(
        (aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.squeeze, aten.unsqueeze), _view
    ),
    **dict.fromkeys(
        (aten.mean, aten.sum, aten.amax, aten.amin, aten.prod, aten.logsumexp, aten.var, aten.std), _reduce
    ),
    **dict.fromkeys(
        (aten._softmax, aten._log_softmax, aten.linalg_vector_norm, aten.cumsum, aten.var_mean), _reduce
    ),
    **dict.fromkeys((aten.mm, aten.bmm, aten.addmm, aten.baddbmm), _product),
    **dict.fromkeys((aten.permute, aten.t), _permute),
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
COPY_OPS = {packet for packet, effect in FEATURE_RULES.items() if effect in (_copy, _expand)}
