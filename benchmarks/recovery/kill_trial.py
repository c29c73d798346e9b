"""One trial: a run that is killed at random moments, resumed until it ends, and compared with a run left
alone.

Of every attempt but the last, somebody is hit: one rank, all of them and their parent, the parent alone
(SIGKILL), or the parent by SIGTERM; at a random moment of the start, behind a random step, or inside a save
(a partial folder is there). After every attempt nothing may run on, what is published must equal the
checkpoint of the undisturbed run, and the next attempt must go on from the newest of it. All choices come
from the seed and the number of the trial.
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
from meshwright.run.checkpoint.manifest import CheckpointError
from meshwright.run.checkpoint.save_load import compare_checkpoints, load_tensors

STEPS, SAVE_EVERY = 40, 2
VICTIMS = {"rank": 3, "all": 3, "parent": 2, "term": 2}  # and how often each is chosen
MOMENTS = {"start": 1, "step": 3, "save": 3}
CODES = {
    "rank": {1},
    "all": {-signal.SIGKILL},
    "parent": {-signal.SIGKILL},
    "term": {128 + signal.SIGTERM, -signal.SIGTERM},
}
DELAYS_S = {"start": 2.0, "step": 0.02, "save": 0.006}  # at most, behind the moment
FIGURES = ("loss", "grad_norm", "lr", "tokens")
END_S, ORPHAN_S = 120.0, 20.0
Process = forked_command.Forked | subprocess.Popen[bytes]


@dataclass(frozen=True)
class Kind:
    """A job of the matrix: the words behind its config, the rank counts of its attempts, and what resuming
    promises.

    `tolerance` is relative to the largest element of a tensor; None: bit for bit.
    """

    name: str
    words: tuple[str, ...]
    ranks: tuple[int, ...]
    tolerance: float | None = None


@dataclass
class Attempt:
    """One start of the command: on how many ranks, who was hit when, how it ended, the newest checkpoint
    afterwards.
    """

    ranks: int
    victim: str = ""
    moment: str = ""
    hit: bool = False
    code: int | None = None
    newest: int = 0


@dataclass
class Row:
    """What a trial showed; it failed when `failures`, in sentences, is not empty."""

    trial: int
    kind: str
    cold: bool
    attempts: list[Attempt] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, object]:
        """The row as plain values."""
        return asdict(self)


class Trial:
    """Trial `number` of `kind` in `folder`; `alone` is the folder of the run that nobody disturbed, every
    checkpoint kept.

    `cold` starts `python -m meshwright` instead of forks.
    """

    def __init__(
        self, number: int, kind: Kind, config: Path, alone: Path, folder: Path, *, seed: int, cold: bool
    ) -> None:
        self.kind, self.config, self.alone, self.folder = kind, config, alone, folder
        self.run, self.checkpoints = folder / "run", folder / "run" / "checkpoints"
        self.row = Row(number, kind.name, cold)
        self._chance = Random(f"{seed} {number}")

    def play(self) -> Row:
        """Start, hit, resume and judge; the folder is removed when nothing failed."""
        started = time.monotonic()
        (self.folder / "tmp").mkdir(parents=True)
        for _ in range(self._chance.choices((1, 2, 3), (6, 3, 1))[0]):
            self._attempt(hit=True)
        self._attempt(hit=False)
        self.judge_end()
        self.row.seconds = round(time.monotonic() - started, 2)
        if not self.row.failures:
            shutil.rmtree(self.folder)
        return self.row

    def _attempt(self, *, hit: bool) -> None:
        ranks = self._chance.choice(self.kind.ranks)
        before = self._newest()
        attempt = Attempt(ranks)
        self.row.attempts.append(attempt)
        output = self.folder / f"output-{len(self.row.attempts)}.txt"
        with output.open("wb") as file:
            words = train_words(self.config, self.run, self.kind, ranks)
            process = start(words, file, self.folder, cold=self.row.cold)
        if hit:
            attempt.victim = _chosen(self._chance, VICTIMS)
            attempt.moment = _chosen(self._chance, MOMENTS)
            while self._comes(process, attempt.moment) and not attempt.hit:
                attempt.hit = strike(process.pid, attempt.victim, self._chance)
        try:
            attempt.code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._fail(f"it did not end within {END_S:.0f} s after the hit")
        if left := still_running(self.folder, ORPHAN_S):
            self._fail(f"processes were left behind: {left}")
        attempt.newest = self._newest()
        said = output.read_text(errors="replace")
        if attempt.code not in ({0} | CODES[attempt.victim] if attempt.hit else {0}):
            self._fail(f"exit code {attempt.code} after {attempt.victim or 'nothing'}: {said[-400:]}")
        began = re.search(r"^(?:resumed|starting) from step (\d+)$", said, re.MULTILINE)
        if began is not None and int(began[1]) != before:
            self._fail(f"it went on from step {began[1]}, and the newest checkpoint was of step {before}")
        self.judge_published()

    def _comes(self, process: Process, moment: str) -> bool:
        """Return True when the random moment has come, False when the command has ended before."""
        known = max(metrics(self.run), default=0)
        last = STEPS - 2 * SAVE_EVERY  # so that a save which is over too soon is followed by another
        target = self._chance.randint(min(known + 1, last), last)
        delay_s = self._chance.uniform(0, DELAYS_S[moment])
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

    def judge_published(self) -> None:
        """Everything under the name of a checkpoint must load, and hold what the undisturbed run had at that
        step.
        """
        for step, path in list_step_folders(self.checkpoints):
            if path == step_folder(self.checkpoints, step):
                self._fail_with(f"the checkpoint of step {step}", self._differing(path, step))

    def _differing(self, path: Path, step: int) -> list[str]:
        truth = step_folder(self.alone / "checkpoints", step)
        try:
            if self.kind.tolerance is None:
                return compare_checkpoints(path, truth)
            return apart(load_tensors(path)[0], load_tensors(truth)[0], self.kind.tolerance)
        except CheckpointError as error:
            return [str(error)]

    def judge_end(self) -> None:
        """Every step is there once and right, so is the last checkpoint, and nothing is left behind."""
        mine, theirs = metrics(self.run), metrics(self.alone)
        if sorted(mine) != list(range(1, STEPS + 1)):
            self._fail(f"the journal has the steps {sorted(mine)}")
        tolerance = self.kind.tolerance
        odd = [step for step in theirs if not alike(mine.get(step, ()), theirs[step], tolerance)]
        self._fail_with("the metrics of steps", list(map(str, odd)))
        if self._newest() != STEPS:
            self._fail(f"the last checkpoint is of step {self._newest()}")
        left = [
            path
            for place in (self.folder / "tmp", self.checkpoints, self.run)
            for path in place.glob("*")
            if is_scrap(path)
        ]
        self._fail_with("left behind:", [str(path.relative_to(self.folder)) for path in left])

    def _fail_with(self, what: str, names: list[str]) -> None:
        if names:
            self._fail(
                f"{what} {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            )

    def _fail(self, text: str) -> None:
        self.row.failures.append(f"attempt {len(self.row.attempts)}: {text}")


def train_words(config: Path, run: Path, kind: Kind, ranks: int) -> list[str]:
    """The words behind `meshwright` that train a job of the matrix into `run`."""
    return ["train", str(config), "--run.folder", str(run), "--mesh.dp_replicate", str(ranks), *kind.words]


def start(words: list[str], output: IO[bytes], folder: Path, *, cold: bool) -> Process:
    """The command with `words` in `folder`, whose tmp/ is its place for temporary files."""
    env = {
        **os.environ,
        "TMPDIR": str(folder / "tmp"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    if not cold:
        return forked_command.command(words, env, output, folder)
    argv = [sys.executable, "-m", "meshwright", *words]
    null = subprocess.DEVNULL
    return subprocess.Popen(
        argv, env=env, cwd=folder, stdin=null, stdout=output, stderr=output, start_new_session=True
    )


def strike(pid: int, victim: str, chance: Random) -> bool:
    """Kill whom `victim` names of the command `pid`; False when there was nobody to kill."""
    try:
        parent = psutil.Process(pid)
        ranks = sorted(parent.children(), key=lambda child: child.pid)
        if victim == "term":
            parent.terminate()
        elif victim == "rank" and ranks:
            chance.choice(ranks).kill()
        elif victim != "rank":
            for process in [parent, *(ranks if victim == "all" else [])]:
                process.kill()
        return victim != "rank" or bool(ranks)
    except psutil.NoSuchProcess:
        return False


def still_running(folder: Path, limit_s: float) -> list[str]:
    """The processes that work in `folder` and do not end within `limit_s`; they are killed then."""
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
        with suppress(psutil.Error):  # it has just ended, or is a zombie, or somebody else's
            if Path(process.cwd()) == folder and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def metrics(run: Path) -> dict[int, tuple[float, ...]]:
    """Loss, gradient norm, learning rate and tokens of each step in the journal of a run; the last line of a
    step counts.
    """
    path = run / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    lines = (json.loads(line) for line in whole.splitlines())
    return {line["step"]: tuple(line[key] for key in FIGURES) for line in lines if not line.get("kind")}


def alike(mine: Sequence[float], theirs: Sequence[float], tolerance: float | None) -> bool:
    """Whether two lines of metrics are equal, bit for bit or within the relative `tolerance`."""
    if tolerance is None:
        return tuple(mine) == tuple(theirs)
    return len(mine) == len(theirs) and all(
        isclose(a, b, rel_tol=tolerance) for a, b in zip(mine, theirs, strict=True)
    )


def apart(
    mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], tolerance: float
) -> list[str]:
    """The tensors that only one side has, or that differ by more than `tolerance` times the
    largest element.
    """
    wrong = sorted({*mine} ^ {*theirs})
    for name in sorted({*mine} & {*theirs}):
        a, b = mine[name].double(), theirs[name].double()
        if a.shape != b.shape or not bool(((a - b).abs() <= tolerance * b.abs().max()).all()):
            wrong.append(name)
    return wrong


def is_scrap(path: Path) -> bool:
    """Whether `path` should not be there when a run has ended: all in tmp/, and what was never finished."""
    return path.parent.name == "tmp" or ".partial-" in path.name or path.name.endswith(".part")


def _chosen(chance: Random, weights: Mapping[str, int]) -> str:
    return chance.choices(list(weights), list(weights.values()))[0]
