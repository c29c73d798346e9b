"""Which features of which layers a tensor carries: numbers that travel with it, through views and products, while a model runs.

Every feature that a layer gives out has a number. What a tensor *carries* is an array of such numbers with the tensor's own dims,
of size 1 along dims in which they do not change:

    q = x W      [3, 9, 8]       carries [1, 1, 8]:  0 1 2 3 4 5 6 7
    as heads     [3, 2, 9, 4]    carries [1, 2, 1, 4]: head 0 has 0 1 2 3, head 1 has 4 5 6 7

An operation that computes one element from several features ties them together: a rank that has one of them must have all.
`unite` ties, and `uses` ties loosely: what uses a feature needs it, and others may need it too (heads that share a key).
Numbers of features that are tied to all others of a dim are left out: the array gets size 1 there. NONE marks what is no feature.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

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
