"""Shows every parameter as a table row: its role, placement, why it is not sharded, and its bytes on a rank.

The same parameter of equal layers is one row. With a pipeline, the first rank of each stage has a column. If
a plan shards nothing, the table shows what it could shard, for two ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.model.tensor_parallel.layer_roles import LAYER_NUMBER
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.model_spec.param_dim_split import DimSplit
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES, axes_with
from meshwright.plan.sharding.param_sharding import ParamSharding
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.report.table import Column, Table

LINEAR_PAIRS = "pairs of linear layers"
ROLE_NAMES = {
    "colwise": LINEAR_PAIRS,
    "rowwise": LINEAR_PAIRS,
    "embedding": "embeddings",
    "lm_head": "LM heads",
    "norm": "norms",
}
VOCAB_ROLES = ("embedding", "lm_head")  # roles whose units are tokens of the vocabulary
MAX_SHOWN_STAGES = 4  # stages with a column; of more, the first, the largest and the last


@dataclass(frozen=True)
class ParamRow:
    """The same parameter of all layers, with the bytes of all of them, and those on rank 0.

    `not_sharded_reason` is empty if it is sharded; else `possible_saving_nbytes` are the bytes fewer that a
    rank would hold if it were.
    `stage_nbytes` are the bytes on the first rank of each stage; empty without a pipeline.
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
    """Returns a row per parameter, equal layers in one.

    `sharding` is that of all ranks, `parameters` the dtype of a job.
    """
    first = sharding.mesh.coordinate(0)
    stages = [
        RankView(sharding, {**first, "pp": pp_rank})
        for pp_rank in range(len(sharding.block_calls_by_pp_rank) or 1)
    ]
    numel_by_stage = [
        {param_sharding.param.name: param_sharding.param.numel for param_sharding in each.param_shardings}
        for each in stages
    ]
    rows_by_key: dict[tuple[Any, ...], list[ParamRow]] = {}
    for param_sharding in sharding.param_shardings:
        row = _param_row(
            param_sharding,
            tuple(each.get(param_sharding.param.name, 0) for each in numel_by_stage),
            sharding,
            parameters,
        )
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
        rows_by_key.setdefault(key, []).append(row)
    return [_merge_layers(pattern, rows) for (pattern, *_), rows in rows_by_key.items()]


def params_view(sharding: ShardingPlan, parameters: str, *, plan_given: bool) -> RenderableType:
    """Returns the rows as a table; `plan_given` tells whether the plan shards anything."""
    rows = param_rows(sharding, parameters)
    axes = [*sharding.stage_axes, *_shardable_axes(sharding)]
    over = " x ".join(f"{axis} {sharding.mesh.size(axis)}" for axis in axes) or "no axis"
    seq_axes = sharding.residual_layout.axes_with("S")
    over += f"; tokens are sharded between layers over {' and '.join(seq_axes)}" if seq_axes else ""
    head = f"parameters over {over}" if plan_given else f"parameters, if they were sharded over {over}"
    shown = _shown_ranks(rows, sharding)
    table = Table(
        [
            *("parameter", "shape", "role", "layout"),
            *(Column(f"in use on rank {rank}", format_nbytes) for rank, _ in shown),
            "not sharded because",
        ],
        [
            (
                row.pattern if row.count == 1 else f"{row.pattern} x{row.count}",
                " x ".join(map(str, row.shape)),
                row.role,
                row.config,
                *(_nbytes_on_stage(row, stage) for _, stage in shown),
                _not_sharded_text(row),
            )
            for row in rows
        ],
        title=head,
        row_style=lambda row: "yellow" if row[-1] else "",
    )
    total, unsharded = (
        sum(row.nbytes for row in rows),
        sum(row.nbytes for row in rows if row.not_sharded_reason),
    )
    nbytes_texts = [format_nbytes(sum(_nbytes_on_stage(row, stage) for row in rows)) for _, stage in shown]
    text = f"{nbytes_texts[0]} of {format_nbytes(total)} on rank 0"
    text += "".join(
        f", {each} on rank {rank}" for each, (rank, _) in zip(nbytes_texts[1:], shown[1:], strict=True)
    )
    text += f"; {format_nbytes(unsharded)} of it not sharded, on every rank" + (
        " that uses it" if sharding.block_calls_by_pp_rank else ""
    )
    return Group(table, Text(f"{text}. Gradients and optimizer states are sharded in the same way"))


def _not_sharded_text(row: ParamRow) -> str:
    saving = f" ({format_nbytes(row.possible_saving_nbytes)} less per rank if sharded)"
    return row.not_sharded_reason + (saving if row.possible_saving_nbytes else "")


def _shown_ranks(rows: list[ParamRow], sharding: ShardingPlan) -> list[tuple[int, int]]:
    count = len(sharding.block_calls_by_pp_rank) or 1
    stages = range(count)
    if count > MAX_SHOWN_STAGES:
        largest = max(stages, key=lambda stage: sum(row.stage_nbytes[stage] for row in rows))
        stages = sorted({0, largest, count - 1})
    return [(sharding.mesh.rank({"pp": stage}), stage) for stage in stages]


def _nbytes_on_stage(row: ParamRow, stage: int) -> int:
    return row.stage_nbytes[stage] if row.stage_nbytes else row.rank0_nbytes


