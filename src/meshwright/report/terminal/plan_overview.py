"""Shows a plan on one screen: at most 40 lines at 80 columns.

    mesh            4 ranks: 2 pipeline stages (pp) x 2 data-parallel shards (dp_shard)
    data            what is trained on
    memory          the peak of the fullest rank, a bar per category
    sent            the bytes of a rank per step, a bar per collective
    schedule        the timeline of a pipeline, if there is room for it
    step            the predicted seconds, a bar per category

What does not fit is shortened in this order: the timeline, explanations, notes. `--actions` shows everything
(action_table.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import inf

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from meshwright.comm.collectives.comm_volume import min_max_sent_nbytes
from meshwright.plan.hardware.device_specs import DeviceSpec
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import MESH_AXES, Mesh, in_mesh_order
from meshwright.plan.step.single_device_program import FORWARD_KINDS, RECOMPUTE_KINDS
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.machine.machine import MAX_ASSUMED_HOST
from meshwright.planner.program_cost.prediction import StepPrediction
from meshwright.planner.program_cost.rank_memory import fullest_host, peak_nbytes_by_category
from meshwright.report.table import COLUMN_GAP, Column, Table
from meshwright.report.terminal.action_table import plan_summary
from meshwright.report.terminal.data_line import DataSummary, data_text, data_warnings
from meshwright.report.terminal.memory_and_sent_bytes import (
    OTHER_TIERS,
    all_send_alike,
    at_most_text,
    busiest_rank,
    expected_text,
    fullest_rank,
)
from meshwright.report.terminal.prediction import (
    CATEGORY_TEXTS,
    category_seconds,
    format_seconds,
    prediction_head,
)
from meshwright.report.timeline.pipeline_stages import idle_warnings, timeline_view

MAX_LINES = 40
MAX_SENT_ROWS = 5
MAX_HEAD_LINES = 2  # lines of a value in the head
MEMORY_BAR_COLUMNS, SENT_BAR_COLUMNS, STEP_BAR_COLUMNS = 30, 12, 16
ALWAYS_SHOWN_FIELDS = ("stage", "schedule")  # of a strategy, also at their defaults
FULL_BLOCK = 0x2588  # the seven characters behind it are parts of it, an eighth narrower each
SENT_TEXTS = {
    **dict.fromkeys(("UNSHARD", "SCATTER_PARAM", "GIVE"), "parameters"),
    **dict.fromkeys(("REDUCE", "REDUCE_TIED", "GATHER_GRAD", "PUSH"), "gradients"),
    **dict.fromkeys((*FORWARD_KINDS, *RECOMPUTE_KINDS, "SEND", "CONCAT"), "activations"),
    **dict.fromkeys(("B", "I", "W", "SEND_GRAD", "CONCAT_GRAD"), "activation grads"),
    **dict.fromkeys(("GATHER", "SCATTER"), "samples"),
    **dict.fromkeys(("TOKEN_COUNT", "LOSS_SUM", "GLOBAL_NORM", "REDUCE_SQNORM"), "counts, loss, norm"),
    **dict.fromkeys(("AVERAGE", "AVERAGE_SITE"), "averages of sites"),
    **{"OUTER_REDUCE": "outer gradients", "ROUND_SUM": "counts of rounds"},
    "BATCH_SUM": "tokens per expert",
    "LOSS": "loss",
    "BROADCAST": "broadcast",
    "NOISE_SCALE": "noise scale",
}
SHOWN_ABOVE = (  # of `plan_summary`: said by the sections here
    *("model", "mesh", "strategies", "global batch", "precision"),
    *("states per rank", "sent per rank and step", "plan"),
)
TOO_LARGE = (
    "the peak is above the memory of the device: use a smaller micro_batch, activation_checkpointing, or "
    "more ranks along dp_shard, tp or pp (docs/howto/out_of_memory.md)"
)
MAY_BE_TOO_LARGE = (
    "the peak fits if experts are chosen alike, and may be above the memory of the device if not: set "
    "checkpoint_load of expert_parallel to 1, use a smaller micro_batch, or more ranks along ep or dp_shard"
)
TOO_LARGE_ON_HOST = (
    "{} {} of host memory, and the host has {} (host_gb): use more hosts, share states instead of "
    "replicating them (zero), or leave more on the device (strategies.offload.what) or on disk (disk_offload)"
)
TOO_LARGE_ON_DISK = (
    "{} {} on disk, and the disk of a host has {} (disk_gb): free more, use more hosts, share states "
    "instead of replicating them (zero), or leave more off it (strategies.disk_offload.what)"
)
UNKNOWN_HOST = (
    "{} {} of host memory, and the memory of the host is not known: write host_gb in a [device] table, "
    "or bound that of each rank (host_gb of offload, disk_offload, activation_offload or "
    "memory_budget)"
)
MORE = "--actions shows dtypes, memory of other ranks, stages and every action"


@dataclass(frozen=True)
class PlanOverview:
    """A plan as one screen.

     Without `prediction`, `not_predicted` says how to get one. `device` is the
    kind of device, if it is known. `notes` are the choices that were made for the plan.
    """

    plan: Plan
    data: DataSummary
    prediction: StepPrediction | None
    not_predicted: str
    device: DeviceSpec | None = None
    notes: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the sections, shortened to `MAX_LINES`."""

        def lines(*parts: RenderableType) -> list[list[Segment]]:
            return [line for part in parts for line in console.render_lines(part, options, pad=False)]

        known, more = self._head_texts(), self._explanations()
        column = max(map(len, (*known, *more)))
        width = max(1, options.max_width - COLUMN_GAP - column)
        head = lines(_pairs({name: _cut(text, console, width) for name, text in known.items()}, column))
        figures = lines(*self._memory_bars(), *self._sent_bars(), *self._step_bars())
        chart = timeline_view(self.plan)
        timeline = [] if chart is None else lines("", chart)
        explanations = lines(_pairs(more, column)) if more else []
        notes = lines(*self._notes())
        room = MAX_LINES - len(head) - len(figures) - len(lines(MORE))
        if len(notes) + len(explanations) + len(timeline) > room:
            timeline = []
        notes = _shortened(notes, room)
        explanations = _shortened(explanations, room - len(notes))
        for line in (*head, *explanations, *figures, *timeline, *notes):
            yield from line
            yield Segment.line()
        yield Text(MORE, style="dim")

    @cached_property
    def _summary(self) -> dict[str, str]:
        return plan_summary(self.plan)

    @cached_property
    def _fullest(self) -> tuple[int, int]:
        return fullest_rank(self.plan)

    def _head_texts(self) -> dict[str, str]:
        plan, summary = self.plan, self._summary
        return {
            "model": summary["model"],
            "mesh": mesh_text(plan.mesh),
            "strategies": ", ".join(map(strategy_text, plan.strategies)) or "none",
            "batch": batch_text(plan),
            "data": data_text(self.data),
            "precision": summary["precision"],
            "plan": summary["plan"],
        }

    def _explanations(self) -> dict[str, str]:
        return {name: text for name, text in self._summary.items() if name not in SHOWN_ABOVE}

    def _notes(self) -> Iterator[RenderableType]:
        memory = inf if self.device is None else self.device.memory
        too_large = self._fullest[1] > memory
        may_be = fullest_rank(self.plan, at_most=True)[1] > memory
        found = [
            *([(TOO_LARGE, "bold red")] if too_large else []),
            *([(MAY_BE_TOO_LARGE, "bold red")] if may_be and not too_large else []),
            *self._host_notes(),
            *((note, "yellow") for note in (*self.plan.model_spec.notes, *idle_warnings(self.plan))),
            *((note, "green") for note in self.notes),
            *((note, "") for note in (self.prediction.notes if self.prediction else ())),
        ]
        warnings = data_warnings(self.data)
        yield from [""] if found or warnings else []
        yield from (Text(f"warning: {warning}", style="yellow") for warning in warnings)
        yield from (Text(f"note: {note}", style=style) for note, style in found)

    @cached_property
    def _host(self) -> tuple[range, int]:
        """The ranks of the host on which most is kept in host memory, and the bytes of them together.

        If the number of devices on a host is not known, as many ranks as one host has slots for share it.
        """
        return fullest_host(self.plan, self._ranks_per_host)

    @property
    def _ranks_per_host(self) -> int:
        known = 0 if self.device is None else self.device.devices_per_host
        return known or MAX_ASSUMED_HOST

    def _host_notes(self) -> Iterator[tuple[str, str]]:
        """Yields whether a host has the memory that its ranks need together, or that this is not known."""
        ranks, needed = self._host
        if self.device is None or not needed:
            return
        who = f"{_host_text(ranks)} need{'' if len(ranks) > 1 else 's'}"
        if not self.device.host_memory:
            yield UNKNOWN_HOST.format(who, format_nbytes(needed)), ""
        elif needed > self.device.host_memory:
            has = format_nbytes(self.device.host_memory)
            yield TOO_LARGE_ON_HOST.format(who, format_nbytes(needed), has), "bold red"
        if not self.device.disk_space:
            return
        ranks, needed = fullest_host(self.plan, self._ranks_per_host, "disk")
        if needed > self.device.disk_space:
            who = f"{_host_text(ranks)} need{'' if len(ranks) > 1 else 's'}"
            has = format_nbytes(self.device.disk_space)
            yield TOO_LARGE_ON_DISK.format(who, format_nbytes(needed), has), "bold red"

    def _memory_bars(self) -> Iterator[RenderableType]:
        rank, total = self._fullest
        categories = peak_nbytes_by_category(self.plan, rank)
        where = f"of rank {rank}, the fullest" if self.plan.mesh.world_size > 1 else "of the device"
        head = Text(f"\nmemory {where}: {format_nbytes(total)} at the peak", style="bold")
        if self.device is not None:
            capacity = self.device.memory
            head.append(
                f", {100 * total / capacity:.3g} % of the {format_nbytes(capacity)} of {self.device.name}",
                style="bold red" if total > capacity else "",
            )
        yield head
        if at_most := at_most_text(self.plan):
            yield Text(f"  {at_most}", style="bold")
        yield Table(
            ["", Column("", format_nbytes), Column("", "{:.0f} %"), ""],
            [
                (f"  {name.replace('_', ' ')}", nbytes, 100 * share, _bar(share, MEMORY_BAR_COLUMNS))
                for name, nbytes in categories.items()
                if (share := nbytes / total)
            ],
        )
        for tier in OTHER_TIERS:
            name = "host memory" if tier == "host" else tier
            by_category = peak_nbytes_by_category(self.plan, rank, tier)
            if not by_category:
                continue
            texts = (f"{key.replace('_', ' ')} {format_nbytes(n)}" for key, n in by_category.items())
            head = f"{name} {where}: {format_nbytes(sum(by_category.values()))}"
            yield Text(f"{head} ({', '.join(texts)})", style="bold")
            if tier == "host" and len(self._host[0]) > 1:
                yield Text(f"  {_host_text(self._host[0])} {format_nbytes(self._host[1])}")

    def _sent_bars(self) -> Iterator[RenderableType]:
        rows = _sent_rows(self.plan)
        if not rows:
            return
        total, rank = sum(row[3] for row in rows), busiest_rank(self.plan)[0]
        where = "each rank" if all_send_alike(self.plan) else f"rank {rank}, which sends most"
        yield Text(
            f"\nsent per step by {where}: {format_nbytes(total)}{expected_text(self.plan)}", style="bold"
        )
        yield Table(
            ["", "", Column("", "{:,} x"), Column("", format_nbytes), ""],
            [
                (f"  {what}", how, number, nbytes, _bar(nbytes / total, SENT_BAR_COLUMNS))
                for what, how, number, nbytes in rows
            ],
        )

    def _step_bars(self) -> Iterator[RenderableType]:
        if self.prediction is None:
            yield Text("\n").append("step: ", style="bold").append(self.not_predicted)
            return
        yield Text(f"\n{prediction_head(self.plan, self.prediction)}", style="bold")
        slowest = max(self.prediction.roles.values(), key=lambda role: role.seconds - role.idle_s)
        seconds = {text: category_seconds(slowest, name) for name, text in CATEGORY_TEXTS.items()}
        yield Table(
            ["", Column("", format_seconds), Column("", "{:.0f} %"), ""],
            [
                (f"  {text}", value, 100 * share, _bar(share, STEP_BAR_COLUMNS))
                for text, value in seconds.items()
                if (share := value / slowest.seconds)
            ],
        )


