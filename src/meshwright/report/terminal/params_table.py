"""Every parameter as a row of a table: its role, where it lies, why it stays whole, and the bytes of it that a rank holds.

The same parameter of equal layers is one row. Where ranks run parts of the model, the first rank of each part has a column: it
holds what its own part uses. Where a plan divides nothing, what it could divide is shown, for two ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from meshwright.model.tensor_parallel.layer_roles import NUMBERED
from meshwright.plan.job.errors import size
from meshwright.plan.model_spec.dim_split import Cut
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.param_sharding import Home
from meshwright.plan.sharding.sharding_plan import Space

PAIRS = "pairs of linear layers"
KINDS = {"columns": PAIRS, "rows": PAIRS, "table": "tables", "head": "heads", "norm": "norms"}
WORDS = ("table", "head")  # roles whose features are words
SHOWN = 4  # parts that have a column; of more the first, the fullest and the last


@dataclass(frozen=True)
class ParameterRow:
    """The same parameter of all layers: its pattern, how many, shape, role, layout, the bytes of all of them, and what of that
    rank 0 holds. `why` says why it is whole, `less` how many bytes fewer a rank would hold if it were divided. `parts` are the
    bytes that the first rank of each part holds; empty where every rank runs the whole model.
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
    parts: tuple[int, ...] = ()


def parameter_rows(space: Space, parameters: str) -> list[ParameterRow]:
    """A row per parameter, equal layers in one; `space` is that of all ranks, `parameters` the dtype of a job."""
    places = [{"pp": part} for part in range(len(space.stages))] or [{}]
    seen = [space.at({**space.mesh.coordinate(0), **place}) for place in places]
    own = [{home.weight.name: home.weight.numel for home in each.homes} for each in seen]
    alike: dict[tuple[Any, ...], list[ParameterRow]] = {}
    for home in space.homes:
        row = _row(home, tuple(each.get(home.weight.name, 0) for each in own), space, parameters)
        most = max((row.held, *row.parts))  # what a rank has of it that has some
        key = (NUMBERED.sub("*", row.pattern), row.shape, row.role, row.layout, row.nbytes, most, row.why)
        alike.setdefault(key, []).append(row)
    return [_joined(pattern, rows) for (pattern, *_), rows in alike.items()]


def parameters_view(space: Space, parameters: str, *, asked: bool) -> RenderableType:
    """The rows as a table; `asked` tells whether a plan was asked for that divides anything."""
    rows = parameter_rows(space, parameters)
    axes = [*(["pp"] if space.stages else []), *_axes(space)]
    over = " x ".join(f"{axis} {space.mesh.size(axis)}" for axis in axes) or "no axis"
    sliced = space.stream.axes("S")
    over += f"; the stream goes in slices over {' and '.join(sliced)}" if sliced else ""
    head = f"parameters over {over}" if asked else f"parameters, if they were divided over {over}"
    columns = [Column(name, overflow="fold") for name in ("parameter", "shape", "role", "layout")]
    shown = _ranks(rows, space)
    uses = [Column(f"in use on rank {rank}", justify="right") for rank, _ in shown]
    table = Table(*columns, *uses, Column("whole, because", overflow="fold"), box=None, header_style="bold", padding=(0, 2, 0, 0))
    for row in rows:
        name = row.pattern if row.number == 1 else f"{row.pattern} x{row.number}"
        why = f"{row.why} ({size(row.less)} less per rank if divided)" if row.less else row.why
        held = [size(_held(row, part)) for _, part in shown]
        cells = (name, " x ".join(map(str, row.shape)), row.role, row.layout, *held, why)
        table.add_row(*map(Text, cells), style="yellow" if row.why else "")
    whole, kept = sum(row.nbytes for row in rows), sum(row.nbytes for row in rows if row.why)
    held = [size(sum(_held(row, part) for row in rows)) for _, part in shown]
    said = f"{held[0]} of {size(whole)} on rank 0"
    said += "".join(f", {each} on rank {rank}" for each, (rank, _) in zip(held[1:], shown[1:], strict=True))
    said += f"; {size(kept)} of it whole on every rank" + (" that uses it" if space.stages else "")
    return Group(Text(f"\n{head}", style="bold"), table, Text(f"{said}. Gradients and moments lie likewise"))


def _ranks(rows: list[ParameterRow], space: Space) -> list[tuple[int, int]]:
    """The first ranks of the parts that have a column, each with the number of its part."""
    count = len(space.stages) or 1
    found = range(count)
    if count > SHOWN:
        fullest = max(found, key=lambda part: sum(row.parts[part] for row in rows))
        found = sorted({0, fullest, count - 1})
    return [(part * (space.mesh.world // count), part) for part in found]


def _held(row: ParameterRow, part: int) -> int:
    return row.parts[part] if row.parts else row.held


def divided_words(plan: Plan) -> dict[str, str]:
    """How much of the weights rank 0 has, and how much of that is whole, where matrices are divided; else nothing."""
    space = plan.space.whole or plan.space
    if not any(home.cut for home in space.homes):
        return {}
    here, parameters = space.at(space.mesh.coordinate(0)), plan.job.precision.parameters
    held = sum(home.weight.numel * home.weight.width(parameters) for home in here.homes)
    whole = sum(home.weight.numel * home.weight.width(parameters) for home in here.logical if not home.cut)
    said = f"{size(held)} of {size(plan.anatomy.nbytes(parameters))} of the weights while they are used"
    said += " on rank 0, by its part" if space.stages else ""
    return {"divided": f"{said}, {size(whole)} of it whole: see plan --explain-model"}


def _row(home: Home, own: tuple[int, ...], space: Space, parameters: str) -> ParameterRow:
    """That of one parameter, of which the first rank of each part has its `own` elements."""
    weight, width = home.weight, home.weight.width(parameters)
    layout = "; ".join((*_places(home), *_gathered(home, space, width))) or "whole"
    nbytes, held = weight.numel * width, tuple(numel * width for numel in own)
    ranks = space.mesh.extent(_axes(space))
    why = "" if home.cut else _why(home)
    less = nbytes - nbytes // ranks if why and weight.role != "norm" and len(weight.shape) > 1 else 0
    parts = held if space.stages else ()
    return ParameterRow(weight.name, 1, weight.shape, weight.role, layout, nbytes, held[0], why, less, parts)


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
    nbytes, held, less, *parts = (
        sum(numbers) for numbers in zip(*((row.nbytes, row.held, row.less, *row.parts) for row in rows), strict=True)
    )
    less = less * max(parts) // nbytes if less and parts else less  # a rank has the layers of its part alone
    return replace(first, pattern=name, number=len(rows), nbytes=nbytes, held=held, less=less, parts=tuple(parts))
