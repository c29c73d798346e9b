"""Shows the stages of a pipelined plan: their blocks, the values sent across each boundary, the schedule."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.model_spec.stage_transfers import StageBoundaries, StageValue
from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Program
from meshwright.plan.step.simulator import SpansByRank
from meshwright.report.table import Column, Table
from meshwright.report.timeline.gantt_text import DrawingUnits, gantt_view, schedule_summary
from meshwright.report.timeline.stage_actions import (
    BlockCallsByStage,
    gantt_rows,
    max_in_flight,
    simulated_actions,
    stage_roles,
)

AMOUNT_COLUMNS = 14  # columns for an amount at the end of a line
FLOP_PREFIXES = ("", "K", "M", "G", "T", "P")


def stage_block_calls(plan: Plan) -> BlockCallsByStage:
    """Returns the block calls of each stage, in order of the forward; one stage without a pipeline."""
    return [stage.block_calls for stage in plan.sharding.stages] or [plan.model_spec.block_calls]


def stages_view(plan: Plan) -> RenderableType | None:
    """Returns the stages of `plan`, the values between them and the schedule with every label; None without
    a pipeline.
    """
    if not plan.sharding.block_calls_by_pp_rank or plan.model_spec.stage_boundaries is None:
        return None
    return Group(
        *(Text(f"{warning}\n", style="yellow") for warning in idle_warnings(plan)),
        _stages_table(plan),
        "",
        _values_table(plan, plan.model_spec.stage_boundaries),
        "",
        _ScheduleDrawing(plan, is_complete=True),
    )


def timeline_view(plan: Plan) -> RenderableType | None:
    """Returns the schedule of `plan` in one width of the terminal; None without a pipeline."""
    if not plan.sharding.block_calls_by_pp_rank or plan.model_spec.stage_boundaries is None:
        return None
    return _ScheduleDrawing(plan, is_complete=False)


@dataclass(frozen=True)
class _ScheduleDrawing:
    plan: Plan
    is_complete: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = simulated_spans(self.plan)
        if not self.is_complete:
            found = [[replace(span, memory=0.0, memory_after=0.0) for span in row] for row in found]
        end = max((span.end for row in found for span in row), default=0.0)
        known = any(self.plan.model_spec.flops)
        units = DrawingUnits(
            partial(_format_flops, end) if known else "{:.4g}".format,
            _format_amount,
            row_label(self.plan.program),
        )
        yield gantt_view(
            {"planned, by FLOPs" if known else "planned": found},
            options.max_width - AMOUNT_COLUMNS,
            units,
            draw_all=self.is_complete,
        )


def simulated_spans(plan: Plan) -> SpansByRank:
    """Returns the schedule of `plan`, to the scale of its FLOPs; messages take no time."""
    return gantt_rows(simulated_actions(plan.program, {}), plan.program, stage_block_calls(plan))


def row_label(program: Program) -> str:
    """Returns the name of a row: a rank, or a stage if several ranks have the same role."""
    return "rank" if all(len(role.ranks) == 1 for role in stage_roles(program)) else "pp rank"


def idle_warnings(plan: Plan) -> Iterator[str]:
    """Yields a warning if a pipeline has fewer microbatches than stages."""
    ranks = len(plan.sharding.block_calls_by_pp_rank)
    if plan.num_microbatches < ranks:
        found = simulated_spans(plan)
        bubble = schedule_summary(found).split(", ")[1]
        text = (
            f"{plan.num_microbatches} microbatch{'es' if plan.num_microbatches > 1 else ''} "
            f"for {ranks} pipeline stages: {bubble}. "
        )
        yield text + (
            f"With a smaller micro_batch (now {plan.micro_batch}), or a larger train.batch, "
            f"the bubble is smaller"
        )


def _format_flops(end: float, flops: float) -> str:
    power = next(
        (power for power in range(len(FLOP_PREFIXES) - 1) if end < 1000 ** (power + 1)),
        len(FLOP_PREFIXES) - 1,
    )
    return f"{flops / 1000**power:.4g} {FLOP_PREFIXES[power]}FLOP"


def _format_amount(amount: float) -> str:
    return format_nbytes(round(amount))


def _stages_table(plan: Plan) -> Table:
    spec, pp_ranks = plan.model_spec, plan.sharding.block_calls_by_pp_rank
    flops = dict(zip(spec.block_calls, spec.flops, strict=True))
    rows = []
    for number, stage in enumerate(stage_block_calls(plan)):
        block_calls = set(stage)
        pp_rank_numbers = [
            index for index, pp_rank_calls in enumerate(pp_ranks) if block_calls <= set(pp_rank_calls)
        ]
        most = max(max_in_flight(plan.stage_role(index).actions, stage) for index in pp_rank_numbers)
        rows.append(
            (
                number,
                ", ".join(map(str, pp_rank_numbers)),
                stage[0] if len(stage) == 1 else f"{stage[0]} .. {stage[-1]} ({len(stage)})",
                sum(
                    weight.numel
                    for weight in spec.params
                    if block_calls & set(spec.block_calls_needing(weight))
                ),
                100 * sum(map(flops.__getitem__, stage)) / (sum(spec.flops) or 1),
                f"{most} of {plan.num_microbatches}",
            )
        )
    return Table(
        [
            *("stage", row_label(plan.program), "blocks"),
            *(Column("parameters", "{:,}"), Column("FLOPs", "{:.1f} %"), Column("in flight", "{}")),
        ],
        rows,
    )


def _values_table(plan: Plan, boundaries: StageBoundaries) -> Table:
    """The values that cross each boundary; skips over several stages are listed at each boundary."""
    stage_of = {
        block_call: number for number, stage in enumerate(stage_block_calls(plan)) for block_call in stage
    }
    return Table(
        ["boundary", "value", "stages", "shape", Column("bytes", "{}")],
        [
            (
                f"{number - 1} | {number}",
                value,
                _route_text(value, stage_of),
                *_value_size(value, plan.micro_batch),
            )
            for number, cut in enumerate(plan.sharding.split_points, start=1)
            for value in boundaries.live_values(cut)
        ],
    )


def _route_text(value: StageValue, stage_of: dict[str, int]) -> str:
    return " > ".join(
        map(
            str, sorted({stage_of[value.producer], *(stage_of[block_call] for block_call in value.consumers)})
        )
    )


def _value_size(value: StageValue, num_samples: int) -> tuple[str, str]:
    shape = " x ".join(map(str, value.shape(num_samples)))
    back = ", gradient back" if value.needs_grad else ""
    return f"{shape} {value.dtype}", f"{format_nbytes(value.nbytes(num_samples))}{back}"
