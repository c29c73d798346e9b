"""Scores of the planner on published runs: predicted against measured step times, by source.

    constants of a device    fitted on half of the groups of a source (a model on a number of devices), chosen
                             by a hash
    the other half           is predicted with them, and scores: mean absolute error, bias, and the rank
                             correlation of layouts

A source whose rows all fell into the half that scores is predicted with the rates of its devices alone
(planner/machine/rates.toml). Memory peaks, and runs that ran out of memory, are scored too
(benchmarks/planner/planner_memory.py, benchmarks/planner/planner_fit.py).

Rows that lack the input of a prediction are skipped and counted. FILE has the columns of
data/published_runs.csv; constants are fitted on its own half and on that of the shipped file.

    python -m benchmarks.published_runs.scores [FILE]
"""

import csv
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from benchmarks.planner import planner_fit, planner_memory
from benchmarks.published_runs.rows import RUNS, Run, Skipped, read_runs, sources
from meshwright.planner.analytic.calibrate import RATE_LIMITS, MeasuredStep, calibrate
from meshwright.planner.machine.machine_rates import MachineRates

MIN_LAYOUTS = 5  # fewer layouts have no meaningful rank correlation
STRENGTH = 0.3
RATE_BOUNDS = {
    **RATE_LIMITS,
    "link": (0.6, 0.95),
    "nic": (0.4, 0.95),
    "memory": (0.6, 0.95),
    "attention": (0.3, 0.8),
}  # the range that benchmarks of each alone reach


@dataclass(frozen=True)
class Score:
    """The score of a source: number of scored and fitted rows, mean absolute error, bias and worst error.

    `rank`: the rank correlation of the layouts of one model on one number of devices, the mean over those;
    None if there are too few.
    """

    source: str
    scored: int
    fitted: int
    error: float
    bias: float
    worst: float
    rank: float | None
    rows: tuple[tuple[str, float, float], ...]  # key, predicted, measured

    def as_dict(self) -> dict[str, object]:
        """Returns the figures, without the rows."""
        return {name: value for name, value in vars(self).items() if name != "rows"}


def to_measured_step(run: Run) -> MeasuredStep:
    """Returns `run` as a step that rates are fitted on."""
    if run.seconds is None:
        raise ValueError(f"{run.key} states no time; choose rows that do")
    return MeasuredStep(run.shape, run.layout, run.machine, run.seconds, run.source)


def fit_rates(runs: Iterable[Run], strength: float = STRENGTH) -> dict[tuple[str, str], MachineRates]:
    """Returns the rates of each source on each kind of device, from the rows that are fitted on."""
    kinds: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        kinds.setdefault((run.source, run.machine.device.name), []).append(run)
    return {
        kind: calibrate(
            members[0].machine.rates,
            [to_measured_step(run) for run in members if run.fitted],
            strength,
            RATE_BOUNDS,
        )
        for kind, members in kinds.items()
    }


def score_sources(runs: Sequence[Run], rates: Mapping[tuple[str, str], MachineRates]) -> list[Score]:
    """Returns the score of every source, those with most rows first; rows that rates were fitted on do not
    score.
    """
    return [_score(source, [run for run in runs if run.source == source], rates) for source in sources(runs)]


def _score(source: str, runs: Sequence[Run], rates: Mapping[tuple[str, str], MachineRates]) -> Score:
    scored = [run for run in runs if not run.fitted]
    steps = [to_measured_step(run) for run in scored]
    predicted = [
        step.predicted_s(rates[source, run.machine.device.name])
        for run, step in zip(scored, steps, strict=True)
    ]
    errors = np.array([found / step.seconds - 1 for found, step in zip(predicted, steps, strict=True)])
    rows = tuple(
        (run.key, found, step.seconds) for run, found, step in zip(scored, predicted, steps, strict=True)
    )
    error, bias, worst = (
        (float(np.mean(abs(errors))), float(np.mean(errors)), float(max(abs(errors))))
        if len(errors)
        else (0.0, 0.0, 0.0)
    )
    return Score(
        source, len(scored), len(runs) - len(scored), error, bias, worst, _rank(scored, predicted), rows
    )


def _rank(runs: Sequence[Run], predicted: Sequence[float]) -> float | None:
    found = []
    for group in {run.group for run in runs}:
        pairs = [
            (value, run.seconds) for run, value in zip(runs, predicted, strict=True) if run.group == group
        ]
        if len(pairs) >= MIN_LAYOUTS:
            found.append(float(spearmanr([a for a, _ in pairs], [b for _, b in pairs]).statistic))
    return float(np.mean(found)) if found else None


def read_timed_runs(file: Path) -> tuple[list[Run], list[Skipped]]:
    """Returns the rows of `file` that state a time, and those that are skipped."""
    runs, skipped = read_runs(file)
    without_time = [
        Skipped(run.key, run.source, "no time") for run in runs if run.seconds is None and run.status == "ok"
    ]
    return [run for run in runs if run.seconds is not None], [*skipped, *without_time]


def show(found: Sequence[Score], skipped: Sequence[Skipped]) -> None:
    """Prints the scores, and the number of skipped rows by reason."""
    table = Table("source", "scored", "fitted on", "error %", "bias %", "worst %", "rank")
    for score in found:
        figures = (
            [f"{100 * value:.1f}" for value in (score.error, score.bias, score.worst)]
            if score.scored
            else ["", "", ""]
        )
        table.add_row(
            score.source,
            str(score.scored),
            str(score.fitted),
            *figures,
            "" if score.rank is None else f"{score.rank:.3f}",
        )
    console = Console()
    console.print(table)
    for why, count in Counter(each.why for each in skipped).most_common():
        console.print(f"{count:5d} skipped: {why}")


def main(arguments: Sequence[str]) -> int:
    """Scores the rows of a file, and prints the scores."""
    file = Path(arguments[0]) if arguments else RUNS
    if not file.is_file():
        print(
            f"there is no file {file}; needed is a table with the columns of {RUNS}; write its path",
            file=sys.stderr,
        )
        return 2
    try:
        runs, skipped = read_timed_runs(file)
    except (UnicodeDecodeError, csv.Error) as error:
        print(
            f"{file} is no table: {error}; needed are the columns of {RUNS} as UTF-8 text; save it as CSV",
            file=sys.stderr,
        )
        return 2
    if not runs and not skipped:
        print(
            f"{file} has no rows; needed are the columns of {RUNS}, and a row for each run", file=sys.stderr
        )
        return 2
    shipped = [] if file.resolve() == RUNS.resolve() else read_timed_runs(RUNS)[0]
    show(score_sources(runs, fit_rates([*runs, *shipped])), skipped)
    everything, _ = read_runs(file)
    planner_memory.show(planner_memory.groups(everything))
    planner_fit.show(planner_fit.predict_fit(planner_fit.labelled_runs(everything)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
