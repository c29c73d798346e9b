"""A model in parts, as tables and as a drawing: which blocks lie where, what crosses each border, and who
works when.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.model_spec.stage_boundaries import StageBoundaries, StageValue
from meshwright.plan.plan import Plan
from meshwright.plan.step.simulator import SpansByRank
from meshwright.report.timeline.gantt_text import DrawingUnits, gantt_view, schedule_summary
from meshwright.report.timeline.stage_turns import (
    BlockCallsByStage,
    gantt_rows,
    max_in_flight,
    simulated_actions,
)

AMOUNT_COLUMNS = 14  # columns for an amount at the end of a line
MAX_ROWS = 12  # rows of a table, unless all are asked for
Row = TypeVar("Row")
FLOP_PREFIXES = ("", "K", "M", "G", "T", "P")


def stage_block_calls(plan: Plan) -> BlockCallsByStage:
    """The visits of each part, in order of the forward; one part where each rank runs the whole model."""
    return [part.block_calls for part in plan.sharding.stages] or [plan.model_spec.block_calls]


def stages_view(plan: Plan, *, show_all: bool = False) -> RenderableType | None:
    """The parts of `plan`, the values between them and the order of the turns; None where each rank runs the
    whole model.

    `every` shows all rows, and the drawing with every label.
    """
    if not plan.sharding.block_calls_by_pp_rank or plan.model_spec.stage_boundaries is None:
        return None
    return Group(
        *_idle_warning(plan),
        _stages_table(plan, show_all=show_all),
        "",
        _values_table(plan, plan.model_spec.stage_boundaries, show_all=show_all),
        "",
        _ScheduleDrawing(plan, show_all),
    )


@dataclass(frozen=True)
class _ScheduleDrawing:
    """The turns on paper, as wide as the terminal is."""

    plan: Plan
    show_all: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = simulated_spans(self.plan)
        end = max((span.end for row in found for span in row), default=0.0)
        known = any(self.plan.model_spec.flops)
        units = DrawingUnits(
            partial(_format_flops, end) if known else "{:.4g}".format,
            _format_amount,
            row_label(self.plan.mesh.world_size, len(found)),
        )
        yield gantt_view(
            {"planned, by operations" if known else "planned": found},
            options.max_width - AMOUNT_COLUMNS,
            units,
            draw_all=self.show_all,
        )


def simulated_spans(plan: Plan) -> SpansByRank:
    """When each role of `plan` is at which turn, to the scale of its operations; messages take no time."""
    return gantt_rows(simulated_actions(plan.program, {}), plan.program, stage_block_calls(plan))


def row_label(world: int, roles: int) -> str:
    """What a row of a drawing is called: a rank, or a stage where several ranks have the same role."""
    return "rank" if world == roles else "stage"


def _idle_warning(plan: Plan) -> Iterator[Text]:
    """A word where there are too few micro-batches to keep all ranks of a line at work."""
    ranks = len(plan.sharding.block_calls_by_pp_rank)
    if plan.num_microbatches < ranks:
        found = simulated_spans(plan)
        said = schedule_summary(found).split(", ")[1]
        text = (
            f"{plan.num_microbatches} micro-batch{'es' if plan.num_microbatches > 1 else ''} "
            f"for {ranks} ranks in a line: {said}. "
        )
        text += (
            f"With a smaller micro_batch (now {plan.micro_batch}), or a larger train.batch, "
            f"more of them work at a time"
        )
        yield Text(f"{text}\n", style="yellow")


def _format_flops(end: float, flops: float) -> str:
    """Operations, in the unit that fits the longest."""
    power = next(
        (power for power in range(len(FLOP_PREFIXES) - 1) if end < 1000 ** (power + 1)),
        len(FLOP_PREFIXES) - 1,
    )
    return f"{flops / 1000**power:.4g} {FLOP_PREFIXES[power]}FLOP"


def _format_amount(amount: float) -> str:
    return format_nbytes(round(amount))


def _stages_table(plan: Plan, *, show_all: bool) -> Table:
    heads = ("parameters", "work", "in flight")
    columns = [Column(head, justify="right") for head in heads]
    where = row_label(plan.mesh.world_size, len(plan.sharding.block_calls_by_pp_rank))
    table = Table(
        Column("part"),
        Column(where),
        Column("blocks", overflow="fold"),
        *columns,
        box=None,
        header_style="bold",
    )
    table.padding = (0, 2, 0, 0)
    parts, flops = (
        stage_block_calls(plan),
        dict(zip(plan.model_spec.block_calls, plan.model_spec.flops, strict=True)),
    )
    for number, part in _first_rows(list(enumerate(parts)), show_all=show_all):
        own = set(part)
        stages = [
            index for index, stage in enumerate(plan.sharding.block_calls_by_pp_rank) if own <= set(stage)
        ]
        numel = sum(
            weight.numel
            for weight in plan.model_spec.params
            if own & set(plan.model_spec.block_calls_needing(weight))
        )
        work = 100 * sum(map(flops.__getitem__, part)) / (sum(plan.model_spec.flops) or 1)
        most = max(max_in_flight(plan.program.roles[index][1], part) for index in stages)
        blocks = part[0] if len(part) == 1 else f"{part[0]} .. {part[-1]} ({len(part)})"
        cells = (
            str(number),
            ", ".join(map(str, stages)),
            blocks,
            f"{numel:,}",
            f"{work:.1f} %",
            f"{most} of {plan.num_microbatches}",
        )
        table.add_row(*map(Text, cells))
    _caption_hidden(table, len(parts), show_all=show_all)
    return table


def _values_table(plan: Plan, borders: StageBoundaries, *, show_all: bool) -> Table:
    """What is live at each border, skips over several parts at each that they pass."""
    columns = (
        Column("border"),
        Column("value", overflow="fold"),
        Column("goes"),
        Column("shape"),
        Column("bytes", justify="right"),
    )
    table = Table(*columns, box=None, header_style="bold", padding=(0, 2, 0, 0))
    of = {visit: number for number, part in enumerate(stage_block_calls(plan)) for visit in part}
    found = [
        (number, value)
        for number, cut in enumerate(plan.sharding.split_points, start=1)
        for value in borders.live_values(cut)
    ]
    for number, value in _first_rows(found, show_all=show_all):
        table.add_row(
            *map(
                Text,
                (
                    f"{number - 1} | {number}",
                    str(value),
                    _route_text(value, of),
                    *_value_size(value, plan.micro_batch),
                ),
            )
        )
    _caption_hidden(table, len(found), show_all=show_all)
    return table


def _route_text(value: StageValue, of: dict[str, int]) -> str:
    """From part to part: a value goes from each that uses it to the next one that does."""
    return " > ".join(map(str, sorted({of[value.producer], *(of[visit] for visit in value.consumers)})))


def _value_size(value: StageValue, rows: int) -> tuple[str, str]:
    shape = " x ".join(map(str, value.shape(rows)))
    back = ", and back" if value.needs_grad else ""
    return f"{shape} {value.dtype}", f"{format_nbytes(value.nbytes(rows))}{back}"


def _first_rows(found: Sequence[Row], *, show_all: bool) -> Iterator[Row]:
    yield from found if show_all else found[:MAX_ROWS]


def _caption_hidden(table: Table, count: int, *, show_all: bool) -> None:
    if count > MAX_ROWS and not show_all:
        table.caption, table.caption_justify = f"and {count - MAX_ROWS} more (--all shows them)", "left"
