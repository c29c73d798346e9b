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

from meshwright.model.tensor_parallel.layer_roles import LAYER_NUMBER
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.model_spec.dim_split import DimSplit
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.param_sharding import ParamSharding
from meshwright.plan.sharding.sharding_plan import ShardingPlan

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


def parameter_rows(space: ShardingPlan, parameters: str) -> list[ParameterRow]:
    """A row per parameter, equal layers in one; `space` is that of all ranks, `parameters` the dtype of a job."""
    places = [{"pp": part} for part in range(len(space.block_calls_by_pp_rank))] or [{}]
    seen = [space.at_coordinate({**space.mesh.coordinate(0), **place}) for place in places]
    own = [{home.param.name: home.param.numel for home in each.param_shardings} for each in seen]
    alike: dict[tuple[Any, ...], list[ParameterRow]] = {}
    for home in space.param_shardings:
        row = _row(home, tuple(each.get(home.param.name, 0) for each in own), space, parameters)
        most = max((row.held, *row.parts))  # what a rank has of it that has some
        key = (LAYER_NUMBER.sub("*", row.pattern), row.shape, row.role, row.layout, row.nbytes, most, row.why)
        alike.setdefault(key, []).append(row)
    return [_joined(pattern, rows) for (pattern, *_), rows in alike.items()]


def parameters_view(space: ShardingPlan, parameters: str, *, asked: bool) -> RenderableType:
    """The rows as a table; `asked` tells whether a plan was asked for that divides anything."""
    rows = parameter_rows(space, parameters)
    axes = [*(["pp"] if space.block_calls_by_pp_rank else []), *_axes(space)]
    over = " x ".join(f"{axis} {space.mesh.size(axis)}" for axis in axes) or "no axis"
    sliced = space.residual_layout.axes_with("S")
    over += f"; the stream goes in slices over {' and '.join(sliced)}" if sliced else ""
    head = f"parameters over {over}" if asked else f"parameters, if they were divided over {over}"
    columns = [Column(name, overflow="fold") for name in ("parameter", "shape", "role", "layout")]
    shown = _ranks(rows, space)
    uses = [Column(f"in use on rank {rank}", justify="right") for rank, _ in shown]
    table = Table(
        *columns,
        *uses,
        Column("whole, because", overflow="fold"),
        box=None,
        header_style="bold",
        padding=(0, 2, 0, 0),
    )
    for row in rows:
        name = row.pattern if row.number == 1 else f"{row.pattern} x{row.number}"
        why = f"{row.why} ({format_nbytes(row.less)} less per rank if divided)" if row.less else row.why
        held = [format_nbytes(_held(row, part)) for _, part in shown]
        cells = (name, " x ".join(map(str, row.shape)), row.role, row.layout, *held, why)
        table.add_row(*map(Text, cells), style="yellow" if row.why else "")
    whole, kept = sum(row.nbytes for row in rows), sum(row.nbytes for row in rows if row.why)
    held = [format_nbytes(sum(_held(row, part) for row in rows)) for _, part in shown]
    said = f"{held[0]} of {format_nbytes(whole)} on rank 0"
    said += "".join(f", {each} on rank {rank}" for each, (rank, _) in zip(held[1:], shown[1:], strict=True))
    said += f"; {format_nbytes(kept)} of it whole on every rank" + (
        " that uses it" if space.block_calls_by_pp_rank else ""
    )
    return Group(Text(f"\n{head}", style="bold"), table, Text(f"{said}. Gradients and moments lie likewise"))


