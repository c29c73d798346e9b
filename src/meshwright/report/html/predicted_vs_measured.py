"""Compares the prediction of a run with its measurements: seconds of a step by category, bytes held and sent.

The median of the steps counts, without the first, which warms up. A trace does not separate collectives
inside blocks from computation, nor a transfer from a wait for a late rank: such categories are compared as
sums. The memory of a process is not only tensors, so on a CPU only parameters and optimizer states are
compared; on a GPU the peak of allocated memory too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from meshwright.plan.job.errors import format_nbytes
from meshwright.report.table import Column, Table
from meshwright.report.terminal.prediction import format_seconds
from meshwright.report.timeline.run_folder_reader import RunRecord

TRACE_CATEGORIES = {  # the categories of a prediction, and those of a trace
    "blocks, with communication inside": (("compute_s", "inner_comm_s"), ("forward", "backward", "other")),
    "exposed communication and waiting": (("exposed_comm_s", "idle_s"), ("exposed communication",)),
    "gradient norm and optimizer": (("optimizer_s",), ("optimizer",)),
}
STATE_CATEGORIES = ("parameters", "master", "optimizer_states", "strategy_states")


@dataclass(frozen=True)
class PredictionComparison:
    """One quantity, predicted and measured; `unit` is "s" or "B"."""

    quantity: str
    predicted: float
    measured: float
    unit: str

    @property
    def relative_error(self) -> float | None:
        """The error of the prediction relative to the measurement; None if that is 0."""
        return self.predicted / self.measured - 1 if self.measured else None

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The texts of its table row."""
        show = format_seconds if self.unit == "s" else format_nbytes
        error = "" if self.relative_error is None else f"{100 * self.relative_error:+.1f} %"
        return self.quantity, show(self.predicted), show(self.measured), error


def compare_run(record: RunRecord) -> list[PredictionComparison]:
    """Returns the comparable quantities of `record`; empty if nothing was predicted, or nothing measured."""
    prediction = record.run_info.get("prediction")
    return list(_comparisons(record, prediction)) if isinstance(prediction, Mapping) else []


def comparison_table(comparisons: Sequence[PredictionComparison], name: str = "") -> Table:
    """Returns the comparisons as a table; `name` is that of the run."""
    numbers = (Column(head, "{}") for head in ("predicted", "measured", "error"))
    return Table([name, *numbers], [each.cells for each in comparisons])


def _comparisons(record: RunRecord, prediction: Mapping[str, Any]) -> Iterator[PredictionComparison]:
    measured = [
        line["seconds"] - line.get("data_s", 0.0) for line in record.steps if not line.get("skipped")
    ][1:]
    if measured and "step_s" in prediction:
        yield PredictionComparison("a step", prediction["step_s"], median(measured), "s")
    if "roles" in prediction:
        yield from _time_comparisons(record, prediction["roles"])
    yield from _nbytes_comparisons(record, prediction)


def _time_comparisons(
    record: RunRecord, roles: Mapping[str, Mapping[str, float]]
) -> Iterator[PredictionComparison]:
    steps = [
        split
        for trace in record.traces.values()
        for split in trace.get("otherData", {}).get("seconds", {}).values()
    ]
    for quantity, (planned, traced) in TRACE_CATEGORIES.items() if steps else ():
        predicted_s = fmean(sum(role.get(name, 0.0) for name in planned) for role in roles.values())
        measured_s = fmean(sum(split.get(name, 0.0) for name in traced) for split in steps)
        if predicted_s or measured_s:
            yield PredictionComparison(quantity, predicted_s, measured_s, "s")


def _nbytes_comparisons(record: RunRecord, prediction: Mapping[str, Any]) -> Iterator[PredictionComparison]:
    peak_nbytes, sent = prediction.get("peak_memory", {}), prediction.get("sent", {})
    roles = () if record.program is None else record.program.roles
    memory = {
        role.name: record.rank_accounts[role.ranks[0]].get("memory", {})
        for role in roles
        if role.name in peak_nbytes and role.ranks[0] in record.rank_accounts
    }
    if memory:
        largest_role = max(memory, key=lambda role: sum(peak_nbytes[role].values()))
        name = f" ({largest_role})" if len(peak_nbytes) > 1 else ""
        for kind in STATE_CATEGORIES:
            if peak_nbytes[largest_role].get(kind):
                yield PredictionComparison(
                    f"{kind}{name}", peak_nbytes[largest_role][kind], memory[largest_role].get(kind, 0), "B"
                )
        if record.run_info.get("machine", {}).get("device", "cpu") != "cpu":
            yield PredictionComparison(
                f"peak{name}",
                sum(peak_nbytes[largest_role].values()),
                memory[largest_role].get("peak", 0),
                "B",
            )
    names = {action.name for role in roles for action in role.actions}
    totals = [
        sum(nbytes for name, nbytes in found.get("sent", {}).items() if name in names) / found["steps"]
        for found in record.rank_accounts.values()
        if found.get("steps")
    ]
    if totals and sent and (max(sent.values()) or max(totals)):
        yield PredictionComparison("sent", max(sent.values()), max(totals), "B")
