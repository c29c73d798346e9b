"""The layers of a model that can be divided, and how: found by running it once and by the roles of its sockets.

Within a block, the *columns* layers that ran since the last *rows* layer make what that one takes in:

    q k v -> attend -> o          units are groups of heads that share a key and a value
    gate up -> act, times -> down      units are single features

So it is where a user has declared the roles: a pair is divided when its widths agree, the rows layer takes in what the columns
layers give out, whole units of it. Where nobody has, the flow of features says how layers are cut (model/proposed.py). What fits
neither picture stays whole on every rank, and `meshwright plan --explain-model` says so. Tables (embeddings), heads and norms are
divided by themselves.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from meshwright.model.tensor_parallel.norm_formulas import formula_of
from meshwright.plan.model_spec.dim_split import Cut
from meshwright.plan.model_spec.layer_calls import Call

ALONE = ("table", "lookup", "head", "logits", "norm", "gathered")  # roles of layers that are no part of a pair


@dataclass
class Seen:
    """What a trial run saw, in order: uses of layers that have a role, and the head widths of attention between them."""

    uses: list["Use"] = field(default_factory=list)
    heads: list[tuple[int, int]] = field(default_factory=list)  # after how many uses, and the width of a head
    alive: list[torch.Tensor] = field(default_factory=list)  # during the run, so that no two inputs have one identity


@dataclass(frozen=True)
class Use:
    """`Call`, as a trial sees it: which tensor went in, and elements of the whole trial batch."""

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
        if roles[use.name] not in ("columns", "rows"):
            continue
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


@dataclass(frozen=True)
class Part:
    """Of one weight, the role of its layer and how its dims may be divided."""

    role: str
    cuts: tuple[Cut, ...]


UNKNOWN = Part("", ())


def found(
    module: nn.Module,
    seen: Seen,
    roles: Mapping[str, str],
    batch: int,
    cuts: Mapping[str, Cut] | None = None,
    asked: Collection[str] = (),
) -> tuple[tuple[Call, ...], dict[str, Part]]:
    """The calls of layers of `module` that can be divided, in order, and what is known of their weights, by logical name.

    `batch` is the number of samples of the trial; `cuts` are those known already, by layer. Of columns layers that no rows layer
    follows, those that are `asked` for are divided alone, and what they give out is gathered.
    """
    parts: dict[str, Part] = {}
    known = cuts or {}
    divided = {id(use) for use in seen.uses if use.name in known or roles[use.name] == "inside"}
    for use in (use for use in seen.uses if id(use) in divided):
        parts |= _parts(use.name, module.get_submodule(use.name), roles[use.name], known.get(use.name))
    for pair in pairs(seen, roles):
        if any(id(use) in divided for use in (*pair.columns, pair.rows)):
            continue
        units = _units(module, pair)
        if units:
            divided |= {id(use) for use in (*pair.columns, pair.rows)}
            for use in (*pair.columns, pair.rows):
                layer, role = module.get_submodule(use.name), roles[use.name]
                width = _widths(layer)[common_side(role) == "out"]
                parts |= _parts(use.name, layer, role, Cut(0, units, (width,)))
    lone = {use.name for use in seen.uses if use.name in asked and roles[use.name] == "columns"}
    lone -= {use.name for use in seen.uses if id(use) in divided}
    lone -= {use.name for pair in pairs(seen, roles) for use in pair.columns}  # it has a partner, and they do not agree
    roles = {**roles, **dict.fromkeys(lone, "gathered")}
    alone = [use for use in seen.uses if roles[use.name] in ALONE]
    for use in alone:
        parts |= {
            name: part
            for name, part in _parts(use.name, module.get_submodule(use.name), roles[use.name]).items()
            if name not in parts
        }
    sources: dict[tuple[str, int], int] = {}
    calls = []
    for use in seen.uses:
        if id(use) in divided or roles[use.name] in ALONE:
            source = sources.setdefault((use.visit, use.source), len(sources))
            sizes = use.into // batch, use.out // batch
            formula = formula_of(module.get_submodule(use.name)) if roles[use.name] == "norm" else None
            calls.append(Call(use.name, use.visit, roles[use.name], source, *sizes, use.needed, formula))
    return tuple(calls), parts


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


def _parts(name: str, layer: nn.Module, role: str, cut: Cut | None = None) -> dict[str, Part]:
    """What is known of the weights of `layer`. What stands inside of a pair may be cut in no way, unless it is known how."""
    return {
        f"{name}.{leaf}": Part(role, () if role == "inside" and cut is None else part_of(layer, parameter, role, cut))
        for leaf, parameter in layer.named_parameters(recurse=False)
    }


def part_of(layer: nn.Module, parameter: torch.Tensor, role: str, cut: Cut | None) -> tuple[Cut, ...]:
    """How the dims of a `parameter` of `layer` may be divided: as `cut` says on the side that a pair has in common."""
    shape = tuple(parameter.shape)
    sides = {len(shape) - 1: "out"} if len(shape) == 1 else dict(enumerate(_sides(layer)))
    common = common_side(role)
    whole = {dim: Cut(dim, shape[dim], (shape[dim],), side) for dim, side in sides.items()}
    return tuple(replace(cut, dim=dim, side=side) if cut and side == common else whole[dim] for dim, side in sides.items())


def common_side(role: str) -> str:
    """The side of a layer whose features are common to a pair: what a rows layer takes in, and what others give out."""
    return "in" if role == "rows" else "out"


def _sides(layer: nn.Module) -> tuple[str, str]:
    return ("in", "out") if lies_transposed(layer) or isinstance(layer, nn.Embedding) else ("out", "in")
