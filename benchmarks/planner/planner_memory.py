"""Peak memory of published runs, predicted against measured, by source and by the tool of the measurement.

    torch's counters     allocated or reserved bytes: states, activations, logits, fragmentation; no context
    nvidia-smi, tables   bytes of a device: with the context of the driver and of communicators

Two pairs of nanotron's runs cannot be predicted within 8 % by any model of memory: T0869 and T0877 have the
same layout, the second with 12 bytes of optimizer states per weight in full instead of a quarter (13 GB
more), and its printed peak is 1 GB lower; T0878 and T0882 differ by 0.75 GB of optimizer states, and their
printed peaks by 3 GB. Three more (T0875, T0881, T0885) are 14 to 16 % off, for an unknown reason.

The framework memory of code bases is in benchmarks/published_runs/memory.py: read in their sources and
papers. Two parts were fitted on runs: five numbers of Sailor on all of its runs, and the share that
bigscience's allocator reserves. The latter is fitted once more on half of its runs, chosen as for step times,
and scored on the others.

    python -m benchmarks.planner.planner_memory     writes the result
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from benchmarks.harness.result import Result
from benchmarks.published_runs.memory import estimate_run, is_torch_metric, predicted_nbytes
from benchmarks.published_runs.rows import Run, read_runs
from meshwright.planner.analytic.memory_coefficients import GIB, FrameworkMemory

NAME = "planner_memory"
CLAIM = (
    "peak memory of published runs: mean absolute error at most 3 % of every source, and at most "
    "8 % of every run whose peak "
    "torch measured"
)
MEAN, WORST = 0.03, 0.08
IN_SAMPLE = ("eth-easl",)  # sources whose numbers were fitted on the rows that score them
REFITTED = "bigscience"


@dataclass(frozen=True)
class Peak:
    """A run's peak in bytes, predicted and measured."""

    run: Run
    predicted_nbytes: float
    measured_nbytes: float

    @property
    def relative_error(self) -> float:
        """The error, as a share of the measured peak."""
        return self.predicted_nbytes / self.measured_nbytes - 1


@dataclass(frozen=True)
class Group:
    """Peaks of one source by one metric: mean absolute error, bias, worst error, and those off by more than 8
    %.
    """

    source: str
    metric: str
    torch: bool
    peaks: tuple[Peak, ...]

    @property
    def error(self) -> float:
        """The mean absolute error."""
        return fmean(abs(peak.relative_error) for peak in self.peaks)

    @property
    def bias(self) -> float:
        """The mean error."""
        return fmean(peak.relative_error for peak in self.peaks)

    @property
    def worst(self) -> float:
        """The largest error, with its sign."""
        return max((peak.relative_error for peak in self.peaks), key=abs)

    @property
    def over_limit(self) -> tuple[Peak, ...]:
        """Those off by more than 8 %, the worst first."""
        return tuple(
            sorted(
                (peak for peak in self.peaks if abs(peak.relative_error) > WORST),
                key=lambda peak: -abs(peak.relative_error),
            )
        )

    def as_dict(self) -> dict[str, object]:
        """Returns the figures, with the rows that are off by more than 8 %."""
        figures: dict[str, object] = {
            "source": self.source,
            "metric": self.metric,
            "torch": self.torch,
            "rows": len(self.peaks),
        }
        figures |= {"error": self.error, "bias": self.bias, "worst": self.worst}
        return figures | {
            "over_limit": [
                [peak.run.key, peak.relative_error, peak.predicted_nbytes / GIB, peak.measured_nbytes / GIB]
                for peak in self.over_limit
            ]
        }


def groups(runs: Sequence[Run]) -> list[Group]:
    """Returns the groups of all runs with a peak, by source and metric, those with most rows first."""
    found: dict[tuple[str, str, bool], list[Peak]] = {}
    for run in runs:
        if run.peak and run.status == "ok":
            found.setdefault((run.source, run.metric, is_torch_metric(run)), []).append(
                Peak(run, predicted_nbytes(run), run.peak)
            )
    made = [Group(*kind, tuple(peaks)) for kind, peaks in found.items()]
    return sorted(made, key=lambda group: (-len(group.peaks), group.source))


