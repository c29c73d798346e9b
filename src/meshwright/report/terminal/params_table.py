"""Every parameter as a row of a table: its role, where it lies, why it stays whole, and the bytes of it that
a rank holds.

The same parameter of equal layers is one row. Where ranks run parts of the model, the first rank of each part
has a column: it holds what its own part uses. Where a plan divides nothing, what it could divide is shown,
for two ranks.
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

LINEAR_PAIRS = "pairs of linear layers"
ROLE_NAMES = {
    "colwise": LINEAR_PAIRS,
    "rowwise": LINEAR_PAIRS,
    "embedding": "tables",
    "lm_head": "heads",
    "norm": "norms",
}
VOCAB_ROLES = ("embedding", "lm_head")  # roles whose features are words
MAX_SHOWN_STAGES = 4  # parts that have a column; of more the first, the fullest and the last


@dataclass(frozen=True)
class ParamRow:
    """The same parameter of all layers: its pattern, how many, shape, role, layout, the bytes of all of them,
    and what of that
    rank 0 holds. `why` says why it is whole, `less` how many bytes fewer a rank would hold if it were
    divided. `parts` are the bytes that the first rank of each part holds; empty where every rank runs the
    whole model.
    """

    pattern: str
    count: int
    shape: tuple[int, ...]
    role: str
    config: str
    nbytes: int
    rank0_nbytes: int
    not_sharded_reason: str = ""
    possible_saving_nbytes: int = 0
    stage_nbytes: tuple[int, ...] = ()


def param_rows(sharding: ShardingPlan, parameters: str) -> list[ParamRow]:
    """A row per parameter, equal layers in one; `space` is that of all ranks, `parameters` the dtype of a
    job.
    """
    places = [{"pp": part} for part in range(len(sharding.block_calls_by_pp_rank))] or [{}]
    seen = [sharding.at_coordinate({**sharding.mesh.coordinate(0), **place}) for place in places]
    own = [{home.param.name: home.param.numel for home in each.param_shardings} for each in seen]
    alike: dict[tuple[Any, ...], list[ParamRow]] = {}
    for home in sharding.param_shardings:
        row = _param_row(home, tuple(each.get(home.param.name, 0) for each in own), sharding, parameters)
        most = max((row.rank0_nbytes, *row.stage_nbytes))  # what a rank has of it that has some
        key = (
            LAYER_NUMBER.sub("*", row.pattern),
            row.shape,
            row.role,
            row.config,
            row.nbytes,
            most,
            row.not_sharded_reason,
        )
        alike.setdefault(key, []).append(row)
    return [_merge_layers(pattern, rows) for (pattern, *_), rows in alike.items()]


def params_view(sharding: ShardingPlan, parameters: str, *, plan_given: bool) -> RenderableType:
    """The rows as a table; `asked` tells whether a plan was asked for that divides anything."""
    rows = param_rows(sharding, parameters)
    axes = [*(["pp"] if sharding.block_calls_by_pp_rank else []), *_shardable_axes(sharding)]
    over = " x ".join(f"{axis} {sharding.mesh.size(axis)}" for axis in axes) or "no axis"
    sliced = sharding.residual_layout.axes_with("S")
    over += f"; the stream goes in slices over {' and '.join(sliced)}" if sliced else ""
    head = f"parameters over {over}" if plan_given else f"parameters, if they were divided over {over}"
    columns = [Column(name, overflow="fold") for name in ("parameter", "shape", "role", "layout")]
    shown = _shown_ranks(rows, sharding)
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
        name = row.pattern if row.count == 1 else f"{row.pattern} x{row.count}"
        why = (
            f"{row.not_sharded_reason} ({format_nbytes(row.possible_saving_nbytes)} less per rank if divided)"
            if row.possible_saving_nbytes
            else row.not_sharded_reason
        )
        held = [format_nbytes(_nbytes_on_stage(row, part)) for _, part in shown]
        cells = (name, " x ".join(map(str, row.shape)), row.role, row.config, *held, why)
        table.add_row(*map(Text, cells), style="yellow" if row.not_sharded_reason else "")
    whole, kept = sum(row.nbytes for row in rows), sum(row.nbytes for row in rows if row.not_sharded_reason)
    held = [format_nbytes(sum(_nbytes_on_stage(row, part) for row in rows)) for _, part in shown]
    said = f"{held[0]} of {format_nbytes(whole)} on rank 0"
    said += "".join(f", {each} on rank {rank}" for each, (rank, _) in zip(held[1:], shown[1:], strict=True))
    said += f"; {format_nbytes(kept)} of it whole on every rank" + (
        " that uses it" if sharding.block_calls_by_pp_rank else ""
    )
    return Group(Text(f"\n{head}", style="bold"), table, Text(f"{said}. Gradients and moments lie likewise"))


def _shown_ranks(rows: list[ParamRow], sharding: ShardingPlan) -> list[tuple[int, int]]:
    """The first ranks of the parts that have a column, each with the number of its part."""
    count = len(sharding.block_calls_by_pp_rank) or 1
    found = range(count)
    if count > MAX_SHOWN_STAGES:
        fullest = max(found, key=lambda part: sum(row.stage_nbytes[part] for row in rows))
        found = sorted({0, fullest, count - 1})
    return [(part * (sharding.mesh.world_size // count), part) for part in found]


def _nbytes_on_stage(row: ParamRow, stage: int) -> int:
    return row.stage_nbytes[stage] if row.stage_nbytes else row.rank0_nbytes


def sharded_params_text(plan: Plan) -> dict[str, str]:
    """How much of the weights rank 0 has, and how much of that is whole, where matrices are divided; else
    nothing.
    """
    space = plan.sharding.global_plan
    if not any(home.sliced_dims for home in space.param_shardings):
        return {}
    here, parameters = space.at_coordinate(space.mesh.coordinate(0)), plan.job.precision.parameters
    held = sum(home.param.numel * home.param.itemsize(parameters) for home in here.param_shardings)
    whole = sum(
        home.param.numel * home.param.itemsize(parameters)
        for home in here.logical_param_shardings
        if not home.sliced_dims
    )
    said = (
        f"{format_nbytes(held)} of {format_nbytes(plan.model_spec.nbytes(parameters))} of "
        f"the "
        f"weights while they are used"
    )
    said += " on rank 0, by its part" if space.block_calls_by_pp_rank else ""
    return {"divided": f"{said}, {format_nbytes(whole)} of it whole: see `meshwright inspect`"}


def _param_row(
    home: ParamSharding, own: tuple[int, ...], sharding: ShardingPlan, parameters: str
) -> ParamRow:
    """That of one parameter, of which the first rank of each part has its `own` elements."""
    weight, width = home.param, home.param.itemsize(parameters)
    layout = "; ".join((*_placement_texts(home), *_gathered_output_text(home, sharding, width))) or "whole"
    nbytes, held = weight.numel * width, tuple(numel * width for numel in own)
    ranks = sharding.mesh.group_size(_shardable_axes(sharding))
    why = "" if home.sliced_dims else _reason(home)
    less = nbytes - nbytes // ranks if why and weight.role != "norm" and len(weight.shape) > 1 else 0
    parts = held if sharding.block_calls_by_pp_rank else ()
    return ParamRow(weight.name, 1, weight.shape, weight.role, layout, nbytes, held[0], why, less, parts)


def _placement_texts(home: ParamSharding) -> Iterator[str]:
    for axis, dim in home.sliced_dims.items():
        unit = "words" if home.param.role in VOCAB_ROLES else "features"
        yield f"{axis}: {_split_text(home.param.dim_split(dim), unit)}"
    if home.flat_shard_axes:
        yield f"{' '.join(home.flat_shard_axes)}: shards"


def _gathered_output_text(home: ParamSharding, sharding: ShardingPlan, width: int) -> Iterator[str]:
    """Of a layer without a partner, what it costs to bring its output together."""
    layer, _, leaf = home.param.name.rpartition(".")
    if home.param.role == "colwise_gather_output" and home.sliced_dims and leaf == "weight":
        numel = max(call.out_numel for call in sharding.model_spec.layer_calls if call.name == layer)
        yield f"output gathered: {format_nbytes(numel * width)} per sample and call"


def _split_text(layer_split: DimSplit, singles: str) -> str:
    """The side that is divided, and in what units."""
    whole = sum(layer_split.sections)
    each = whole // len(layer_split.sections) // layer_split.num_units if layer_split.num_units else 0
    units = f"{layer_split.num_units} {singles}" if each == 1 else f"{layer_split.num_units} units of {each}"
    return f"{layer_split.side} side, {units}" + (
        f" in each of {len(layer_split.sections)} parts" if len(layer_split.sections) > 1 else ""
    )


def _reason(home: ParamSharding) -> str:
    weight = home.param
    if weight.not_shardable_reason:
        return weight.not_shardable_reason
    if not weight.role:
        return "used between layers, by no layer that can be divided"
    if weight.role == "between_pair":
        return "every rank uses it for its own heads; the gradients are summed"
    if weight.role == "rowwise" and len(weight.shape) == 1:
        return "added once, to the sum"
    return f"no strategy divides {ROLE_NAMES.get(weight.role, weight.role)}"


def _shardable_axes(sharding: ShardingPlan) -> list[str]:
    """The axes along which weights could be cut: those of several ranks that see the same tokens and run the
    same layers.
    """
    return [
        axis for axis in AXES if sharding.mesh.size(axis) > 1 and axis not in ("pp", *sharding.grad_sum_axes)
    ]


def _merge_layers(pattern: str, rows: list[ParamRow]) -> ParamRow:
    first = rows[0]
    name = first.pattern if len(rows) == 1 else pattern
    nbytes, held, less, *parts = (
        sum(numbers)
        for numbers in zip(
            *((row.nbytes, row.rank0_nbytes, row.possible_saving_nbytes, *row.stage_nbytes) for row in rows),
            strict=True,
        )
    )
    less = less * max(parts) // nbytes if less and parts else less  # a rank has the layers of its part alone
    return replace(
        first,
        pattern=name,
        count=len(rows),
        nbytes=nbytes,
        rank0_nbytes=held,
        possible_saving_nbytes=less,
        stage_nbytes=tuple(parts),
    )
