"""Twelve plans on this machine: seconds of a step, and bytes at the fullest moment of each rank, predicted
and measured.

The machine is measured as a user would: `bench network` among 2, 3 and 4 ranks, and `bench device` by as many
processes as there are cores. Then each plan (measured_plans.py) is priced by the one and the other, and played
by processes over gloo. Nothing is fitted to any of them. Ranks may outnumber cores: the prediction shares the
cores among them (planner/crowd.py).

A machine that others use too is now faster, now slower. So the cells of `bench device` are timed once more in
turn with the steps of each plan (interleaved_device_bench.py), and the bar is for the prediction by those: the device as
it was meanwhile. `as_measured` is the prediction by the bench alone, some minutes before.

    seconds     median of the clean rounds, of the slowest rank              at most 10 % off
    bytes       the most that lived in a step, by rank                       at most 5 % off

    python -m benchmarks.planner.planner_here           15 minutes
    python -m benchmarks.planner.planner_here --only "llama, 2 copies"      this plan alone; writes nothing
    python -m benchmarks.planner.planner_here --quick   a few steps of each; writes nothing
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.harness.interleaved_timing import Rounds, Window, measure
from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import Result
from benchmarks.models.llama_steps import HEAVY, fresh_store
from benchmarks.planner.interleaved_device_bench import Turn, profile_of, turns
from benchmarks.planner.measured_plans import CASES, planned, played
from meshwright.commands.predict import prediction_hardware
from meshwright.plan.hardware.device_specs import available_cores
from meshwright.plan.plan import Plan
from meshwright.planner.program_cost.memory import peak_nbytes
from meshwright.planner.program_cost.prediction import StepPrediction, predict_step
from meshwright.run.measure.measured_files import read_profile, write_profile

NAME = "planner_here"
CLAIM = (
    "after `bench device` and `bench network`, the step time of 12 mixed plans on 2 and 4 "
    "processes is predicted within 10 % of "
    "measured, on the device as it was meanwhile, and the peak of live bytes within 5 %"
)
SECONDS, BYTES = 0.10, 0.05
PRELOAD = (*HEAVY, "benchmarks.planner.measured_plans", "benchmarks.planner.interleaved_device_bench")
MEASURED = {"device": ("--ranks", str(available_cores()), "--threads", "1"), "comm": ("--ranks", "2,3,4")}
BENCH = "bench"


def measured(what: str, folder: Path, *, quick: bool) -> None:
    """Measure the device, or comm, of this machine into a file of `folder`."""
    words = [
        "bench",
        what,
        *MEASURED[what],
        "--out",
        str(folder / f"{what}.toml"),
        *(["--quick"] if quick else []),
    ]
    print(" ".join(words), file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "meshwright", *words], check=True, stdout=subprocess.DEVNULL)


def predicted(plan: Plan, folder: Path, device: str) -> StepPrediction:
    """A step of `plan` on the links of this machine and the device of this name, both files of `folder`."""
    return predict_step(
        plan,
        prediction_hardware(str(folder / f"{device}.toml"), str(folder / "comm.toml"), plan.mesh.world_size),
    )


def in_turn(name: str, world: int, window: Window) -> Rounds:
    """Rounds of a step of the plan and of a hand of the bench's cells."""
    with (
        Ranks(name, played, world, preload=PRELOAD, timeout_s=900, plan=name, store=fresh_store()) as ranks,
        Ranks(BENCH, turns, available_cores(), preload=PRELOAD) as others,
    ):
        return measure([ranks, others], window)


def tried(name: str, folder: Path, window: Window) -> Mapping[str, object]:
    """One plan, predicted and measured."""
    case = CASES[name]
    _, plan = planned(case)
    rounds = in_turn(name, case.mesh.world_size, window)
    seen = [note for costs in rounds.clean for note in costs[BENCH].notes if isinstance(note, Turn)]
    now = write_profile(profile_of(read_profile(folder / "device.toml"), seen), folder / "now.toml")
    said, before = predicted(plan, folder, "now"), predicted(plan, folder, "device")
    took, peaks = (
        median(rounds.figures(name, "wall_s")),
        [int(str(note)) for note in rounds.clean[-1][name].notes],
    )
    planned_peaks = [peak_nbytes(plan, rank) for rank in range(case.mesh.world_size)]
    off = said.step_s / took - 1
    bytes_off = max((mine / theirs - 1 for mine, theirs in zip(planned_peaks, peaks, strict=True)), key=abs)
    words = f"as measured before {before.step_s:.3f} s; uneven {100 * now.lag_samples[0].lag:.1f} %"
    text = f"{name}: predicted {said.step_s:.3f} s ({words}), took {took:.3f} s ({100 * off:+.1f} %)"
    print(f"{text}, bytes {100 * bytes_off:+.1f} %", file=sys.stderr, flush=True)
    return {
        "predicted_s": said.step_s,
        "measured_s": took,
        "off": off,
        "as_measured": {"predicted_s": before.step_s, "off": before.step_s / took - 1},
        "stretches": [asdict(each) for each in now.lag_samples],
        "fastest_product": now.best_flops("float32"),
        "cpu_s": median(rounds.figures(name)),
        "rounds": len(rounds.clean),
        "discarded": rounds.discarded,
        "roles": {role: asdict(each) for role, each in said.roles.items()},
        "planned_bytes": planned_peaks,
        "live_bytes": peaks,
        "bytes_off": bytes_off,
    }


def main(words: Sequence[str]) -> None:
    """Measure, predict, measure, and write the result."""
    quick, only = "--quick" in words, words[words.index("--only") + 1] if "--only" in words else ""
    window = Window(6, 9, 60, threshold=64.0, window_s=0.0, warmup=1) if quick else Window(15, 60, 180)
    with TemporaryDirectory() as private:
        folder = Path(private)
        measured("network", folder, quick=quick)
        measured("device", folder, quick=quick)
        rows = {name: tried(name, folder, window) for name in CASES if only in name}
        if quick or only:
            return
        machine = {name: (folder / f"{name}.toml").read_text() for name in MEASURED}
    values, held = ([abs(float(str(row[key]))) for row in rows.values()] for key in ("off", "bytes_off"))
    detail = {"plans": rows, "bytes_off": held, "limit_bytes": BYTES, **machine}
    figures = {"median": median(values), "spread": (min(values), max(values)), "bar": SECONDS}
    holds = max(values) <= SECONDS and max(held) <= BYTES
    print(
        Result.of(NAME, CLAIM, values=values, **figures, holds=holds, repeats=15, detail=detail).write(NAME)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