def refit_fragmentation(runs: Sequence[Run]) -> list[dict[str, float]]:
    """Returns the fragmentation of bigscience's allocator, fitted on one half of its runs and scored on the
    other, both ways.
    """
    own = [run for run in runs if run.source == REFITTED and run.peak and run.status == "ok"]
    return (
        [_scored(own, fitted) for fitted in (True, False)]
        if {run.fitted for run in own} == {True, False}
        else []
    )


def _scored(runs: Sequence[Run], fitted: bool) -> dict[str, float]:
    no_fragmentation = _with_fragmentation(1.0)
    ratio = median(
        (run.peak - found.driver_context) / found.allocated
        for run, found in ((run, estimate_run(run, no_fragmentation)) for run in runs if run.fitted == fitted)
        if run.peak is not None
    )
    refitted = _with_fragmentation(ratio)
    errors = [
        estimate_run(run, refitted).total / run.peak - 1 for run in runs if run.fitted != fitted and run.peak
    ]
    return {
        "fragmentation": ratio,
        "scored": len(errors),
        "error": fmean(map(abs, errors)),
        "worst": max(errors, key=abs),
    }


def _with_fragmentation(fragmentation: float) -> Callable[[FrameworkMemory], FrameworkMemory]:
    return lambda memory: replace(memory, fragmentation=fragmentation)


def show(found: Sequence[Group]) -> None:
    """Prints the groups, and the rows that are off by more than 8 %."""
    console = Console()
    table = Table("peak memory of", "measured by", "rows", "error %", "bias %", "worst %", "over 8 %")
    for group in found:
        figures = [f"{100 * value:.1f}" for value in (group.error, group.bias, group.worst)]
        table.add_row(group.source, group.metric, str(len(group.peaks)), *figures, str(len(group.over_limit)))
    if found:
        console.print(table)
    for peak in (peak for group in found for peak in group.over_limit):
        run, layout = peak.run, peak.run.layout
        text = (
            f"{run.key} {100 * peak.relative_error:+.1f} %: {run.shape.name} on "
            f"{run.machine.num_devices}, "
            f"tp {layout.tp} pp {layout.pp}, predicted "
        )
        console.print(
            f"{text}{peak.predicted_nbytes / GIB:.1f}, measured {peak.measured_nbytes / GIB:.1f} GiB "
            f"({run.source})",
            highlight=False,
        )


def result(found: Sequence[Group], refit_scores: Sequence[dict[str, float]]) -> Result:
    """Returns the result of the groups; its figure is the mean error of all runs whose peak
    torch measured.
    """
    torch = [peak for group in found if group.torch for peak in group.peaks]
    errors, torch_errors = [group.error for group in found], [abs(peak.relative_error) for peak in torch]
    clean = [abs(peak.relative_error) for peak in torch if not peak.run.source.startswith(IN_SAMPLE)]
    detail = {
        "groups": [group.as_dict() for group in found],
        "torch": {
            "rows": len(torch),
            "error": fmean(torch_errors),
            "over_limit": sum(each > WORST for each in torch_errors),
        },
        "torch, without sources whose numbers were fitted on these rows": {
            "rows": len(clean),
            "error": fmean(clean),
        },
        "in sample": list(IN_SAMPLE),
        "not held out": (
            "framework memory of nanotron and torchtitan, read in their code with all of these rows in view"
        ),
        "fitted on one half, scored on the other": list(refit_scores),
    }
    return Result.of(
        NAME,
        CLAIM,
        values=errors,
        median=fmean(torch_errors),
        spread=(min(torch_errors), max(torch_errors)),
        bar=MEAN,
        holds=max(errors) <= MEAN and max(torch_errors) <= WORST,
        repeats=1,
        detail=detail,
    )


def main() -> int:
    """Scores the shipped rows, and writes the result."""
    runs, _ = read_runs()
    found = groups(runs)
    show(found)
    print(result(found, refit_fragmentation(runs)).write(NAME))
    return 0


if __name__ == "__main__":
    sys.exit(main())
