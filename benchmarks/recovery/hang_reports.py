"""Planted hangs, through the real command: whether the report names the right rank and its line, in time, and
whether every process ends.

    meshwright train config.toml      gloo ranks of a tiny model (benchmarks/recovery/planted_hangs.py),
                                      run.limits.step_s = 4

In each trial one rank of two to four does one wrong thing in one step: it sleeps, loops (in Python, or in
native code that holds the GIL), exits (with code 0 or another), raises, is killed, issues a collective of
another size, or in another order. A trial counts when all of this holds:

    rank      the first sentence of the command's last output that names ranks names the planted one; where
              two ranks disagree and it cannot be decided which is wrong, both are named
    line      its file and line are reported (except for a kill, which has none)
    seconds   from the plant to the end of the command, all processes included: at most 10
    code      is not 0
    orphans   no process of the trial is left

`--quick` runs one trial of each kind and writes no result. Shared memory between ranks is on in half of the
trials.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from benchmarks.harness.result import ROOT, Result

LIMIT_S, BAR_S, END_S, TRIALS = 4.0, 10.0, 120.0, 24
KINDS = (
    "missing",
    "exits",
    "raises",
    "python_loop",
    "wrong_size",
    "wrong_order",
    "native_loop",
    "exits_with_code",
    "is_killed",
)
CLAIM = "the right rank and line within 10 s of the plant, exit code not 0, no process left"
PLANTS = Path(__file__).with_name("planted_hangs.py")
CONFIG = """
[model]
source = "planted_hangs.py:build"
[data]
source = "text.txt"
sequence = 32
[train]
steps = 40
batch = 12
[mesh]
dp_replicate = {ranks}
[run]
folder = "{run}"
save_every = 0
shared_memory = {shared}
[run.limits]
first_step_s = 4.0
step_s = 4.0
"""


@dataclass
class Trial:
    """One planted hang and its outcome; it failed when `failures`, a list of sentences, is not empty."""

    kind: str
    ranks: int
    rank: int
    step: int
    shared: bool
    seconds: float = -1.0
    code: int | None = None
    named: str = ""
    failures: list[str] = field(default_factory=list)


def main() -> None:
    """Run all trials and write the result."""
    parser = argparse.ArgumentParser(description=CLAIM)
    parser.add_argument("--quick", action="store_true", help="one trial of each kind, no result")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--show", action="store_true", help="print the output of the command")
    args = parser.parse_args()
    trials = []
    for trial in planned(args.kinds, len(args.kinds) if args.quick else TRIALS):
        with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
            output = run_trial(trial, Path(folder))
        trials.append(trial)
        print(f"{trial}\n{output if args.show or trial.failures else ''}", file=sys.stderr)
    if not args.quick:
        values = [trial.seconds if not trial.failures else float("inf") for trial in trials]
        detail = {"trials": [asdict(trial) for trial in trials], "limit_s": LIMIT_S}
        print(
            Result.of_count("hang_reports", CLAIM, values, limit=BAR_S, bar=len(trials), detail=detail).write(
                "hang_reports"
            )
        )


def planned(kinds: list[str], count: int) -> Iterator[Trial]:
    """Yields `count` trials: the kinds in turn, with 2 to 4 ranks, every rank and several steps; rank 0 in
    about one of three.
    """
    for number in range(count):
        ranks = 2 + (number + number // len(kinds)) % 3
        yield Trial(
            kinds[number % len(kinds)],
            ranks,
            (number * 2 + 1) % ranks,
            2 + number % 4,
            shared=number % 2 == 0,
        )


def run_trial(trial: Trial, folder: Path) -> str:
    """Runs `trial` in `folder` and judges it; returns the output of the command."""
    (folder / PLANTS.name).write_text(PLANTS.read_text())
    (folder / "text.txt").write_text("".join(f"{n} times {n + 1} makes {n * (n + 1)}\n" for n in range(500)))
    config = CONFIG.format(ranks=trial.ranks, run=folder / "run", shared=str(trial.shared).lower())
    (folder / "config.toml").write_text(config)
    mark = folder / "mark"
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    env |= {
        "PLANT_KIND": trial.kind,
        "PLANT_RANK": str(trial.rank),
        "PLANT_STEP": str(trial.step),
        "PLANT_MARK": str(mark),
    }
    argv = [sys.executable, "-m", "meshwright", "train", "config.toml"]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            argv, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            trial.code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            trial.failures.append(f"the command did not end within {END_S:.0f} s")
    text = (folder / "output").read_text(errors="replace")
    trial.seconds = round(time.time() - float(mark.read_text()), 2) if mark.exists() else -1.0
    decide(trial, text, _kill_leftovers(folder))
    return text


def decide(trial: Trial, text: str, left: list[str]) -> None:
    """Adds to `trial` the failures of the command's output, exit code, time and leftover processes."""
    trial.named = next((line for line in text.splitlines() if re.search(VERDICT, line)), "")
    ranks = {
        int(number) for match in re.findall(VERDICT, trial.named) for number in re.findall(r"\d+", match[0])
    }
    undecided = trial.ranks == 2 and "it cannot be determined which rank is wrong" in text
    if ranks != {trial.rank} and not (undecided and trial.rank in ranks | _differing_ranks(text)):
        trial.failures.append(f"rank {trial.rank} was to be named, and {sorted(ranks)} were: '{trial.named}'")
    line = _planted_line(trial.kind)
    if line and not re.search(rf"{PLANTS.name}(:|\", line ){line}\b", text):
        trial.failures.append(f"{PLANTS.name}:{line} is not in the report")
    if trial.code in (0, None):
        trial.failures.append(f"exit code {trial.code}")
    if not 0 <= trial.seconds <= BAR_S:
        trial.failures.append(f"{trial.seconds} s from the plant to the end")
    if left:
        trial.failures.append(f"left behind: {left}")


VERDICT = (
    r"^ *(rank \d+)( did not issue| left| failed|: its process is gone| was killed by| "
    r"differs from|s? did not answer)"
)


def _differing_ranks(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"^  rank (\d+) issued", text, re.MULTILINE)}


def _planted_line(kind: str) -> int | None:
    lines = PLANTS.read_text().splitlines()
    return next((number for number, line in enumerate(lines, 1) if line.endswith(f"  # {kind}")), None)


def _kill_leftovers(folder: Path) -> list[str]:
    """Kills the processes that still run in `folder`; returns them."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(str(process))
                process.kill()
        except psutil.Error:
            continue
    return found


if __name__ == "__main__":
    main()