def sharded_params_text(plan: Plan) -> dict[str, str]:
    """Returns how much of the weights rank 0 has, and how much of that is not sharded.

    Empty if nothing is sharded.
    """
    sharding = plan.sharding
    if not any(param_sharding.sliced_dims for param_sharding in sharding.param_shardings):
        return {}
    here, parameters = plan.rank_view(0), plan.job.precision.parameters
    nbytes = sum(
        param_sharding.param.numel * param_sharding.param.itemsize(parameters)
        for param_sharding in here.param_shardings
    )
    unsharded_nbytes = sum(
        param_sharding.param.numel * param_sharding.param.itemsize(parameters)
        for param_sharding in here.logical_param_shardings
        if not param_sharding.sliced_dims
    )
    text = (
        f"{format_nbytes(nbytes)} of {format_nbytes(plan.model_spec.nbytes(parameters))} of the "
        f"weights in use"
    )
    text += " on rank 0, by its stage" if sharding.block_calls_by_pp_rank else ""
    text += f", {format_nbytes(unsharded_nbytes)} of it not sharded: see `meshwright inspect`"
    return {"sharded weights": text}


def _param_row(
    param_sharding: ParamSharding, local_numel: tuple[int, ...], sharding: ShardingPlan, parameters: str
) -> ParamRow:
    weight, width = param_sharding.param, param_sharding.param.itemsize(parameters)
    texts = _placement_texts(param_sharding, sharding)
    gathered = _gathered_output_text(param_sharding, sharding, width)
    layout = "; ".join((*texts, *gathered)) or "replicated"
    nbytes, local_nbytes = weight.numel * width, tuple(numel * width for numel in local_numel)
    ranks = sharding.mesh.group_size(_shardable_axes(sharding))
    reason = "" if param_sharding.sliced_dims else _reason(param_sharding)
    saving = nbytes - nbytes // ranks if reason and weight.role != "norm" and len(weight.shape) > 1 else 0
    stage_nbytes = local_nbytes if sharding.block_calls_by_pp_rank else ()
    return ParamRow(
        weight.name,
        1,
        weight.shape,
        weight.role,
        layout,
        nbytes,
        local_nbytes[0],
        reason,
        saving,
        stage_nbytes,
    )


def _placement_texts(param_sharding: ParamSharding, sharding: ShardingPlan) -> Iterator[str]:
    experts = {name for call in sharding.model_spec.experts_calls for name in call.params}
    dims, axes = param_sharding.sliced_dims, list[str]()
    if not experts.isdisjoint(param_sharding.param.names):
        axes = [axis for axis in AXES if dims.get(axis) == 0]
        yield from [f"{' '.join(axes)}: {param_sharding.param.shape[0]} experts"] if axes else []
    for axis, dim in ((axis, dim) for axis, dim in dims.items() if axis not in axes):
        unit = "tokens" if param_sharding.param.role in VOCAB_ROLES else "features"
        yield f"{axis}: {_split_text(param_sharding.param.dim_split(dim), unit)}"
    if param_sharding.flat_shard_axes:
        yield f"{' '.join(param_sharding.flat_shard_axes)}: shards"


def _gathered_output_text(param_sharding: ParamSharding, sharding: ShardingPlan, width: int) -> Iterator[str]:
    layer, _, leaf = param_sharding.param.name.rpartition(".")
    if (
        param_sharding.param.role == "colwise_gather_output"
        and param_sharding.sliced_dims
        and leaf == "weight"
    ):
        numel = max(call.out_numel for call in sharding.model_spec.layer_calls if call.name == layer)
        yield f"output gathered: {format_nbytes(numel * width)} per sample and call"


def _split_text(layer_split: DimSplit, singles: str) -> str:
    whole = sum(layer_split.sections)
    each = whole // len(layer_split.sections) // layer_split.num_units if layer_split.num_units else 0
    units = f"{layer_split.num_units} {singles}" if each == 1 else f"{layer_split.num_units} units of {each}"
    return f"{layer_split.side} side, {units}" + (
        f" in each of {len(layer_split.sections)} sections" if len(layer_split.sections) > 1 else ""
    )


def _reason(param_sharding: ParamSharding) -> str:
    weight = param_sharding.param
    if weight.not_shardable_reason:
        return weight.not_shardable_reason
    if not weight.role:
        return "used between layers, by no shardable layer"
    if weight.role == "between_pair":
        return "every rank uses it for its own heads; gradients are summed"
    if weight.role == "rowwise" and len(weight.shape) == 1:
        return "added once, after the sum"
    return f"no strategy shards {ROLE_NAMES.get(weight.role, weight.role)}"


def _shardable_axes(sharding: ShardingPlan) -> list[str]:
    """The axes along which params could be sharded: several ranks that have the same tokens and layers."""
    return [
        axis
        for axis in AXES
        if sharding.mesh.size(axis) > 1 and axis not in (*axes_with("layers"), *sharding.grad_sum_axes)
    ]


def _merge_layers(pattern: str, rows: list[ParamRow]) -> ParamRow:
    first = rows[0]
    name = first.pattern if len(rows) == 1 else pattern
    nbytes, rank0_nbytes, saving, *stage_nbytes = (
        sum(numbers)
        for numbers in zip(
            *((row.nbytes, row.rank0_nbytes, row.possible_saving_nbytes, *row.stage_nbytes) for row in rows),
            strict=True,
        )
    )
    if saving and stage_nbytes:  # a rank has the layers of its stage alone
        saving = saving * max(stage_nbytes) // nbytes
    return replace(
        first,
        pattern=name,
        count=len(rows),
        nbytes=nbytes,
        rank0_nbytes=rank0_nbytes,
        possible_saving_nbytes=saving,
        stage_nbytes=tuple(stage_nbytes),
    )
