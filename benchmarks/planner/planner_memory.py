"""Peak memory of published runs, predicted against measured, by source and by what it was measured with.

    torch's counters     allocated or reserved: states, activations, logits, gaps; no context
    nvidia-smi, tables   those of a device: with the context of the driver and of communicators

Two pairs of nanotron's runs no model of memory tells within 8 %: T0869 and T0877 have the same layout, the
second with 12 bytes of optimizer per weight whole in the place of a quarter (13 GB more), and is printed with
1 GB less; T0878 and T0882 differ by 0.75 GB of moments, and are printed 3 GB apart. Three more (T0875, T0881,
T0885) are 14 to 16 % off, and nothing found says why.

Habits of code bases are in benchmarks/published_runs/memory.py: read in their sources and papers. Two were found
on runs: five numbers of Sailor on all of its runs, and the share that bigscience's allocator has reserved.
The latter is found once more on half of its runs, chosen as for step times, and scored on the others.

    python -m benchmarks.planner.planner_memory     writes the result
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from benchmarks.harness.result import Result
from benchmarks.published_runs.memory import by_torch, held, said
from benchmarks.published_runs.rows import Run, read_runs
from meshwright.planner.analytic.framework_memory import GIB, FrameworkMemory

NAME = "planner_memory"
CLAIM = (
    "peak memory of published runs: mean absolute error at most 3 % of every source, and at most "
    "8 % of every run whose peak "
    "torch measured"
)
MEAN, WORST = 0.03, 0.08
IN_SAMPLE = ("eth-easl",)  # sources whose numbers were found on the rows that score them
REFITTED = "bigscience"


@dataclass(frozen=True)
class Peak:
    """A run's peak in bytes: said, and measured."""

    run: Run
    said: float
    measured: float

    @property
    def off(self) -> float:
        """The error, as a share of what was measured."""
        return self.said / self.measured - 1


@dataclass(frozen=True)
class Group:
    """Peaks of one source by one metric: mean absolute error, bias, worst, and how many are off by more than
    8 %.
    """

    source: str
    metric: str
    torch: bool
    peaks: tuple[Peak, ...]

    @property
    def error(self) -> float:
        """Mean absolute."""
        return fmean(abs(peak.off) for peak in self.peaks)

    @property
    def bias(self) -> float:
        """Mean."""
        return fmean(peak.off for peak in self.peaks)

    @property
    def worst(self) -> float:
        """The largest error, with its sign."""
        return max((peak.off for peak in self.peaks), key=abs)

    @property
    def beyond(self) -> tuple[Peak, ...]:
        """Those off by more than 8 %, the worst first."""
        return tuple(
            sorted((peak for peak in self.peaks if abs(peak.off) > WORST), key=lambda peak: -abs(peak.off))
        )

    def as_dict(self) -> dict[str, object]:
        """Its figures, with the rows that are far off."""
        figures: dict[str, object] = {
            "source": self.source,
            "metric": self.metric,
            "torch": self.torch,
            "rows": len(self.peaks),
        }
        figures |= {"error": self.error, "bias": self.bias, "worst": self.worst}
        return figures | {
            "beyond": [[peak.run.key, peak.off, peak.said / GIB, peak.measured / GIB] for peak in self.beyond]
        }


def groups(runs: Sequence[Run]) -> list[Group]:
    """Of all runs that say a peak, by source and metric: those with most rows first."""
    found: dict[tuple[str, str, bool], list[Peak]] = {}
    for run in runs:
        if run.peak and run.status == "ok":
            found.setdefault((run.source, run.metric, by_torch(run)), []).append(
                Peak(run, said(run), run.peak)
            )
    made = [Group(*kind, tuple(peaks)) for kind, peaks in found.items()]
    return sorted(made, key=lambda group: (-len(group.peaks), group.source))


def refitted(runs: Sequence[Run]) -> list[dict[str, float]]:
    """What bigscience's allocator has reserved, found on one half of its runs and scored on the other, both
    ways.
    """
    mine = [run for run in runs if run.source == REFITTED and run.peak and run.status == "ok"]
    return (
        [_scored(mine, fitted) for fitted in (True, False)]
        if {run.fitted for run in mine} == {True, False}
        else []
    )


def _scored(runs: Sequence[Run], fitted: bool) -> dict[str, float]:
    tight = _with_gaps(1.0)
    ratio = median(
        (run.peak - found.driver_context) / found.allocated
        for run, found in ((run, held(run, tight)) for run in runs if run.fitted == fitted)
        if run.peak is not None
    )
    said_now = _with_gaps(ratio)
    off = [held(run, said_now).total / run.peak - 1 for run in runs if run.fitted != fitted and run.peak]
    return {"gaps": ratio, "scored": len(off), "error": fmean(map(abs, off)), "worst": max(off, key=abs)}


def _with_gaps(gaps: float) -> Callable[[FrameworkMemory], FrameworkMemory]:
    return lambda habits: replace(habits, fragmentation=gaps)


def show(found: Sequence[Group]) -> None:
    """Print them, and the rows that are far off."""
    console = Console()
    table = Table("peak memory of", "measured by", "rows", "error %", "bias %", "worst %", "over 8 %")
    for group in found:
        figures = [f"{100 * value:.1f}" for value in (group.error, group.bias, group.worst)]
        table.add_row(group.source, group.metric, str(len(group.peaks)), *figures, str(len(group.beyond)))
    if found:
        console.print(table)
    for peak in (peak for group in found for peak in group.beyond):
        run, layout = peak.run, peak.run.layout
        text = (
            f"{run.key} {100 * peak.off:+.1f} %: {run.shape.name} on "
            f"{run.machine.num_devices}, "
            f"tp {layout.tp} pp {layout.pp}, said "
        )
        console.print(
            f"{text}{peak.said / GIB:.1f}, measured {peak.measured / GIB:.1f} GiB ({run.source})",
            highlight=False,
        )


def result(found: Sequence[Group], again: Sequence[dict[str, float]]) -> Result:
    """Of the groups; the figure shown is the mean error of all runs whose peak torch measured."""
    torch = [peak for group in found if group.torch for peak in group.peaks]
    errors, off = [group.error for group in found], [abs(peak.off) for peak in torch]
    clean = [abs(peak.off) for peak in torch if not peak.run.source.startswith(IN_SAMPLE)]
    detail = {
        "groups": [group.as_dict() for group in found],
        "torch": {"rows": len(torch), "error": fmean(off), "beyond": sum(each > WORST for each in off)},
        "torch, but for sources whose numbers were found on these rows": {
            "rows": len(clean),
            "error": fmean(clean),
        },
        "in sample": list(IN_SAMPLE),
        "not held out": (
            "habits of nanotron and torchtitan, read in their code with all of these rows in view"
        ),
        "found on one half, scored on the other": list(again),
    }
    return Result.of(
        NAME,
        CLAIM,
        values=errors,
        median=fmean(off),
        spread=(min(off), max(off)),
        bar=MEAN,
        holds=max(errors) <= MEAN and max(off) <= WORST,
        repeats=1,
        detail=detail,
    )


def main() -> int:
    """Score the shipped rows, and write the result."""
    runs, _ = read_runs()
    found = groups(runs)
    show(found)
    print(result(found, refitted(runs)).write(NAME))
    return 0


if __name__ == "__main__":
    sys.exit(main())
