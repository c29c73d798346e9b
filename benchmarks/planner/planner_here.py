"""Twelve plans on this machine: seconds of a step and peak bytes of each rank, predicted against measured.

The machine is measured as a user would: `bench network` among 2, 3 and 4 ranks, and `bench device` by as many
processes as there are cores. Then the time of each plan (twelve_plans.py) is predicted from both, and the
plan is run by processes over gloo. Nothing is fitted to any of them. There may be more ranks than cores: the
prediction shares the cores among them (core contention).

A shared machine becomes faster and slower. So the cells of `bench device` are timed once more, interleaved
with the steps of each plan (interleaved_device_bench.py), and the bar is for the prediction from those: the
device as it was during the run. `as_measured` is the prediction from the bench alone, some minutes before.

    seconds     median of the clean rounds, of the slowest rank              at most 10 % off
    bytes       peak of live bytes in a step, by rank                        at most 5 % off

    python -m benchmarks.planner.planner_here                            15 minutes
    python -m benchmarks.planner.planner_here --only "llama, ddp on 2"   this plan alone; writes nothing
    python -m benchmarks.planner.planner_here --quick                    a few steps of each; writes nothing
"""

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.harness.interleaved_timing import Rounds, Window, measure
from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import Result
from benchmarks.models.llama_steps import HEAVY, fresh_store
from benchmarks.planner.interleaved_device_bench import BenchTurn, bench_step, profile_of
from benchmarks.planner.twelve_plans import ALL_CASES, CASES, analyze_and_plan, plan_step
from meshwright.commands.predict import prediction_hardware
from meshwright.plan.hardware.device_specs import available_cores
from meshwright.plan.plan import Plan
from meshwright.planner.program_cost.prediction import StepPrediction, predict_step
from meshwright.planner.program_cost.rank_memory import nbytes_of_ranks
from meshwright.run.launch.host_memory_check import SAME_MEMORY
from meshwright.run.measure.profile_files import read_profile, write_profile

NAME = "planner_here"
CLAIM = (
    "after `bench device` and `bench network`, the step time of 12 mixed plans on 2 and 4 "
    "processes is predicted within 10 % of "
    "measured, on the device as it was during the run, and the peak of live bytes within 5 %"
)
SECONDS_BAR, BYTES_BAR = 0.10, 0.05
PRELOAD = (*HEAVY, "benchmarks.planner.twelve_plans", "benchmarks.planner.interleaved_device_bench")
BENCHES = {"device": ("--ranks", str(available_cores()), "--threads", "1"), "network": ("--ranks", "2,3,4")}
BENCH = "bench"


def run_bench(what: str, folder: Path, *, quick: bool) -> None:
    """Runs `bench what` on this machine, into a file of `folder`."""
    arguments = [
        "bench",
        what,
        *BENCHES[what],
        "--out",
        str(folder / f"{what}.toml"),
        *(["--quick"] if quick else []),
    ]
    print(" ".join(arguments), file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "meshwright", *arguments], check=True, stdout=subprocess.DEVNULL)


def predict(plan: Plan, folder: Path, device: str) -> StepPrediction:
    """Returns the predicted step of `plan` on the links of this machine and on `device`, both files of
    `folder`.
    """
    return predict_step(
        plan,
        prediction_hardware(
            str(folder / f"{device}.toml"), str(folder / "network.toml"), plan.mesh.world_size
        ),
    )


def interleaved_rounds(name: str, world: int, window: Window) -> Rounds:
    """Measures rounds of one step of the plan and one subset of the bench's cells."""
    with (
        Ranks(
            name, plan_step, world, preload=PRELOAD, timeout_s=900, plan=name, store=fresh_store()
        ) as ranks,
        Ranks(BENCH, bench_step, available_cores(), preload=PRELOAD) as bench,
    ):
        return measure([ranks, bench], window)


