"""What is local to one rank in a module that computes on a slice: numbers of heads and widths, its part of what it is given."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from meshwright.core.calls import Number, Portion
from meshwright.core.cut import Span


def local_numbers(holder: nn.Module, numbers: Iterable[Number], index: int, ranks: int) -> dict[str, Any]:
    """What attributes `holder`, the module that `numbers` are of, has on the rank at `index` among `ranks`.

    Of a config it gets a copy with the rank's numbers: others hold it too.
    """
    mine: dict[str, Any] = {}
    for number in numbers:
        where, _, field = number.name.rpartition(".")
        if where:
            vars(mine.setdefault(where, copy.copy(vars(holder)[where])))[field] = number.local(index, ranks)
        else:
            mine[field] = number.local(index, ranks)
    return mine


def portioned(
    portion: Portion, index: int, ranks: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block, with that rank's heads of the tensor that `portion` names."""
    given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    if isinstance(given.get(portion.slot), torch.Tensor):
        given[portion.slot] = taken(given[portion.slot], (portion.cut.span(index, ranks),))
    return tuple(given[i] for i in range(len(args))), {key: given[key] for key in kwargs}


def taken(whole: torch.Tensor, spans: Iterable[Span]) -> torch.Tensor:
    """The slice of `whole` that `spans` say, dim by dim: a view, where it can be."""
    for span in spans:
        parts = [whole.narrow(span.dim, first, end - first) for first, end in span.ranges]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, span.dim)
    return whole
