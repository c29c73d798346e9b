"""The planner against published runs: how far predicted steps are from measured ones, where nothing was
fitted.

See benchmarks/published_runs/scores.py for how rows are read, on which constants are fitted and which score. Sources
that the claim names have to hold alone, each with the mean over its rows; the others are shown.

data/unseen_runs.csv    165 rows looked up when all of this stood, from code bases that nothing here knows, or
from pages that the
                        table has not: scored as a reader's own file would be, and by the rates of devices
                            alone. No bar; what was
                        changed with them in view is how a row's words for its hosts, network and sharding
                            are read

    python -m benchmarks.planner.planner_published          writes the result
    python -m benchmarks.planner.planner_published --fit    fits the rates of all kinds of device, and writes
                                                    planner/rates.toml
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
from benchmarks.published_runs.scores import FEW, SOUND, Score, learnt, measured, scores, show, timed
from meshwright.plan.hardware.device_specs import known_devices
from meshwright.planner.analytic.calibrate import MeasuredStep, calibrate
from meshwright.planner.machine.efficiency import MachineRates

NAME = "planner_published"
CLAIM = (
    "step times of published runs that nothing was fitted on: mean absolute error at most 8 % on "
    "the tables of Aleph-Alpha, "
    "bigscience, Megatron, torchtitan and NVIDIA, and a rank correlation of at least 0.95 of "
    "Aleph-Alpha's layouts"
)
BAR, RANK = 0.08, 0.95
NAMED = ("Aleph-Alpha", "bigscience", "Megatron", "Narayanan", "Korthikanti", "torchtitan", "NVIDIA")
OPEN = (
    "what code bases do that rows do not say (published_runs/layouts.py): looked up, or found with all rows "
    "in view"
)
UNSEEN = RUNS.with_name("unseen_runs.csv")
RATES = Path(meshwright.planner.__file__).parent / "machine" / "rates.toml"
DIGITS = 4
ALL, EACH = (
    0.6,
    0.3,
)  # how strongly rates are held: all to what is known of hardware, a kind's to those of all
# the share of its peak that large products reach on a kind of device: github.com/stas00/ml-engineering
# 744d01e, measured maxima;
# H100 96GB, of which nobody has said it: that of an H100, by the square root of its power, 500 of 700 W, an
# estimate
REACHED = {
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
USUAL = {
    "bfloat16": 0.8,
    "float16": 0.8,
    "float8": 0.73,
    "float4": 0.65,
}  # of a device of which nobody has said it
# shares of what is reached that a step of a whole model is known to have, before any run is looked at
KNOWN = replace(
    MachineRates(),
    matmul=0.93,
    matmul_float8=0.9,
    matmul_float8_blocks=0.85,
    matmul_float4=0.8,
    attention=0.6,
)
HEAD = (
    "# Shares of peaks that devices reach (planner/rates.py), fitted by: python -m "
    "benchmarks.planner.planner_published --fit\n"
)


def fit() -> dict[str, dict[str, float]]:
    """The rates of all, and those of each kind of device that differ, on the rows that may be fitted on.

    What devices have in common is a share of what large products reach on them, not of what their makers say.
    A kind of which there are few runs, or of one code base alone, would have that code's faults for its own:
    it is fitted with all kinds of its die, and where those are as few, not at all.
    """
    steps = [_of_reached(measured(run)) for run in timed(RUNS)[0] if run.fitted]
    everywhere = calibrate(KNOWN, steps, ALL, SOUND)
    tables = {"all": _rounded(_of_peak(everywhere, {}))}
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
        mine = next(
            (pool for pool in pools if len(pool) >= FEW and len({step.source for step in pool}) > 1), []
        )
        found = _rounded(_of_peak(calibrate(everywhere, mine, EACH, SOUND), REACHED.get(device.name, {})))
        tables[device.name] = {name: value for name, value in found.items() if value != tables["all"][name]}
    return tables


def _of_reached(step: MeasuredStep) -> MeasuredStep:
    """`step` on a machine whose peaks are what large products reach."""
    device = step.machine.device
    shares = {**USUAL, **REACHED.get(device.name, {})}
    shares["float16"] = shares["bfloat16"]
    flops = {dtype: peak * shares.get(dtype, 1.0) for dtype, peak in device.flops.items()}
    return replace(step, machine=replace(step.machine, device=replace(device, flops=flops)))


def _of_peak(rates: MachineRates, reached: Mapping[str, float]) -> MachineRates:
    """`rates`, which are shares of what is reached, as shares of peaks."""
    shares = {**USUAL, **reached}
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


def elsewhere(shipped: Sequence[Run]) -> dict[str, dict[str, object]]:
    """How rows score of which nothing was known, by source; `alone`: the error of all of them by the rates of
    their devices.
    """
    unseen, _ = timed(UNSEEN)
    found = scores(unseen, learnt([*unseen, *shipped]))
    show(found, ())
    steps = {run.key: measured(run) for run in unseen}
    off = {key: abs(each.predicted_s(each.machine.rates) / each.seconds - 1) for key, each in steps.items()}
    alone = {
        score.source: fmean(off[run.key] for run in unseen if run.source == score.source) for score in found
    }
    return {score.source: {**score.as_dict(), "alone": alone[score.source]} for score in found}


def result(found: Sequence[Score], skipped: int, unseen: Mapping[str, dict[str, object]]) -> Result:
    """Of the scores; the figure shown is the worst named source's."""
    named = [score for score in found if score.scored and score.source.startswith(NAMED)]
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
            "not held out": OPEN,
            "unseen": unseen,
        },
    )


def main(arguments: Sequence[str]) -> int:
    """Score, or fit."""
    if "--fit" in arguments:
        RATES.write_text(HEAD + tomli_w.dumps(fit()), encoding="utf-8")
        return 0
    runs, skipped = timed(RUNS)
    found = scores(runs, learnt(runs))
    show(found, skipped)
    print(result(found, len(skipped), elsewhere(runs)).write(NAME))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
