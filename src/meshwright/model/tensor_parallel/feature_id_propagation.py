"""Propagation rules for feature ids: what every torch operation does to the features that its tensors carry.

Every output feature of a layer has an id. A tensor *carries* an array of ids with its own dims, of size 1
along dims in which they do not change:

    q = x W      [3, 9, 8]       carries [1, 1, 8]:  0 1 2 3 4 5 6 7
    as heads     [3, 2, 9, 4]    carries [1, 2, 1, 4]: head 0 has 0 1 2 3, head 1 has 4 5 6 7

An operation that computes one element from several features ties them: a rank with one of them must have
all. A weaker tie says that a reader uses a feature, which others may use too (query heads that share a key).
Ids tied to all others along a dim are left out: the array gets size 1 there. NO_FEATURE marks elements that
are no feature.

    views, copies           the same ids, in the layout of the result
    elementwise             an element computed from several features ties their ids
    along a dim             a sum, norm or softmax ties all ids along it
    matmuls                 tie along the summed dim; the first factor uses the features of the second
    all else                ties all inputs, and the result carries nothing, so such a layer stays unsharded;
                            the same holds for a known operation with unknown arguments

Limits: picking single elements by an unknown index ties all ids along that dim.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from meshwright.model.recording.forward_recording import AtenOp, TensorRecord, tensor_records
from meshwright.model.recording.op_table import DimMap, Op, find_op

FeatureIds = np.ndarray
NO_FEATURE = -1


@dataclass
class FeatureTies:
    """Pairs of tied ids: `tied_pairs` must stay together, `used_pairs` are needed by those that read them."""

    tied_pairs: list[tuple[FeatureIds, FeatureIds]] = field(default_factory=list)
    used_pairs: list[tuple[FeatureIds, FeatureIds]] = field(default_factory=list)

    def tie(self, first: FeatureIds, second: FeatureIds) -> None:
        """Ties ids that enter one element."""
        _add_pairs(self.tied_pairs, first, second)

    def tie_reader(self, reader: FeatureIds, read: FeatureIds) -> None:
        """Notes that the ids of `reader` use those of `read`."""
        _add_pairs(self.used_pairs, reader, read)

    def tie_along(self, numbers: FeatureIds, dims: Iterable[int]) -> FeatureIds:
        """Ties all ids that differ along `dims` and returns the array with size 1 there."""
        for dim in dims:
            if numbers.shape[dim] > 1:
                largest = numbers.max(axis=dim, keepdims=True)  # feature ids are greater than NO_FEATURE
                self.tie(numbers, largest)
                numbers = largest
        return numbers


def component_labels(labels: FeatureIds, ties: Iterable[tuple[FeatureIds, FeatureIds]]) -> FeatureIds:
    """Returns for each id the smallest id that it is tied to, by `ties` and by those behind `labels`.

    `labels` are such ids; without ties they are `np.arange(count)`.
    """
    pairs = list(ties)
    label = labels.copy()
    first = np.concatenate([pair[0] for pair in pairs]) if pairs else label[:0]
    second = np.concatenate([pair[1] for pair in pairs]) if pairs else label[:0]
    while (label[first] != label[second]).any():
        open_pairs = label[first] != label[second]
        first, second = first[open_pairs], second[open_pairs]
        tied_id, other = label[first], label[second]
        np.minimum.at(label, np.maximum(tied_id, other), np.minimum(tied_id, other))
        while (label[label] != label).any():
            label = label[label]
    return label


@dataclass
class CarriedFeatures:
    """The feature ids of tensors; for tensors without features that are constant along dims, the varying
    dims.
    """

    ties: FeatureTies = field(default_factory=FeatureTies)
    _feature_ids: dict[int, FeatureIds] = field(default_factory=dict)  # by tensor id
    _varying_dims: dict[int, tuple[bool, ...]] = field(default_factory=dict)

    def get(self, tensor: TensorRecord) -> FeatureIds | None:
        """Returns the ids that `tensor` carries, if any."""
        return self._feature_ids.get(tensor.id)

    def record(self, tensor: TensorRecord, numbers: FeatureIds | None) -> None:
        """Notes what `tensor` carries."""
        if numbers is not None:
            self._feature_ids[tensor.id] = drop_constant_dims(np.asarray(numbers))
        else:
            self._feature_ids.pop(tensor.id, None)

    def forget(self, keep: Callable[[FeatureIds], bool]) -> None:
        """Forgets all tensors except those whose ids satisfy `keep`."""
        self._feature_ids = {
            tensor: numbers for tensor, numbers in self._feature_ids.items() if keep(numbers)
        }

    def varying_dims(self, tensor: TensorRecord) -> tuple[bool, ...]:
        """Returns along which dims a tensor without features may vary."""
        known = self._varying_dims.get(tensor.id)
        return tuple(size > 1 for size in tensor.shape) if known is None else known

    def is_known(self, tensor: TensorRecord) -> bool:
        """Returns whether the features of `tensor`, or that it is constant, are known."""
        return tensor.id in self._feature_ids or tensor.id in self._varying_dims

    def set_constant(self, tensor: TensorRecord, varying_dims: Sequence[bool] | None = None) -> None:
        """Notes that `tensor` carries nothing and varies only along `varying_dims`."""
        self._varying_dims[tensor.id] = (
            tuple(varying_dims) if varying_dims is not None else (False,) * tensor.ndim
        )

    def tie_to_other(self, numbers: FeatureIds, other: TensorRecord, ndim: int) -> FeatureIds:
        """Returns the ids after meeting `other` elementwise, with `ndim` dims: tied along dims in which it
        varies.
        """
        varying = self.varying_dims(other)
        changing = [dim + ndim - other.ndim for dim, changes in enumerate(varying) if changes]
        return self.ties.tie_along(numbers, [dim for dim in changing if dim >= 0])


def output_features(first: int, width: int, ndim: int) -> FeatureIds:
    """Returns the ids of a layer output with `width` features from id `first`."""
    return np.arange(first, first + width).reshape((1,) * (ndim - 1) + (width,))


def drop_constant_dims(numbers: FeatureIds) -> FeatureIds:
    """Returns the ids with size 1 along dims in which they do not change."""
    for dim, size in enumerate(numbers.shape):
        if size > 1:
            tied_id = numbers.take([0], axis=dim)
            numbers = tied_id if (numbers == tied_id).all() else numbers
    return numbers


def add_leading_dims(numbers: FeatureIds, ndim: int) -> FeatureIds:
    """Returns the ids with leading dims of size 1, `ndim` in all."""
    return numbers.reshape((1,) * (ndim - numbers.ndim) + numbers.shape)


def view_features(numbers: FeatureIds, old: Sequence[int], new: Sequence[int]) -> FeatureIds:
    """Returns the ids of a view of shape `new` of a tensor of shape `old`."""
    full, shape = [], []
    for before, after in _view_groups(list(old), list(new)):
        changes = any(size > 1 for size in numbers.shape[before])
        full += list(old[before]) if changes else [1] * len(old[before])
        shape += list(new[after]) if changes else [1] * len(new[after])
    return np.broadcast_to(numbers, full).reshape(shape)


def _view_groups(old: list[int], new: list[int]) -> Iterable[tuple[slice, slice]]:
    """Yields groups of dims of `old` and `new` that hold the same elements."""
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


def _add_pairs(pairs: list[tuple[FeatureIds, FeatureIds]], first: FeatureIds, second: FeatureIds) -> None:
    tied_id, other = np.broadcast_arrays(first, second)
    differs = (tied_id != other) & (tied_id != NO_FEATURE) & (other != NO_FEATURE)
    if differs.any():
        pairs.append((tied_id[differs], other[differs]))


@dataclass(frozen=True)
class FeatureOp:
    """One call of a torch operation with its result `out`, which carries what its inputs carry."""

    carried: CarriedFeatures
    entry: Op
    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    out: Any
    inputs: list[TensorRecord]

    @property
    def first_ids(self) -> FeatureIds:
        """The ids of the first argument, as by `ids_of`."""
        return self.ids_of(self.args[0])

    @property
    def dim(self) -> Any:
        """The argument `dim` or `dims`; None if the operation has none."""
        for position, argument in enumerate(self.func._schema.arguments):
            if argument.name in ("dim", "dims"):
                by_name = self.kwargs.get(argument.name, argument.default_value)
                return self.args[position] if position < len(self.args) else by_name
        return None

    def ids_of(self, tensor: TensorRecord) -> FeatureIds:
        """Returns the ids that `tensor` carries; NO_FEATURE if it carries none."""
        numbers = self.carried.get(tensor)
        return np.full((1,) * tensor.ndim, NO_FEATURE) if numbers is None else numbers

    def record(self, numbers: FeatureIds | None) -> None:
        """Notes what the result carries."""
        self.carried.record(self.out, numbers)


FeatureRule = Callable[[FeatureOp], None]


def propagate_features(carried: CarriedFeatures, recorded: AtenOp) -> None:
    """Sets the features of the results of one operation."""
    func, inputs = recorded.overload, recorded.inputs
    entry = find_op(func._overloadpacket.__name__)
    is_constant = entry.kind == "constant" and entry.dims in ("shape", "like")
    if is_constant and not entry.is_uninitialized:
        carried.set_constant(recorded.results)
        return
    has_no_values = is_constant or entry.kind == "metadata" or (entry.kind, entry.dims) == ("random", "like")
    if has_no_values or not any(map(carried.is_known, inputs)):
        return
    op = FeatureOp(carried, entry, func, recorded.args, recorded.kwargs, recorded.results, inputs)
    rule = _find_rule(entry, func)
    if rule in (_copy, _pointwise) or any(carried.get(each) is not None for each in inputs):
        try:
            rule(op)
        except (IndexError, KeyError, TypeError, ValueError):  # called with unknown arguments
            _tie_everything(op)


def _pointwise(op: FeatureOp) -> None:
    out, carried = op.out, op.carried
    if not isinstance(out, TensorRecord):
        _tie_everything(op)
        return
    inputs = [tensor for tensor in op.inputs if tensor.ndim <= out.ndim]
    ids_of_inputs = [
        add_leading_dims(numbers, out.ndim)
        for tensor in inputs
        if (numbers := carried.get(tensor)) is not None
    ]
    without_features = [tensor for tensor in inputs if carried.get(tensor) is None]
    if not ids_of_inputs:
        varying = [False] * out.ndim
        for tensor in without_features:
            for dim, changes in enumerate(carried.varying_dims(tensor)):
                varying[out.ndim - tensor.ndim + dim] |= changes
        carried.set_constant(out, varying)
        return
    for tensor in without_features:
        ids_of_inputs = [carried.tie_to_other(numbers, tensor, out.ndim) for numbers in ids_of_inputs]
    merged = ids_of_inputs[0]  # the first id at each position
    for other in ids_of_inputs[1:]:
        carried.ties.tie(ids_of_inputs[0], other)
        merged = np.where(merged == NO_FEATURE, other, merged)
    op.record(merged)


def _copy(op: FeatureOp) -> None:
    """Copies all ids; `expand` adds leading dims."""
    if op.carried.get(op.args[0]) is None:
        varying = op.carried.varying_dims(op.args[0])
        op.carried.set_constant(op.out, (*[False] * (op.out.ndim - len(varying)), *varying))
    else:
        op.record(add_leading_dims(op.first_ids, op.out.ndim))


def _view(op: FeatureOp) -> None:
    if op.out.numel():
        op.record(view_features(op.first_ids, op.args[0].shape, op.out.shape))


def _transpose(op: FeatureOp) -> None:
    """Exchanges two dims, or orders all of them: as given, or in reverse."""
    dims = op.args[1:]
    if len(dims) == 2:
        op.record(np.swapaxes(op.first_ids, *dims))
    else:
        op.record(np.transpose(op.first_ids, *dims))


def _slice(op: FeatureOp) -> None:
    numbers = op.first_ids
    given: tuple[Any, ...] = (*op.args[1:], *(0, None, None, 1)[len(op.args) - 1 :])
    dim, start, end, step = given
    if numbers.shape[dim] > 1:
        positions = range(op.args[0].shape[dim])[start:end:step]
        numbers = numbers.take(list(positions), axis=dim)
    op.record(numbers)


def _select(op: FeatureOp) -> None:
    numbers, dim, index = op.first_ids, op.args[1], op.args[2]
    op.record(numbers.take(index if numbers.shape[dim] > 1 else 0, axis=dim))


def _split(op: FeatureOp) -> None:
    numbers, dim, start = op.first_ids, op.dim, 0
    for part in op.out:
        end = start + part.shape[dim]
        part_ids = numbers if numbers.shape[dim] == 1 else numbers.take(range(start, end), axis=dim)
        op.carried.record(part, part_ids)
        start = end


def _unbind(op: FeatureOp) -> None:
    numbers, dim = op.first_ids, op.dim
    for i, part in enumerate(op.out):
        op.carried.record(part, numbers.take(i if numbers.shape[dim] > 1 else 0, axis=dim))


def _join(op: FeatureOp) -> None:
    parts, dim = [part for part in op.args[0] if part.ndim == op.out.ndim], op.dim % op.out.ndim
    known = [numbers for part in parts if (numbers := op.carried.get(part)) is not None]
    shape = [*np.broadcast_shapes(*((*ids.shape[:dim], 1, *ids.shape[dim + 1 :]) for ids in known))]
    parts_ids = []
    for part in parts:
        shape[dim] = part.shape[dim]
        parts_ids.append(np.broadcast_to(op.ids_of(part), shape))
    op.record(np.concatenate(parts_ids, axis=dim))


def _stack(op: FeatureOp) -> None:
    parts_ids = np.broadcast_arrays(*map(op.ids_of, op.args[0]))
    op.record(np.stack(parts_ids, axis=op.dim % op.out.ndim))


def _reduce(op: FeatureOp) -> None:
    numbers, ndim, dims = op.first_ids, op.args[0].ndim, op.dim
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        dims = range(ndim)
    dims = [dim % max(1, ndim) for dim in (dims if isinstance(dims, (list, tuple, range)) else [dims])]
    numbers = op.carried.ties.tie_along(numbers, [dim for dim in dims if dim < numbers.ndim])
    for each in tensor_records(op.out):
        fits = each.ndim == numbers.ndim
        op.carried.record(each, numbers if fits else np.squeeze(numbers, axis=tuple(dims)))


def _layer_norm(op: FeatureOp) -> None:
    numbers = op.first_ids
    numbers = op.carried.ties.tie_along(numbers, range(numbers.ndim - len(op.args[1]), numbers.ndim))
    for each in tensor_records(op.out):
        if each.ndim == numbers.ndim:
            op.carried.record(each, numbers)


def _product(op: FeatureOp) -> None:
    carried, ties, adds = op.carried, op.carried.ties, op.entry.position == 1
    left, right = op.args[1:3] if adds else op.args[-2:]
    first, second = carried.get(left), carried.get(right)
    if adds and op.kwargs.get("beta", 1) != 0 and carried.get(op.args[0]) is not None:
        _tie_everything(op)
        return
    first = None if first is None else ties.tie_along(first, [-1])
    second = None if second is None else ties.tie_along(second, [-2])
    if first is not None and second is not None:
        ties.tie_reader(first, ties.tie_along(second, [-1]))
    elif op.out.ndim == 3 and first is not None:
        first = ties.tie_along(first, [0] if right.shape[0] > 1 else [])
    elif op.out.ndim == 3 and second is not None:
        second = ties.tie_along(second, [0] if left.shape[0] > 1 else [])
    op.record(second if first is None else first)


def _glu(op: FeatureOp) -> None:
    numbers, dim = op.first_ids, op.dim
    if numbers.shape[dim] > 1:
        numbers, gate = np.split(numbers, 2, axis=dim)
        op.carried.ties.tie(numbers, gate)
    op.record(numbers)


def _index(op: FeatureOp) -> None:
    numbers = op.first_ids
    if op.entry.dim is None:
        indexed_dims = [(dim, index) for dim, index in enumerate(op.args[1]) if index is not None]
    else:
        indexed_dims = [(op.args[1], op.args[2])]
    if len(indexed_dims) != 1 or indexed_dims[0][1].ndim != 1 or indexed_dims[0][1].dtype == torch.bool:
        _tie_everything(op)
        return
    ((dim, index),) = indexed_dims
    if numbers.shape[dim] > 1:
        positions = index.values
        if positions is None:
            numbers = op.carried.ties.tie_along(numbers, [dim])
        else:
            numbers = numbers.take(positions, axis=dim)
    op.record(numbers)


def _tie_everything(op: FeatureOp) -> None:
    """Ties all inputs; the result carries nothing."""
    ids_of_inputs = [numbers for tensor in op.inputs if (numbers := op.carried.get(tensor)) is not None]
    tied_ids = [
        op.carried.ties.tie_along(numbers, range(numbers.ndim)).reshape(()) for numbers in ids_of_inputs
    ]
    for tied_id in tied_ids[1:]:
        op.carried.ties.tie(tied_ids[0], tied_id)
    for each in tensor_records(op.out):
        op.carried.record(each, None)


FEATURE_RULES: Mapping[DimMap, FeatureRule] = MappingProxyType(
    {
        "broadcast": _copy,
        "reshape": _view,
        "ones": _view,
        "transpose": _transpose,
        "reverse": _transpose,
        "slice": _slice,
        "select": _select,
        "split": _split,
        "unbind": _unbind,
        "join": _join,
        "stack": _stack,
        "reduce": _reduce,
        "along": _reduce,
        "trailing": _layer_norm,
        "halves": _glu,
        "product": _product,
        "index": _index,
    }
)
"""By how the dims of an operation map; any other ties everything, unless it is pointwise."""


def _find_rule(entry: Op, func: Any) -> FeatureRule:
    if entry.is_copy:
        return _copy
    if entry.kind == "pointwise" or torch.Tag.pointwise in func.tags:
        return _pointwise
    return FEATURE_RULES.get(entry.dims, _tie_everything)