def _host_text(ranks: range) -> str:
    return f"ranks {ranks[0]} to {ranks[-1]}, on one host," if len(ranks) > 1 else f"rank {ranks[0]}"


def mesh_text(mesh: Mesh) -> str:
    """Returns the mesh in words: the number of ranks, and what they are along each axis."""
    axes = [(axis, mesh.size(axis.name)) for axis in MESH_AXES if mesh.size(axis.name) > 1]
    if not axes:
        return "1 rank: one device"
    return f"{mesh.world_size} ranks: " + " x ".join(
        f"{size} {axis.rank_names[size > 1]} ({axis.name})" for axis, size in axes
    )


def strategy_text(strategy: Strategy) -> str:
    """Returns the name of `strategy`, and its fields that are not at their defaults."""
    shown = {
        item.name: value
        for item in fields(strategy)
        if (value := getattr(strategy, item.name)) != item.default or item.name in ALWAYS_SHOWN_FIELDS
    }
    texts = (
        f"{name} {' '.join(value) if isinstance(value, tuple) else value}" for name, value in shown.items()
    )
    return f"{strategy.name} ({', '.join(texts)})" if shown else strategy.name


def batch_text(plan: Plan) -> str:
    """Returns the global batch: over data-parallel ranks, micro-batches and their sequences."""
    job, has_tokens = plan.job, plan.job.data.source != "example"
    unit = "sequence" if has_tokens else "sample"
    length = f" of {job.data.sequence:,} tokens" if has_tokens else ""
    num_data = plan.num_data // plan.num_sites
    readers = "worker" if plan.sharding.num_servers else "data-parallel rank"
    parts = [
        *([_count(plan.num_sites, "site")] if plan.num_sites > 1 else []),
        *([_count(num_data, readers)] if num_data > 1 else []),
        _count(plan.num_microbatches, "micro-batch"),
        _count(plan.micro_batch, unit),
    ]
    return f"{_count(job.train.batch, unit)}{length} = {' x '.join(parts)}"


