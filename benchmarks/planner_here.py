"""Twelve plans on this machine, predicted before they run: seconds of a step, and bytes at the fullest moment of each rank.

First the machine is measured, as a user would: `bench comm` among 2, 3 and 4 ranks, once, and `bench device` by as many processes
as there are cores, before each plan: a machine that others use too is now faster, now slower by a tenth. Then the plan
(planned_here.py) is priced by the one file and the other, and played by processes over gloo. Nothing is fitted to any of them.
Ranks may outnumber cores: the prediction shares the cores among them (planner/crowd.py).

    seconds     median of the clean rounds, of the slowest rank              at most 10 % off
    bytes       the most that lived in a step, by rank                       at most 5 % off

    python -m benchmarks.planner_here           half an hour
    python -m benchmarks.planner_here --quick   a few steps of each; writes nothing
    python -m benchmarks.planner_here --quick --keep FOLDER    likewise, by the device.toml and cluster.toml that lie there
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.method import Window, measure
from benchmarks.planned_here import CASES, planned, played
from benchmarks.ranks import Ranks
from benchmarks.result import Result
from benchmarks.workloads import HEAVY, fresh_store
from meshwright.core.hardware import cores
from meshwright.planner.memory import peak_bytes
from meshwright.planner.prediction import predict
from meshwright.run.profile import read_profile
from meshwright.verbs.predict import ground_of

NAME = "planner_here"
CLAIM = (
    "after `bench device` and `bench comm`, the step time of 12 mixed plans on 2 and 4 processes is predicted within 10 % of "
    "measured, and the peak of live bytes within 5 %"
)
SECONDS, BYTES = 0.10, 0.05
PRELOAD = (*HEAVY, "benchmarks.planned_here")


MEASURED = {"device": ("--ranks", str(cores()), "--threads", "1"), "comm": ("--ranks", "2,3,4")}


def measured(what: str, path: Path, *, quick: bool) -> None:
    """Measure the device, or comm, of this machine into the file at `path`."""
    words = ["bench", what, *MEASURED[what], "--out", str(path), *(["--quick"] if quick else [])]
    print(" ".join(words), file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "meshwright", *words], check=True, stdout=subprocess.DEVNULL)


def tried(name: str, folder: Path, window: Window) -> dict[str, object]:
    """One plan, predicted and measured."""
    case = CASES[name]
    _, plan = planned(case)
    said = predict(plan, ground_of(str(folder / "device.toml"), str(folder / "cluster.toml"), case.mesh.world))
    with Ranks(name, played, case.mesh.world, preload=PRELOAD, timeout_s=900, plan=name, store=fresh_store()) as ranks:
        rounds = measure([ranks], window)
    took = rounds.figures(name, "wall_s")
    peaks = [int(str(each)) for each in rounds.clean[-1][name].notes]
    planned_peaks = [peak_bytes(plan, rank) for rank in range(case.mesh.world)]
    row: dict[str, object] = {
        "predicted_s": said.step_s,
        "measured_s": median(took),
        "off": said.step_s / median(took) - 1,
        "cpu_s": median(rounds.figures(name)),
        "rounds": len(took),
        "discarded": rounds.discarded,
        "fastest_product": read_profile(folder / "device.toml").best("float32"),
        "roles": {role: asdict(each) for role, each in said.roles.items()},
        "planned_bytes": planned_peaks,
        "live_bytes": peaks,
        "bytes_off": max((mine / theirs - 1 for mine, theirs in zip(planned_peaks, peaks, strict=True)), key=abs),
    }
    text = f"{name}: predicted {said.step_s:.3f} s, took {median(took):.3f} s ({100 * float(str(row['off'])):+.1f} %)"
    print(f"{text}, bytes {100 * float(str(row['bytes_off'])):+.1f} %", file=sys.stderr, flush=True)
    return row


def main(words: Sequence[str]) -> None:
    """Measure, predict, measure, and write the result."""
    quick = "--quick" in words
    window = Window(3, 6, 60, threshold=64.0, window_s=0.0, warmup=1) if quick else Window(15, 60, 180)
    kept = Path(words[words.index("--keep") + 1]) if "--keep" in words else None
    with TemporaryDirectory() as private:
        folder = kept or Path(private)
        if not (folder / "cluster.toml").is_file():
            measured("comm", folder / "cluster.toml", quick=quick)
        chosen = [name for name in CASES if not quick or all(word not in CASES for word in words) or name in words]
        rows = {}
        for name in chosen:
            if not kept or not (folder / "device.toml").is_file():
                measured("device", folder / "device.toml", quick=quick)
            rows[name] = tried(name, folder, window)
        if quick:
            return
        machine = {name: (folder / f"{name}.toml").read_text() for name in ("device", "cluster")}
    values = [abs(float(str(row["off"]))) for row in rows.values()]
    held = [abs(float(str(row["bytes_off"]))) for row in rows.values()]
    detail = {"plans": rows, "bytes_off": held, "limit_bytes": BYTES, **machine}
    figures = {"median": median(values), "spread": (min(values), max(values)), "bar": SECONDS}
    holds = max(values) <= SECONDS and max(held) <= BYTES
    print(Result.of(NAME, CLAIM, values=values, **figures, holds=holds, repeats=15, detail=detail).write(NAME))


if __name__ == "__main__":
    main(sys.argv[1:])
