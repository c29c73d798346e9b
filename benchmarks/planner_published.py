"""The planner against published runs: how far predicted steps are from measured ones, where nothing was fitted.

See benchmarks/published_runs.py for how rows are read, on which constants are fitted and which score. Sources that the claim
names have to hold alone, each with the mean over its rows; the others are shown.

    python -m benchmarks.planner_published          writes the result
    python -m benchmarks.planner_published --fit    fits the rates of all kinds of device, and writes planner/rates.toml
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import tomli_w

import meshwright.planner
from benchmarks.published import RUNS
from benchmarks.published_runs import Score, learnt, measured, scores, show, timed
from benchmarks.result import Result
from meshwright.planner.calibrate import calibrated
from meshwright.planner.rates import Rates

NAME = "planner_published"
CLAIM = (
    "step times of published runs that nothing was fitted on: mean absolute error at most 8 % on the tables of Aleph-Alpha, "
    "bigscience, Megatron, torchtitan and NVIDIA, and a rank correlation of at least 0.95 of Aleph-Alpha's layouts"
)
BAR, RANK = 0.08, 0.95
NAMED = ("Aleph-Alpha", "bigscience", "Megatron", "Narayanan", "Korthikanti", "torchtitan", "NVIDIA")
RATES = Path(meshwright.planner.__file__).parent / "rates.toml"
DIGITS = 4
HEAD = "# Shares of peaks that devices reach (planner/rates.py), fitted by: python -m benchmarks.planner_published --fit\n"


def fit() -> dict[str, dict[str, float]]:
    """The rates of all, and of each kind of device, on the rows that may be fitted on."""
    steps = [measured(run) for run in timed(RUNS)[0] if run.fitted]
    everywhere = calibrated(Rates(), steps, 0.1)
    kinds = sorted({step.machine.device.name for step in steps})
    tables = {"all": everywhere}
    for kind in kinds:
        tables[kind] = calibrated(everywhere, [step for step in steps if step.machine.device.name == kind])
    return {kind: {name: float(f"{value:.{DIGITS}g}") for name, value in asdict(rates).items()} for kind, rates in tables.items()}


def result(found: Sequence[Score], skipped: int) -> Result:
    """Of the scores; the figure shown is the worst named source's."""
    named = [score for score in found if score.scored and score.source.startswith(NAMED)]
    errors = [score.error for score in named]
    ranks = [score.rank for score in named if score.source.startswith("Aleph-Alpha") and score.rank is not None]
    return Result.of(
        NAME,
        CLAIM,
        values=errors,
        median=max(errors),
        spread=(min(errors), max(errors)),
        bar=BAR,
        holds=max(errors) <= BAR and min(ranks) >= RANK,
        repeats=1,
        detail={"sources": [score.as_dict() for score in found], "skipped": skipped},
    )


def main(arguments: Sequence[str]) -> int:
    """Score, or fit."""
    if "--fit" in arguments:
        RATES.write_text(HEAD + tomli_w.dumps(fit()), encoding="utf-8")
        return 0
    runs, skipped = timed(RUNS)
    found = scores(runs, learnt(runs))
    show(found, skipped)
    print(result(found, len(skipped)).write(NAME))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
