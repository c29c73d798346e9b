"""Mapping of named tensors that are made on each access and not kept: one at a time is in memory.

A rank that needs a shard of every tensor of a checkpoint, or of a freshly initialized model, never holds the
whole.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch


class LazyTensors(Mapping[str, torch.Tensor]):
    """The tensors that `make(name)` returns for each of `names`.

    Optional: `make_rows(name, rows)` makes some rows without the rest, and `shape_of(name)` gives a shape
    without making the tensor.
    """

    def __init__(
        self,
        names: Iterable[str],
        make: Callable[[str], torch.Tensor],
        make_rows: Callable[[str, range], torch.Tensor] | None = None,
        shape_of: Callable[[str], tuple[int, ...]] | None = None,
    ) -> None:
        self._names, self._make, self._make_rows, self._shape_of = (
            dict.fromkeys(names),
            make,
            make_rows,
            shape_of,
        )

    def rows(self, name: str, rows: range) -> torch.Tensor:
        """Returns the `rows` of the tensor `name` along dim 0."""
        if self._make_rows is None or name not in self._names:
            return self[name][rows.start : rows.stop]
        return self._make_rows(name, rows)

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
    names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
    return LazyTensors(
        names,
        lambda name: tensors[prefix + name],
        lambda name, rows: read_rows(tensors, prefix + name, rows),
        lambda name: tensor_shape(tensors, prefix + name),
    )


def read_rows(tensors: Mapping[str, torch.Tensor], name: str, rows: range) -> torch.Tensor:
    """Returns the `rows` along dim 0 of the tensor `name`; the other rows are not made if that can be
    avoided.
    """
    return (
        tensors.rows(name, rows)
        if isinstance(tensors, LazyTensors)
        else tensors[name][rows.start : rows.stop]
    )


def tensor_shape(tensors: Mapping[str, torch.Tensor], name: str) -> tuple[int, ...]:
    """Returns the shape of the tensor `name` in `tensors`; the tensor is not made if that can be avoided."""
    return tensors.shape(name) if isinstance(tensors, LazyTensors) else tuple(tensors[name].shape)