def predict_and_measure(name: str, folder: Path, window: Window) -> Mapping[str, object]:
    """Returns the row of one plan, predicted and measured."""
    case = ALL_CASES[name]
    _, plan = analyze_and_plan(case)
    rounds = interleaved_rounds(name, case.mesh.world_size, window)
    bench_turns = [
        note for costs in rounds.clean for note in costs[BENCH].notes if isinstance(note, BenchTurn)
    ]
    now = write_profile(profile_of(read_profile(folder / "device.toml"), bench_turns), folder / "now.toml")
    prediction, prediction_before = predict(plan, folder, "now"), predict(plan, folder, "device")
    measured_s, peaks = (
        median(rounds.figures(name, "wall_s")),
        [int(str(note)) for note in rounds.clean[-1][name].notes],
    )
    planned_peaks = [nbytes_of_ranks(plan, [rank], SAME_MEMORY) for rank in range(case.mesh.world_size)]
    off = prediction.step_s / measured_s - 1
    bytes_off = max(
        (planned_peak / live_peak - 1 for planned_peak, live_peak in zip(planned_peaks, peaks, strict=True)),
        key=abs,
    )
    lag_percent = 100 * now.straggler_samples[0].lag
    comparison = f"as measured before {prediction_before.step_s:.3f} s; uneven {lag_percent:.1f} %"
    text = f"{name}: predicted {prediction.step_s:.3f} s ({comparison})"
    print(
        f"{text}, took {measured_s:.3f} s ({100 * off:+.1f} %), bytes {100 * bytes_off:+.1f} %",
        file=sys.stderr,
        flush=True,
    )
    return {
        "predicted_s": prediction.step_s,
        "measured_s": measured_s,
        "off": off,
        "as_measured": {
            "predicted_s": prediction_before.step_s,
            "off": prediction_before.step_s / measured_s - 1,
        },
        "stretches": [asdict(each) for each in now.straggler_samples],
        "fastest_product": now.best_flops("float32"),
        "cpu_s": median(rounds.figures(name)),
        "rounds": len(rounds.clean),
        "discarded": rounds.discarded,
        "roles": {role: asdict(each) for role, each in prediction.roles.items()},
        "planned_bytes": planned_peaks,
        "live_bytes": peaks,
        "bytes_off": bytes_off,
    }


def parse(arguments: Sequence[str]) -> tuple[bool, str, Window]:
    """Returns whether to be quick, which plans alone to measure ("": all), and the rounds of each."""
    quick = "--quick" in arguments
    only = arguments[arguments.index("--only") + 1] if "--only" in arguments else ""
    window = Window(6, 9, 60, threshold=64.0, window_s=0.0, warmup=1) if quick else Window(15, 60, 180)
    return quick, only, window


def result_of(
    name: str,
    claim: str,
    rows: Mapping[str, Mapping[str, object]],
    bytes_bar: float,
    more: Mapping[str, object],
) -> Result:
    """Returns the result of `rows`, as `predict_and_measure` makes them, with `more` in its detail: seconds
    within SECONDS_BAR, bytes within `bytes_bar`.
    """
    values, byte_errors = (
        [abs(float(str(row[key]))) for row in rows.values()] for key in ("off", "bytes_off")
    )
    detail = {"plans": rows, "bytes_off": byte_errors, "limit_bytes": bytes_bar, **more}
    figures = {"median": median(values), "spread": (min(values), max(values)), "bar": SECONDS_BAR}
    holds = max(values) <= SECONDS_BAR and max(byte_errors) <= bytes_bar
    return Result.of(name, claim, values=values, **figures, holds=holds, repeats=15, detail=detail)


def predict_and_measure_all(
    name: str, claim: str, cases: Iterable[str], bytes_bar: float, arguments: Sequence[str]
) -> None:
    """Runs the benches, predicts and measures the plans `cases`, and writes the result."""
    quick, only, window = parse(arguments)
    with TemporaryDirectory() as private:
        folder = Path(private)
        run_bench("network", folder, quick=quick)
        run_bench("device", folder, quick=quick)
        rows = {case: predict_and_measure(case, folder, window) for case in cases if only in case}
        if quick or only:
            return
        machine = {bench: (folder / f"{bench}.toml").read_text() for bench in BENCHES}
    print(result_of(name, claim, rows, bytes_bar, machine).write(name))


if __name__ == "__main__":
    predict_and_measure_all(NAME, CLAIM, CASES, BYTES_BAR, sys.argv[1:])
