"""Every parameter as a row of a table: its role, where it lies, why it stays whole, and the bytes of it that a rank holds.

The same parameter of equal layers is one row. Where a plan divides nothing, what it could divide is shown, for two ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from meshwright.core.anatomy import Weight
from meshwright.core.cut import Cut
from meshwright.core.home import Home
from meshwright.core.mesh import AXES
from meshwright.core.plan import Plan
from meshwright.core.space import Space
from meshwright.core.units import size
from meshwright.model.sockets import NUMBERED

PAIRS = "pairs of linear layers"
KINDS = {"columns": PAIRS, "rows": PAIRS, "table": "tables", "head": "heads", "norm": "norms"}
WORDS = ("table", "head")  # roles whose features are words


@dataclass(frozen=True)
class ParameterRow:
    """The same parameter of all layers: its pattern, how many, shape, role, layout, the bytes of all of them, and what of that a
    rank holds. `why` says why it is whole, `less` how many bytes fewer a rank would hold if it were divided.
    """

    pattern: str
    number: int
    shape: tuple[int, ...]
    role: str
    layout: str
    nbytes: int
    held: int
    why: str = ""
    less: int = 0


def parameter_rows(space: Space, parameters: str) -> list[ParameterRow]:
    """A row per parameter, equal layers in one; `space` is that of all ranks, `parameters` the dtype of a job."""
    here = space.at(space.mesh.coordinate(0))
    alike: dict[tuple[Any, ...], list[ParameterRow]] = {}
    for home, mine in zip(here.logical, here.homes, strict=True):
        row = _row(home, mine.weight, space, parameters)
        key = (NUMBERED.sub("*", row.pattern), row.shape, row.role, row.layout, row.nbytes, row.held, row.why)
        alike.setdefault(key, []).append(row)
    return [_joined(pattern, rows) for (pattern, *_), rows in alike.items()]


def parameters_view(space: Space, parameters: str, *, asked: bool) -> RenderableType:
    """The rows as a table; `asked` tells whether a plan was asked for that divides anything."""
    rows = parameter_rows(space, parameters)
    over = " x ".join(f"{axis} {space.mesh.size(axis)}" for axis in _axes(space)) or "no axis"
    sliced = space.stream.axes("S")
    over += f"; the stream goes in slices over {' and '.join(sliced)}" if sliced else ""
    head = f"parameters over {over}" if asked else f"parameters, if they were divided over {over}"
    columns = [Column(name, overflow="fold") for name in ("parameter", "shape", "role", "layout")]
    last = [Column("in use on rank 0", justify="right"), Column("whole, because", overflow="fold")]
    table = Table(*columns, *last, box=None, header_style="bold", padding=(0, 2, 0, 0))
    for row in rows:
        name = row.pattern if row.number == 1 else f"{row.pattern} x{row.number}"
        why = f"{row.why} ({size(row.less)} less per rank if divided)" if row.less else row.why
        cells = (name, " x ".join(map(str, row.shape)), row.role, row.layout, size(row.held), why)
        table.add_row(*map(Text, cells), style="yellow" if row.why else "")
    whole, held = sum(row.nbytes for row in rows), sum(row.held for row in rows)
    kept = sum(row.nbytes for row in rows if row.why)
    said = f"{size(held)} of {size(whole)} on rank 0; {size(kept)} of it whole on every rank. Gradients and moments lie likewise"
    return Group(Text(f"\n{head}", style="bold"), table, Text(said))


def divided_words(plan: Plan) -> dict[str, str]:
    """How much of the weights rank 0 has, and how much of that is whole, where matrices are divided; else nothing."""
    space = plan.space.whole or plan.space
    if not any(home.cut for home in space.homes):
        return {}
    here, parameters = space.at(space.mesh.coordinate(0)), plan.job.precision.parameters
    held = sum(home.weight.numel * home.weight.width(parameters) for home in here.homes)
    whole = sum(home.weight.numel * home.weight.width(parameters) for home in here.logical if not home.cut)
    said = f"{size(held)} of {size(plan.anatomy.nbytes(parameters))} of the weights while they are used"
    return {"divided": f"{said}, {size(whole)} of it whole: see plan --explain-model"}


def _row(home: Home, mine: Weight, space: Space, parameters: str) -> ParameterRow:
    weight, width = home.weight, home.weight.width(parameters)
    layout = "; ".join((*_places(home), *_gathered(home, space, width))) or "whole"
    nbytes, held = weight.numel * width, mine.numel * width
    ranks = space.mesh.extent(_axes(space))
    why = "" if home.cut else _why(home)
    less = nbytes - nbytes // ranks if why and weight.role != "norm" and len(weight.shape) > 1 else 0
    return ParameterRow(weight.name, 1, weight.shape, weight.role, layout, nbytes, held, why, less)


def _places(home: Home) -> Iterator[str]:
    for axis, dim in home.cut.items():
        yield f"{axis}: {_said(home.weight.cut(dim), 'words' if home.weight.role in WORDS else 'features')}"
    if home.flat:
        yield f"{' '.join(home.flat)}: shards"


def _gathered(home: Home, space: Space, width: int) -> Iterator[str]:
    """Of a layer without a partner, what it costs to bring its output together."""
    layer, _, leaf = home.weight.name.rpartition(".")
    if home.weight.role == "gathered" and home.cut and leaf == "weight":
        numel = max(call.out for call in space.anatomy.calls if call.name == layer)
        yield f"output gathered: {size(numel * width)} per sample and call"


def _said(cut: Cut, singles: str) -> str:
    """The side that is divided, and in what units."""
    whole = sum(cut.sections)
    each = whole // len(cut.sections) // cut.units if cut.units else 0
    units = f"{cut.units} {singles}" if each == 1 else f"{cut.units} units of {each}"
    return f"{cut.side} side, {units}" + (f" in each of {len(cut.sections)} parts" if len(cut.sections) > 1 else "")


def _why(home: Home) -> str:
    weight = home.weight
    if weight.why:
        return weight.why
    if not weight.role:
        return "used between layers, by no layer that can be divided"
    if weight.role == "inside":
        return "every rank uses it for its own heads; the gradients are summed"
    if weight.role == "rows" and len(weight.shape) == 1:
        return "added once, to the sum"
    return f"no strategy divides {KINDS.get(weight.role, weight.role)}"


def _axes(space: Space) -> list[str]:
    """The axes along which weights could be cut: those of several ranks that see the same tokens and run the same layers."""
    return [axis for axis in AXES if space.mesh.size(axis) > 1 and axis not in ("pp", *space.summed_axes)]


def _joined(pattern: str, rows: list[ParameterRow]) -> ParameterRow:
    first = rows[0]
    name = first.pattern if len(rows) == 1 else pattern
    sums = [sum(numbers) for numbers in zip(*((row.nbytes, row.held, row.less) for row in rows), strict=True)]
    return ParameterRow(name, len(rows), first.shape, first.role, first.layout, sums[0], sums[1], first.why, sums[2])
