"""The linear layers of a model that can be divided in pairs, and how: found by running it once and by the roles of its sockets.

Within a block, the *columns* layers that ran since the last *rows* layer make what that one takes in:

    q k v -> attend -> o          units are groups of heads that share a key and a value
    gate up -> act, times -> down      units are single features

A pair is divided when its widths agree: the rows layer takes in what the columns layers give out, whole units of it. Whatever
does not fit that picture stays whole on every rank, and `meshwright plan --explain-model` says so.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from meshwright.core.anatomy import Linear
from meshwright.core.cut import Cut


@dataclass
class Seen:
    """What a trial run saw, in order: uses of linear layers, and the head widths of attention between them."""

    uses: list["Use"] = field(default_factory=list)
    heads: list[tuple[int, int]] = field(default_factory=list)  # after how many uses, and the width of a head
    alive: list[torch.Tensor] = field(default_factory=list)  # during the run, so that no two inputs have one identity


@dataclass(frozen=True)
class Use:
    """One call of the layer `name` in `visit`: which tensor went in, its elements, if its gradient is needed; elements out."""

    name: str
    visit: str
    source: int
    into: int
    needed: bool
    out: int


@dataclass(frozen=True)
class Pair:
    """Layers that are divided together: `units` of `columns`, of which `rows` takes in the same."""

    columns: tuple[Use, ...]
    rows: Use
    head: int  # the width of a head; 0: no attention between


def pairs(seen: Seen, roles: Mapping[str, str]) -> Iterator[Pair]:
    """The pairs that ran, in order."""
    waiting: list[Use] = []
    begun = 0
    for number, use in enumerate(seen.uses):
        if waiting and waiting[-1].visit != use.visit:
            waiting = []
        if roles[use.name] == "columns":
            begun = number if not waiting else begun
            waiting.append(use)
        else:
            between = [width for at, width in seen.heads if begun < at <= number]
            if waiting:
                yield Pair(tuple(waiting), use, between[0] if between else 0)
            waiting = []


def found(module: nn.Module, seen: Seen, roles: Mapping[str, str], batch: int) -> tuple[tuple[Linear, ...], dict[str, Cut]]:
    """The layers of `module` that can be divided, in the order of their uses, and the cut of each weight by logical name.

    `batch` is the number of samples of the trial.
    """
    linears: list[Linear] = []
    cuts: dict[str, Cut] = {}
    sources: dict[tuple[str, int], int] = {}
    for pair in pairs(seen, roles):
        units = _units(module, pair)
        if not units:
            continue
        for use in (*pair.columns, pair.rows):
            layer = module.get_submodule(use.name)
            cuts |= _cuts(use.name, layer, roles[use.name], units)
            source = sources.setdefault((use.visit, use.source), len(sources))
            sizes = use.into // batch, use.out // batch
            linears.append(Linear(use.name, use.visit, roles[use.name], source, *sizes, use.needed))
    return tuple(linears), cuts


def _units(module: nn.Module, pair: Pair) -> int:
    """How many units the pair has; 0 where it cannot be divided."""
    into, _ = _widths(module.get_submodule(pair.rows.name))
    widths = [_widths(module.get_submodule(use.name))[1] for use in pair.columns]
    if not pair.head:
        return into if set(widths) == {into} else 0
    groups = min(widths) // pair.head
    fits = max(widths) == into and all(width % (groups * pair.head) == 0 for width in widths) and groups > 0
    return groups if fits else 0


def _widths(layer: nn.Module) -> tuple[int, int]:
    """What goes in and what comes out; of transformers' Conv1D the weight lies the other way round."""
    weight = layer.get_parameter("weight")
    rows, columns = weight.shape
    return (rows, columns) if lies_transposed(layer) else (columns, rows)


def lies_transposed(layer: nn.Module) -> bool:
    """Whether the weight of `layer` has a row per input."""
    return type(layer).__name__ == "Conv1D"


def _cuts(name: str, layer: nn.Module, role: str, units: int) -> dict[str, Cut]:
    into, out = _widths(layer)
    width = out if role == "columns" else into
    dim = int((role == "rows") != lies_transposed(layer))
    made = {f"{name}.weight": Cut(dim, units, (width,))}
    if role == "columns" and layer._parameters.get("bias") is not None:
        made[f"{name}.bias"] = Cut(0, units, (width,))
    return made