def sent_by_collective(plan: Plan) -> dict[tuple[str, str], tuple[int, float]]:
    """Returns messages and bytes per step of the busiest rank, by what is sent and by collective with axes.

    The most bytes come first.
    """
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    rank, actions = busiest_rank(plan)
    for action in actions:
        for transfer in action.sent_transfers:
            axes = ", ".join(in_mesh_order(transfer.axes))
            key = SENT_TEXTS.get(action.kind, action.kind), f"{transfer.collective} over {axes}"
            messages, total = totals.get(key, (0, 0.0))
            nbytes = min_max_sent_nbytes(transfer, plan.mesh, rank)[1]
            totals[key] = messages + len(transfer.messages), total + nbytes
    return dict(sorted(totals.items(), key=lambda each: -each[1][1]))


def _sent_rows(plan: Plan) -> list[tuple[str, str, int, float]]:
    rows = [(*key, *totals) for key, totals in sent_by_collective(plan).items()]
    if len(rows) <= MAX_SENT_ROWS:
        return rows
    others = rows[MAX_SENT_ROWS - 1 :]
    numbers = sum(row[2] for row in others), sum(row[3] for row in others)
    return [*rows[: MAX_SENT_ROWS - 1], ("others", _count(len(others), "kind"), *numbers)]


def _bar(share: float, columns: int) -> Text:
    eighths = round(8 * columns * share)
    last = "" if eighths % 8 == 0 else chr(FULL_BLOCK + 8 - eighths % 8)
    return Text(chr(FULL_BLOCK) * (eighths // 8) + last, style="cyan")


def _pairs(values: Mapping[str, object], column: int) -> Table:
    """A table of names, `column` wide, and values."""
    return Table.of_pairs({name.ljust(column): value for name, value in values.items()})


def _cut(text: str, console: Console, width: int) -> Text:
    """The first lines of `text`, as wide as `width`."""
    lines = Text(text).wrap(console, width)
    if len(lines) <= MAX_HEAD_LINES:
        return Text(text)
    shown = " ".join(line.plain.strip() for line in lines[:MAX_HEAD_LINES])
    while len(Text(f"{shown} ...").wrap(console, width)) > MAX_HEAD_LINES:
        shown = shown.rpartition(" ")[0]
    return Text(f"{shown} ...")


def _shortened(lines: Sequence[list[Segment]], room: int) -> list[list[Segment]]:
    if len(lines) <= room:
        return list(lines)
    return [*lines[: max(0, room - 1)], [Segment("... (--actions)")]][: max(0, room)]


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
