"""Sums up a run by its duration, ranks, tokens, losses and speed, and compares several runs in tables.

A duration is the time of all steps with the wait for their data, of evaluations, and of the saves between
steps. The time to start does not count, and a step that was repeated after a kill counts once. The speed is
the median of the steps without the first, which warms up.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

from meshwright.report.table import Column, Table
from meshwright.report.terminal.progress import format_duration
from meshwright.report.timeline.run_folder_reader import RunRecord, plan_differences


@dataclass(frozen=True)
class LossAtStep:
    """A loss, and the step that it was computed at."""

    loss: float
    step: int

    def __str__(self) -> str:
        return f"{self.loss:.4f} at step {self.step:,}"


@dataclass(frozen=True)
class RunSummary:
    """The numbers of one run. None: the run has not recorded it, or has no step or evaluation yet."""

    name: str
    num_ranks: int
    last_step: int | None
    duration_s: float | None
    num_tokens: int | None
    tokens_per_s: float | None
    final_loss: float | None
    best_loss: LossAtStep | None
    best_evaluation: LossAtStep | None

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yields the name and the text of everything that is known, for the head of a page."""
        if self.duration_s is not None:
            yield "duration", format_duration(self.duration_s)
        yield "ranks", f"{self.num_ranks:,}"
        if self.num_tokens is not None:
            yield "tokens", f"{self.num_tokens:,}"
        if self.tokens_per_s is not None:
            yield "tokens per second", f"{self.tokens_per_s:,.0f}"
        if self.best_evaluation is not None:
            yield "best evaluation", str(self.best_evaluation)


def summarize_run(record: RunRecord) -> RunSummary:
    """Returns the numbers of `record`."""
    speeds = [line["tokens_per_s"] for line in record.steps if line.get("tokens_per_s") is not None]
    tokens = [line["tokens"] for line in record.steps if "tokens" in line]
    last = record.steps[-1] if record.steps else {}
    final = last.get("loss")
    return RunSummary(
        record.name,
        record.world,
        last.get("step"),
        _duration_s(record),
        sum(tokens) if tokens else None,
        median(speeds[1:] or speeds) if speeds else None,
        final if isinstance(final, int | float) else None,
        _lowest_loss(record.steps),
        _lowest_loss(record.evaluations),
    )


def run_comparison_table(records: Sequence[RunRecord]) -> Table:
    """Returns a table with a row per run: ranks, duration, tokens, losses, speed."""
    rows = [
        (
            *(each.name, each.num_ranks, each.last_step, each.duration_s, each.num_tokens, each.tokens_per_s),
            *(each.final_loss, each.best_loss, each.best_evaluation),
        )
        for each in map(summarize_run, records)
    ]
    columns = [
        Column("run", style="bold"),
        Column("ranks", "{:,}"),
        Column("steps", "{:,}"),
        Column("duration", format_duration),
        Column("tokens", "{:,}"),
        Column("tokens/s", "{:,.0f}"),
        Column("final loss", "{:.4f}"),
        *(Column(name, "{!s}") for name in ("best loss", "best evaluation")),
    ]
    shown = [index for index in range(len(columns)) if any(row[index] is not None for row in rows)]
    return Table([columns[index] for index in shown], [[row[index] for index in shown] for row in rows])


def plan_difference_table(records: Sequence[RunRecord]) -> Table | None:
    """Returns the keys in which the plans of `records` differ, with the value of each; None if in nothing."""
    differences = plan_differences(records)
    heads = ["key", *(record.name for record in records)]
    return Table(heads, [(key, *values) for key, values in differences]) if differences else None


def _duration_s(record: RunRecord) -> float | None:
    lines = [*record.steps, *record.evaluations]
    seconds = [line.get("seconds", 0.0) + line.get("save_s", 0.0) for line in lines]
    return sum(seconds) if any(seconds) else None


def _lowest_loss(lines: Sequence[Mapping[str, Any]]) -> LossAtStep | None:
    found = [
        LossAtStep(line["loss"], line["step"])
        for line in lines
        if isinstance(line.get("loss"), int | float) and isfinite(line["loss"])
    ]
    return min(found, key=lambda each: each.loss, default=None)
