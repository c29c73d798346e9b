"""Tensors by name that are made when they are asked for, each anew, and kept by nobody: one at a time is in memory.

So a rank that needs a share of every tensor, of a checkpoint or of a fresh model, never holds the whole.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch


class OnDemand(Mapping[str, torch.Tensor]):
    """The tensors that `make(name)` gives for each of `names`."""

    def __init__(self, names: Iterable[str], make: Callable[[str], torch.Tensor]) -> None:
        self._names, self._make = dict.fromkeys(names), make

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
    return OnDemand(names, lambda name: tensors[prefix + name])
