"""Step times of published runs, predicted by the planner against measured, on rows that nothing was fitted
on.

benchmarks/published_runs/scores.py says how rows are read, which constants are fitted, and which rows score.
Every source that the claim names must hold alone, with the mean over its rows; the others are shown.

    data/unseen_runs.csv    165 rows that were collected when all of this was finished, from code bases that
                            nothing here knows, or from pages that the table does not have: scored like a
                            reader's own file, and with the rates of devices alone. No bar. With these rows in
                            view only the reading of hosts, networks and sharding was changed

    python -m benchmarks.planner.planner_published          writes the result
    python -m benchmarks.planner.planner_published --fit    fits the rates of all kinds of device, and writes
                                                            planner/machine/rates.toml
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import tomli_w

import meshwright.planner
from benchmarks.harness.result import Result
from benchmarks.published_runs.rows import RUNS, Run
from benchmarks.published_runs.scores import (
    MIN_LAYOUTS,
    RATE_BOUNDS,
    Score,
    fit_rates,
    read_timed_runs,
    score_sources,
    show,
    to_measured_step,
)
from meshwright.plan.hardware.device_specs import known_devices
from meshwright.planner.analytic.calibrate import MeasuredStep, calibrate
from meshwright.planner.machine.machine_rates import MachineRates

NAME = "planner_published"
CLAIM = (
    "step times of published runs that nothing was fitted on: mean absolute error at most 8 % on "
    "the tables of Aleph-Alpha, "
    "bigscience, Megatron, torchtitan and NVIDIA, and a rank correlation of at least 0.95 of "
    "Aleph-Alpha's layouts"
)
BAR, RANK = 0.08, 0.95
NAMED_SOURCES = ("Aleph-Alpha", "bigscience", "Megatron", "Narayanan", "Korthikanti", "torchtitan", "NVIDIA")
NOT_HELD_OUT = (
    "what code bases do that rows do not say (published_runs/layouts.py): looked up, or found with all rows "
    "in view"
)
UNSEEN = RUNS.with_name("unseen_runs.csv")
RATES = Path(meshwright.planner.__file__).parent / "machine" / "rates.toml"
DIGITS = 4
STRENGTH_ALL, STRENGTH_EACH = (
    0.6,
    0.3,
)  # strength of the priors: of all devices to PRIOR, of one kind of device to the rates of all
# Share of the peak that large products reach, by kind of device: github.com/stas00/ml-engineering 744d01e,
# measured maxima. H100 96GB was not measured there: that of an H100, scaled by the square root of its power,
# 500 of 700 W, an estimate.
REACHED_SHARE = {
    "A100": {"bfloat16": 271.2 / 312},
    "A100 40GB": {"bfloat16": 271.2 / 312},
    "A800": {"bfloat16": 271.2 / 312},
    "H100": {"bfloat16": 794.5 / 989, "float8": 1402.6 / 1979},
    "H800": {"bfloat16": 794.5 / 989, "float8": 1402.6 / 1979},
    "H100 96GB": {"bfloat16": 671 / 989, "float8": 1185 / 1979},
    "H200": {"bfloat16": 794.5 / 989, "float8": 1453.4 / 1979},
    "GH200": {"bfloat16": 828.6 / 989},
    "B200": {"bfloat16": 1745 / 2250, "float8": 3432.5 / 4500},
    "GB200": {"bfloat16": 1822 / 2500, "float8": 3615.6 / 5000},
    "B300": {"bfloat16": 1769 / 2250, "float8": 3353.3 / 4500},
    "MI300X": {"bfloat16": 668.4 / 1307},
    "MI325X": {"bfloat16": 784.9 / 1300},
}
USUAL_SHARE = {
    "bfloat16": 0.8,
    "float16": 0.8,
    "float8": 0.73,
    "float4": 0.65,
}  # of a device that was not measured
# prior: shares of the reached peak that a step of a whole model has, before any run is looked at
PRIOR = replace(
    MachineRates(),
    matmul=0.93,
    matmul_float8=0.9,
    matmul_float8_blocks=0.85,
    matmul_float4=0.8,
    attention=0.6,
)
HEAD = (
    "# Shares of their peaks that devices reach (fields of MachineRates), fitted by: python -m "
    "benchmarks.planner.planner_published --fit\n"
)


def fit() -> dict[str, dict[str, float]]:
    """Returns the rates of all devices, and those of each kind of device that differ, fitted on the fitted
    rows.

    Rates are shares of the peak that large products reach on a device, not of the peak in its data sheet. The
    rates of a kind with few runs, or with runs of one code base alone, would include the faults of that code:
    it is fitted together with all kinds of its die, and if those have too few runs as well, not at all.
    """
    steps = [_with_reached_peaks(to_measured_step(run)) for run in read_timed_runs(RUNS)[0] if run.fitted]
    everywhere = calibrate(PRIOR, steps, STRENGTH_ALL, RATE_BOUNDS)
    tables = {"all": _rounded(_shares_of_peak(everywhere, {}))}
    for device in known_devices():
        die = {
            each.name
            for each in known_devices()
            if (each.num_compute_units, each.peak("float16"))
            == (device.num_compute_units, device.peak("float16"))
        }
        pools = [
            [step for step in steps if step.machine.device.name in names] for names in ({device.name}, die)
        ]
        pool_of_device = next(
            (pool for pool in pools if len(pool) >= MIN_LAYOUTS and len({step.source for step in pool}) > 1),
            [],
        )
        found = _rounded(
            _shares_of_peak(
                calibrate(everywhere, pool_of_device, STRENGTH_EACH, RATE_BOUNDS),
                REACHED_SHARE.get(device.name, {}),
            )
        )
        tables[device.name] = {name: value for name, value in found.items() if value != tables["all"][name]}
    return tables


def _with_reached_peaks(step: MeasuredStep) -> MeasuredStep:
    """Returns `step` on a machine whose peaks are those that large products reach."""
    device = step.machine.device
    shares = {**USUAL_SHARE, **REACHED_SHARE.get(device.name, {})}
    shares["float16"] = shares["bfloat16"]
    flops = {dtype: peak * shares.get(dtype, 1.0) for dtype, peak in device.flops.items()}
    return replace(step, machine=replace(step.machine, device=replace(device, flops=flops)))


def _shares_of_peak(rates: MachineRates, reached: Mapping[str, float]) -> MachineRates:
    """Returns `rates`, which are shares of the reached peaks, as shares of the peaks in data sheets."""
    shares = {**USUAL_SHARE, **reached}
    return replace(
        rates,
        matmul=rates.matmul * shares["bfloat16"],
        matmul_float8=rates.matmul_float8 * shares["float8"],
        matmul_float8_blocks=rates.matmul_float8_blocks * shares["float8"],
        matmul_float4=rates.matmul_float4 * shares["float4"],
        attention=rates.attention * shares["bfloat16"],
    )


def _rounded(rates: MachineRates) -> dict[str, float]:
    return {name: float(f"{value:.{DIGITS}g}") for name, value in asdict(rates).items()}


def score_unseen(shipped: Sequence[Run]) -> dict[str, dict[str, object]]:
    """Returns the scores of unseen rows by source; `alone`: the error of all of them with the rates of
    devices alone.
    """
    unseen, _ = read_timed_runs(UNSEEN)
    found = score_sources(unseen, fit_rates([*unseen, *shipped]))
    show(found, ())
    steps = {run.key: to_measured_step(run) for run in unseen}
    errors = {
        key: abs(each.predicted_s(each.machine.rates) / each.seconds - 1) for key, each in steps.items()
    }
    by_device_rates = {
        score.source: fmean(errors[run.key] for run in unseen if run.source == score.source)
        for score in found
    }
    return {score.source: {**score.as_dict(), "alone": by_device_rates[score.source]} for score in found}


def result(found: Sequence[Score], skipped: int, unseen: Mapping[str, dict[str, object]]) -> Result:
    """Returns the result of the scores; its figure is the error of the worst named source."""
    named = [score for score in found if score.scored and score.source.startswith(NAMED_SOURCES)]
    errors = [score.error for score in named]
    ranks = [
        score.rank for score in named if score.source.startswith("Aleph-Alpha") and score.rank is not None
    ]
    return Result.of(
        NAME,
        CLAIM,
        values=errors,
        median=max(errors),
        spread=(min(errors), max(errors)),
        bar=BAR,
        holds=max(errors) <= BAR and min(ranks) >= RANK,
        repeats=1,
        detail={
            "sources": [score.as_dict() for score in found],
            "skipped": skipped,
            "not held out": NOT_HELD_OUT,
            "unseen": unseen,
        },
    )


def main(arguments: Sequence[str]) -> int:
    """Scores, or fits the rates."""
    if "--fit" in arguments:
        RATES.write_text(HEAD + tomli_w.dumps(fit()), encoding="utf-8")
        return 0
    runs, skipped = read_timed_runs(RUNS)
    found = score_sources(runs, fit_rates(runs))
    show(found, skipped)
    print(result(found, len(skipped), score_unseen(runs)).write(NAME))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
