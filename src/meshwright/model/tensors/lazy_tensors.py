"""Tensors by name that are made when they are asked for, each anew, and kept by nobody: one at a time is in memory.

So a rank that needs a share of every tensor, of a checkpoint or of a fresh model, never holds the whole.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch


class OnDemand(Mapping[str, torch.Tensor]):
    """The tensors that `make(name)` gives for each of `names`.

    `some(name, rows)`, if given, makes rows without the rest, and `shape(name)` tells of a tensor that is not made.
    """

    def __init__(
        self,
        names: Iterable[str],
        make: Callable[[str], torch.Tensor],
        some: Callable[[str, range], torch.Tensor] | None = None,
        shape: Callable[[str], tuple[int, ...]] | None = None,
    ) -> None:
        self._names, self._make, self._some, self._shape = dict.fromkeys(names), make, some, shape

    def rows(self, name: str, rows: range) -> torch.Tensor:
        """The `rows` of the tensor `name` along dim 0."""
        if self._some is None or name not in self._names:
            return self[name][rows.start : rows.stop]
        return self._some(name, rows)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor `name`."""
        return tuple(self[name].shape) if self._shape is None or name not in self._names else self._shape(name)

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


def under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> OnDemand:
    """What `tensors` has under `prefix`, by the rest of its name."""
    names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
    return OnDemand(
        names,
        lambda name: tensors[prefix + name],
        lambda name, rows: rows_of(tensors, prefix + name, rows),
        lambda name: shape_of(tensors, prefix + name),
    )


def rows_of(tensors: Mapping[str, torch.Tensor], name: str, rows: range) -> torch.Tensor:
    """The `rows` along dim 0 of the tensor `name` in `tensors`; the others are not made where that can be avoided."""
    return tensors.rows(name, rows) if isinstance(tensors, OnDemand) else tensors[name][rows.start : rows.stop]


def shape_of(tensors: Mapping[str, torch.Tensor], name: str) -> tuple[int, ...]:
    """The shape of the tensor `name` in `tensors`; it is not made where that can be avoided."""
    return tensors.shape(name) if isinstance(tensors, OnDemand) else tuple(tensors[name].shape)
