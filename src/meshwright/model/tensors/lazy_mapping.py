"""Mapping of named tensors that are made on each access and not kept: one at a time is in memory.

A rank that needs a shard of every tensor of a checkpoint, or of a freshly initialized model, never holds the
whole.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod

import torch

from meshwright.plan.model_spec.param_dim_split import DimRanges
from meshwright.plan.sharding.shard_boxes import ShardBox, shard_boxes

Region = tuple[range, ...]  # of the indices of each dim; dims beyond its end are whole


class LazyTensors(Mapping[str, torch.Tensor]):
    """The tensors that `make(name)` returns for each of `names`.

    Optional: `make_region(name, region)` makes a part without the rest, and `shape_of(name)` gives a shape
    without making the tensor.
    """

    def __init__(
        self,
        names: Iterable[str],
        make: Callable[[str], torch.Tensor],
        make_region: Callable[[str, Region], torch.Tensor] | None = None,
        shape_of: Callable[[str], tuple[int, ...]] | None = None,
    ) -> None:
        self._names, self._make, self._make_region, self._shape_of = (
            dict.fromkeys(names),
            make,
            make_region,
            shape_of,
        )

    def region(self, name: str, region: Region) -> torch.Tensor:
        """Returns the part `region` of the tensor `name`."""
        if self._make_region is None or name not in self._names:
            return narrow_to(self[name], region)
        return self._make_region(name, region)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the tensor `name`."""
        return (
            tuple(self[name].shape)
            if self._shape_of is None or name not in self._names
            else self._shape_of(name)
        )

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:  # a Mapping's own would make the tensor
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def strip_prefix(prefix: str, tensors: Mapping[str, torch.Tensor]) -> LazyTensors:
    """Returns the entries of `tensors` whose name starts with `prefix`, by the rest of their name."""
    return renamed(tensors, {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)})


def renamed(tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> LazyTensors:
    """Returns entries of `tensors` by other names: `names` has the name in `tensors` of each."""
    return LazyTensors(
        names,
        lambda name: tensors[names[name]],
        lambda name, region: read_region(tensors, names[name], region),
        lambda name: tensor_shape(tensors, names[name]),
    )


def narrow_to(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """Returns the part `region` of `tensor`: a view."""
    for dim, indices in enumerate(region):
        tensor = tensor.narrow(dim, indices.start, len(indices))
    return tensor


def read_region(tensors: Mapping[str, torch.Tensor], name: str, region: Region) -> torch.Tensor:
    """Returns the part `region` of the tensor `name`; the rest is not made if that can be avoided."""
    if isinstance(tensors, LazyTensors):
        return tensors.region(name, region)
    return narrow_to(tensors[name], region)


def read_shard(
    tensors: Mapping[str, torch.Tensor], name: str, begin: int, end: int, spans: Sequence[DimRanges] = ()
) -> torch.Tensor:
    """Returns elements `begin` to `end`, flat, of the flattened slice `spans` of the tensor `name`; only
    these are made if that can be avoided.
    """
    found: torch.Tensor | None = None
    for box in shard_boxes(begin, end, tensor_shape(tensors, name), spans):
        indices = tuple(range(first, first + n) for first, n in zip(box.start, box.size, strict=True))
        part = read_region(tensors, name, indices)
        if part.numel() == end - begin:
            return part.reshape(-1)
        found = part.new_empty(end - begin) if found is None else found
        box_window(found, box).copy_(part)
    # nothing to read, but its dtype is asked for
    return read_region(tensors, name, (range(0),)).reshape(-1) if found is None else found


def box_window(values: torch.Tensor, box: ShardBox) -> torch.Tensor:
    """Returns the place of `box` in the flat `values` of its shard: a view."""
    outer = values[box.at : box.at + prod(box.outer_size)].view(box.outer_size)
    return narrow_to(
        outer, tuple(range(first, first + n) for first, n in zip(box.window, box.size, strict=True))
    )


def tensor_shape(tensors: Mapping[str, torch.Tensor], name: str) -> tuple[int, ...]:
    """Returns the shape of the tensor `name` in `tensors`; the tensor is not made if that can be avoided."""
    return tensors.shape(name) if isinstance(tensors, LazyTensors) else tuple(tensors[name].shape)
