"""One kill trial: a run that is killed at random moments, resumed until it ends, and compared with an
undisturbed run.

In every attempt except the last, the run is killed: one rank, all ranks and their parent, or the parent alone
(SIGKILL), or the parent by SIGTERM; at a random moment of the start, after a random step, or inside a save (a
partial folder exists). After every attempt no process may be left, every published checkpoint must equal that
of the undisturbed run, and the next attempt must resume from the newest one. All choices follow from the seed
and the number of the trial.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import isclose
from pathlib import Path
from random import Random
from typing import IO

import psutil
import torch

from benchmarks.recovery import forked_command
from meshwright.run.checkpoint.directories import list_step_folders, step_folder
from meshwright.run.checkpoint.distributed_checkpoint import compare_checkpoints, load_tensors
from meshwright.run.checkpoint.manifest import CheckpointError

STEPS, SAVE_EVERY = 40, 2
VICTIMS = {"rank": 3, "all": 3, "parent": 2, "term": 2}  # and how often each is chosen
MOMENTS = {"start": 1, "step": 3, "save": 3}
CODES = {
    "rank": {1},
    "all": {-signal.SIGKILL},
    "parent": {-signal.SIGKILL},
    "term": {128 + signal.SIGTERM, -signal.SIGTERM},
}
DELAYS_S = {"start": 2.0, "step": 0.02, "save": 0.006}  # at most, after the moment
METRICS = ("loss", "grad_norm", "lr", "tokens")
END_S, ORPHAN_S = 120.0, 20.0
Process = forked_command.Forked | subprocess.Popen[bytes]


@dataclass(frozen=True)
class Kind:
    """A job of the matrix: its options, the rank counts of its attempts, and the exactness of resuming.

    `tolerance` is relative to the largest element of a tensor; None: bit for bit. `norm_tolerance` is that of
    the gradient norm, if it is another: stages sum it in another order. Attempts take `plans`, more options,
    in turn, from the first on.
    """

    name: str
    options: tuple[str, ...]
    ranks: tuple[int, ...]
    tolerance: float | None = None
    norm_tolerance: float | None = None
    plans: tuple[tuple[str, ...], ...] = ((),)


@dataclass
class Attempt:
    """One start of the command: the number of ranks, the victim and moment of the kill, the exit code, and
    the newest checkpoint afterwards.
    """

    ranks: int
    victim: str = ""
    moment: str = ""
    hit: bool = False
    code: int | None = None
    newest: int = 0


@dataclass
class Row:
    """The outcome of a trial; it failed when `failures`, a list of sentences, is not empty."""

    trial: int
    kind: str
    cold: bool
    attempts: list[Attempt] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, object]:
        """Returns the row as plain values."""
        return asdict(self)


class Trial:
    """Trial `number` of `kind` in `folder`; `undisturbed` is the folder of a run that was not killed, with
    every checkpoint kept.

    `cold` starts `python -m meshwright` instead of forks.
    """

    def __init__(
        self, number: int, kind: Kind, config: Path, undisturbed: Path, folder: Path, *, seed: int, cold: bool
    ) -> None:
        self.kind, self.config, self.undisturbed, self.folder = kind, config, undisturbed, folder
        self.run, self.checkpoints = folder / "run", folder / "run" / "checkpoints"
        self.row = Row(number, kind.name, cold)
        self._rng = Random(f"{seed} {number}")

    def run_attempts(self) -> Row:
        """Starts, kills, resumes and judges; removes the folder when nothing failed."""
        started = time.monotonic()
        (self.folder / "tmp").mkdir(parents=True)
        for _ in range(self._rng.choices((1, 2, 3), (6, 3, 1))[0]):
            self._attempt(hit=True)
        self._attempt(hit=False)
        self.check_end()
        self.row.seconds = round(time.monotonic() - started, 2)
        if not self.row.failures:
            shutil.rmtree(self.folder)
        return self.row

    def _attempt(self, *, hit: bool) -> None:
        ranks, previous = self._rng.choice(self.kind.ranks), self._newest()
        plan = self.kind.plans[len(self.row.attempts) % len(self.kind.plans)]
        attempt = Attempt(ranks)
        self.row.attempts.append(attempt)
        output = self.folder / f"output-{len(self.row.attempts)}.txt"
        with output.open("wb") as file:
            argv = [*train_argv(self.config, self.run, self.kind, ranks), *plan]
            process = start(argv, file, self.folder, cold=self.row.cold)
        if hit:
            attempt.victim = _weighted_choice(self._rng, VICTIMS)
            attempt.moment = _weighted_choice(self._rng, MOMENTS)
            while self._wait_for_moment(process, attempt.moment) and not attempt.hit:
                attempt.hit = kill_victim(process.pid, attempt.victim, self._rng)
        try:
            attempt.code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._fail(f"it did not end within {END_S:.0f} s after the hit")
        if left := still_running(self.folder, ORPHAN_S):
            self._fail(f"processes were left behind: {left}")
        attempt.newest = self._newest()
        text = output.read_text(errors="replace")
        if attempt.code not in ({0} | CODES[attempt.victim] if attempt.hit else {0}):
            self._fail(f"exit code {attempt.code} after {attempt.victim or 'nothing'}: {text[-400:]}")
        match = re.search(r"^(?:resumed|starting) from step (\d+)$", text, re.MULTILINE)
        if match is not None and int(match[1]) != previous:
            self._fail(f"it resumed from step {match[1]}, and the newest checkpoint was of step {previous}")
        self.check_published()

    def _wait_for_moment(self, process: Process, moment: str) -> bool:
        """Returns True at the random moment, False when the command ended before."""
        known = max(metrics(self.run), default=0)
        last = STEPS - 2 * SAVE_EVERY  # so that a save that ends too early is followed by another
        target = self._rng.randint(min(known + 1, last), last)
        delay_s = self._rng.uniform(0, DELAYS_S[moment])
        while process.poll() is None:
            if moment == "start" or (
                self._is_saving(target) if moment == "save" else max(metrics(self.run), default=0) >= target
            ):
                time.sleep(delay_s)
                return process.poll() is None
            time.sleep(0.001)
        return False

    def _is_saving(self, target: int) -> bool:
        if not self.checkpoints.is_dir():
            return False
        return any(
            step >= target and path != step_folder(self.checkpoints, step)
            for step, path in list_step_folders(self.checkpoints)
        )

    def _newest(self) -> int:
        return max(
            (
                step
                for step, path in list_step_folders(self.checkpoints)
                if path == step_folder(self.checkpoints, step)
            ),
            default=0,
        )

    def check_published(self) -> None:
        """Checks that every published checkpoint loads, and equals that of the undisturbed run at its
        step.
        """
        for step, path in list_step_folders(self.checkpoints):
            if path == step_folder(self.checkpoints, step):
                self._fail_with(f"the checkpoint of step {step}", self._differing(path, step))

    def _differing(self, path: Path, step: int) -> list[str]:
        truth = step_folder(self.undisturbed / "checkpoints", step)
        try:
            if self.kind.tolerance is None:
                return compare_checkpoints(path, truth)
            return differing_tensors(load_tensors(path)[0], load_tensors(truth)[0], self.kind.tolerance)
        except CheckpointError as error:
            return [str(error)]

    def check_end(self) -> None:
        """Checks that every step and the last checkpoint are present and exact, and that nothing is left
        behind.
        """
        mine, theirs = metrics(self.run), metrics(self.undisturbed)
        if sorted(mine) != list(range(1, STEPS + 1)):
            self._fail(f"the journal has the steps {sorted(mine)}")
        wrong = [step for step in theirs if not self._metrics_equal(mine.get(step, ()), theirs[step])]
        self._fail_with("the metrics of steps", list(map(str, wrong)))
        if self._newest() != STEPS:
            self._fail(f"the last checkpoint is of step {self._newest()}")
        left = [
            path
            for folder in (self.folder / "tmp", self.checkpoints, self.run)
            for path in folder.glob("*")
            if is_leftover(path)
        ]
        self._fail_with("left behind:", [str(path.relative_to(self.folder)) for path in left])

    def _metrics_equal(self, mine: Sequence[float], theirs: Sequence[float]) -> bool:
        tolerance, at = self.kind.tolerance, METRICS.index("grad_norm")
        if self.kind.norm_tolerance is None or len(mine) != len(theirs):
            return metrics_equal(mine, theirs, tolerance)
        norms = metrics_equal(mine[at : at + 1], theirs[at : at + 1], self.kind.norm_tolerance)
        others = [(*each[:at], *each[at + 1 :]) for each in (mine, theirs)]
        return norms and metrics_equal(others[0], others[1], tolerance)

    def _fail_with(self, what: str, names: list[str]) -> None:
        if names:
            self._fail(
                f"{what} {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            )

    def _fail(self, text: str) -> None:
        self.row.failures.append(f"attempt {len(self.row.attempts)}: {text}")


def train_argv(config: Path, run: Path, kind: Kind, ranks: int) -> list[str]:
    """Returns the arguments of `meshwright` that train a job of the matrix into `run`."""
    return ["train", str(config), "--run.folder", str(run), "--mesh.dp_replicate", str(ranks), *kind.options]


def start(argv: list[str], output: IO[bytes], folder: Path, *, cold: bool) -> Process:
    """Starts the command with `argv` in `folder`; temporary files go to its tmp/."""
    env = {
        **os.environ,
        "TMPDIR": str(folder / "tmp"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    if not cold:
        return forked_command.command(argv, env, output, folder)
    argv = [sys.executable, "-m", "meshwright", *argv]
    null = subprocess.DEVNULL
    return subprocess.Popen(
        argv, env=env, cwd=folder, stdin=null, stdout=output, stderr=output, start_new_session=True
    )


def kill_victim(pid: int, victim: str, rng: Random) -> bool:
    """Kills `victim` of the command `pid`; returns False when there was no such process."""
    try:
        parent = psutil.Process(pid)
        ranks = sorted(parent.children(), key=lambda child: child.pid)
        if victim == "term":
            parent.terminate()
        elif victim == "rank" and ranks:
            rng.choice(ranks).kill()
        elif victim != "rank":
            for process in [parent, *(ranks if victim == "all" else [])]:
                process.kill()
        return victim != "rank" or bool(ranks)
    except psutil.NoSuchProcess:
        return False


def still_running(folder: Path, limit_s: float) -> list[str]:
    """Returns the processes that work in `folder` and do not end within `limit_s`, after killing them."""
    end = time.monotonic() + limit_s
    while found := list(_working_in(folder)):
        if time.monotonic() > end:
            for process in found:
                process.kill()
            return list(map(str, found))
        time.sleep(0.02)
    return []


def _working_in(folder: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has just ended, or is a zombie, or of another user
            if Path(process.cwd()) == folder and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def metrics(run: Path) -> dict[int, tuple[float, ...]]:
    """Returns loss, gradient norm, learning rate and tokens of each step in the journal of a run; the last
    line of a step counts.
    """
    path = run / "metrics.jsonl"
    finished = path.read_text().rpartition("\n")[0] if path.exists() else ""
    lines = (json.loads(line) for line in finished.splitlines())
    return {line["step"]: tuple(line[key] for key in METRICS) for line in lines if not line.get("kind")}


def metrics_equal(mine: Sequence[float], theirs: Sequence[float], tolerance: float | None) -> bool:
    """Returns whether two lines of metrics are equal, bit for bit or within the relative `tolerance`."""
    if tolerance is None:
        return tuple(mine) == tuple(theirs)
    return len(mine) == len(theirs) and all(
        isclose(a, b, rel_tol=tolerance) for a, b in zip(mine, theirs, strict=True)
    )


def differing_tensors(
    mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], tolerance: float
) -> list[str]:
    """Returns the tensors that only one side has, or that differ by more than `tolerance` times the largest
    element.
    """
    wrong = sorted({*mine} ^ {*theirs})
    for name in sorted({*mine} & {*theirs}):
        a, b = mine[name].double(), theirs[name].double()
        if a.shape != b.shape or not bool(((a - b).abs() <= tolerance * b.abs().max()).all()):
            wrong.append(name)
    return wrong


def is_leftover(path: Path) -> bool:
    """Returns whether `path` must not exist after the end of a run: all in tmp/, and unfinished files."""
    return path.parent.name == "tmp" or ".partial-" in path.name or path.name.endswith(".part")


def _weighted_choice(rng: Random, weights: Mapping[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]
