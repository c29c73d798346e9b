"""What is local to one rank in a module that computes on a slice: numbers of heads and widths."""

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from meshwright.core.anatomy import Number


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
