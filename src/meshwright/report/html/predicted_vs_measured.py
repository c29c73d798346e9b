"""What was predicted of a run beside what was measured: seconds of a step and where they went, bytes held and
sent.

Of the steps the median counts, without the first, which warms up. What messages within blocks take, no trace
tells apart from what blocks compute, nor a wait for a message from one for a rank that is late: such parts
are held against each other as sums. Memory of a process is not only tensors, so on a CPU weights and moments
alone are compared; on a GPU the peak of what was allocated too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from meshwright.plan.job.errors import format_nbytes
from meshwright.report.terminal.prediction import format_seconds
from meshwright.report.timeline.run_record import RunRecord

TRACE_CATEGORIES = {  # what a trace calls what was predicted
    "blocks, with messages within": (("compute_s", "inner_comm_s"), ("forward", "backward", "other")),
    "messages and waiting": (("exposed_comm_s", "idle_s"), ("exposed communication",)),
    "norm and optimizer": (("optimizer_s",), ("optimizer",)),
}
STATE_CATEGORIES = ("parameters", "master", "optimizer_states")


@dataclass(frozen=True)
class PredictionComparison:
    """One figure, predicted and measured; `unit` is "s" or "B"."""

    quantity: str
    predicted: float
    measured: float
    unit: str

    @property
    def relative_error(self) -> float | None:
        """By what share of the measured figure the prediction is off; None where that is 0."""
        return self.predicted / self.measured - 1 if self.measured else None

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """All of it as it is shown."""
        show = format_seconds if self.unit == "s" else format_nbytes
        off = "" if self.relative_error is None else f"{100 * self.relative_error:+.1f} %"
        return self.quantity, show(self.predicted), show(self.measured), off


def compare_run(record: RunRecord) -> list[PredictionComparison]:
    """What can be held against each other in `record`; empty where nothing was predicted, or nothing
    measured.
    """
    said = record.run_info.get("prediction")
    return list(_comparisons(record, said)) if isinstance(said, Mapping) else []


def comparison_table(comparisons: Sequence[PredictionComparison], name: str = "") -> Table:
    """The figures as a table for the terminal."""
    columns = [Column(head, justify="right") for head in ("predicted", "measured", "off by")]
    table = Table(Column(name or "per rank and step", min_width=22), *columns, box=None, header_style="bold")
    table.padding = (0, 2, 0, 0)
    for each in comparisons:
        what, *figures = each.cells
        table.add_row(Text(what), *figures)
    return table


def _comparisons(record: RunRecord, said: Mapping[str, Any]) -> Iterator[PredictionComparison]:
    measured = [
        line["seconds"] - line.get("data_s", 0.0) for line in record.steps if not line.get("skipped")
    ][1:]
    if measured and "step_s" in said:
        yield PredictionComparison("a step", said["step_s"], median(measured), "s")
    if "roles" in said:
        yield from _time_comparisons(record, said["roles"])
    yield from _nbytes_comparisons(record, said)


def _time_comparisons(
    record: RunRecord, roles: Mapping[str, Mapping[str, float]]
) -> Iterator[PredictionComparison]:
    """Where a step went, as means over ranks and traced steps."""
    steps = [
        split
        for trace in record.traces.values()
        for split in trace.get("otherData", {}).get("seconds", {}).values()
    ]
    for what, (planned, traced) in TRACE_CATEGORIES.items() if steps else ():
        mine = fmean(sum(role.get(name, 0.0) for name in planned) for role in roles.values())
        theirs = fmean(sum(split.get(name, 0.0) for name in traced) for split in steps)
        if mine or theirs:
            yield PredictionComparison(what, mine, theirs, "s")


def _nbytes_comparisons(record: RunRecord, said: Mapping[str, Any]) -> Iterator[PredictionComparison]:
    held, sent = said.get("held", {}), said.get("sent", {})
    each = max(1, record.world // max(1, len(held)))
    ranks = {
        rank: found
        for rank, found in record.rank_accounts.items()
        if rank % each == 0 and rank // each < len(held)
    }
    memory = {role: ranks[at * each].get("memory", {}) for at, role in enumerate(held) if at * each in ranks}
    if memory:
        fullest = max(memory, key=lambda role: sum(held[role].values()))
        name = f" ({fullest})" if len(held) > 1 else ""
        for kind in STATE_CATEGORIES:
            if held[fullest].get(kind):
                yield PredictionComparison(
                    f"{kind}{name}", held[fullest][kind], memory[fullest].get(kind, 0), "B"
                )
        if record.run_info.get("machine", {}).get("device", "cpu") != "cpu":
            yield PredictionComparison(
                f"at the fullest{name}", sum(held[fullest].values()), memory[fullest].get("peak", 0), "B"
            )
    names = (
        {action.name for _, actions in record.program.roles for action in actions}
        if record.program is not None
        else set()
    )
    totals = [
        sum(nbytes for name, nbytes in found.get("sent", {}).items() if name in names) / found["steps"]
        for found in record.rank_accounts.values()
        if found.get("steps")
    ]
    if totals and sent and (max(sent.values()) or max(totals)):
        yield PredictionComparison("sent", max(sent.values()), max(totals), "B")