def _ranks(rows: list[ParameterRow], space: ShardingPlan) -> list[tuple[int, int]]:
    """The first ranks of the parts that have a column, each with the number of its part."""
    count = len(space.block_calls_by_pp_rank) or 1
    found = range(count)
    if count > SHOWN:
        fullest = max(found, key=lambda part: sum(row.parts[part] for row in rows))
        found = sorted({0, fullest, count - 1})
    return [(part * (space.mesh.world_size // count), part) for part in found]


def _held(row: ParameterRow, part: int) -> int:
    return row.parts[part] if row.parts else row.held


def divided_words(plan: Plan) -> dict[str, str]:
    """How much of the weights rank 0 has, and how much of that is whole, where matrices are divided; else nothing."""
    space = plan.sharding.all_ranks or plan.sharding
    if not any(home.sliced_dims for home in space.param_shardings):
        return {}
    here, parameters = space.at_coordinate(space.mesh.coordinate(0)), plan.job.precision.parameters
    held = sum(home.param.numel * home.param.itemsize(parameters) for home in here.param_shardings)
    whole = sum(
        home.param.numel * home.param.itemsize(parameters)
        for home in here.logical_param_shardings
        if not home.sliced_dims
    )
    said = f"{format_nbytes(held)} of {format_nbytes(plan.model_spec.nbytes(parameters))} of the weights while they are used"
    said += " on rank 0, by its part" if space.block_calls_by_pp_rank else ""
    return {"divided": f"{said}, {format_nbytes(whole)} of it whole: see plan --explain-model"}


def _row(home: ParamSharding, own: tuple[int, ...], space: ShardingPlan, parameters: str) -> ParameterRow:
    """That of one parameter, of which the first rank of each part has its `own` elements."""
    weight, width = home.param, home.param.itemsize(parameters)
    layout = "; ".join((*_places(home), *_gathered(home, space, width))) or "whole"
    nbytes, held = weight.numel * width, tuple(numel * width for numel in own)
    ranks = space.mesh.group_size(_axes(space))
    why = "" if home.sliced_dims else _why(home)
    less = nbytes - nbytes // ranks if why and weight.role != "norm" and len(weight.shape) > 1 else 0
    parts = held if space.block_calls_by_pp_rank else ()
    return ParameterRow(weight.name, 1, weight.shape, weight.role, layout, nbytes, held[0], why, less, parts)


def _places(home: ParamSharding) -> Iterator[str]:
    for axis, dim in home.sliced_dims.items():
        yield f"{axis}: {_said(home.param.dim_split(dim), 'words' if home.param.role in WORDS else 'features')}"
    if home.flat_shard_axes:
        yield f"{' '.join(home.flat_shard_axes)}: shards"


def _gathered(home: ParamSharding, space: ShardingPlan, width: int) -> Iterator[str]:
    """Of a layer without a partner, what it costs to bring its output together."""
    layer, _, leaf = home.param.name.rpartition(".")
    if home.param.role == "gathered" and home.sliced_dims and leaf == "weight":
        numel = max(call.out_numel for call in space.model_spec.layer_calls if call.name == layer)
        yield f"output gathered: {format_nbytes(numel * width)} per sample and call"


def _said(cut: DimSplit, singles: str) -> str:
    """The side that is divided, and in what units."""
    whole = sum(cut.sections)
    each = whole // len(cut.sections) // cut.num_units if cut.num_units else 0
    units = f"{cut.num_units} {singles}" if each == 1 else f"{cut.num_units} units of {each}"
    return f"{cut.side} side, {units}" + (
        f" in each of {len(cut.sections)} parts" if len(cut.sections) > 1 else ""
    )


def _why(home: ParamSharding) -> str:
    weight = home.param
    if weight.not_shardable_reason:
        return weight.not_shardable_reason
    if not weight.role:
        return "used between layers, by no layer that can be divided"
    if weight.role == "inside":
        return "every rank uses it for its own heads; the gradients are summed"
    if weight.role == "rows" and len(weight.shape) == 1:
        return "added once, to the sum"
    return f"no strategy divides {KINDS.get(weight.role, weight.role)}"


def _axes(space: ShardingPlan) -> list[str]:
    """The axes along which weights could be cut: those of several ranks that see the same tokens and run the same layers."""
    return [axis for axis in AXES if space.mesh.size(axis) > 1 and axis not in ("pp", *space.grad_sum_axes)]


def _joined(pattern: str, rows: list[ParameterRow]) -> ParameterRow:
    first = rows[0]
    name = first.pattern if len(rows) == 1 else pattern
    nbytes, held, less, *parts = (
        sum(numbers)
        for numbers in zip(*((row.nbytes, row.held, row.less, *row.parts) for row in rows), strict=True)
    )
    less = less * max(parts) // nbytes if less and parts else less  # a rank has the layers of its part alone
    return replace(
        first, pattern=name, number=len(rows), nbytes=nbytes, held=held, less=less, parts=tuple(parts)
    )
