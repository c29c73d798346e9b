"""Recovery under torchrun: a random rank is killed with SIGKILL at a random moment, and the job must end as
an undisturbed one does.

    ours                             torchrun ARGS -m meshwright train ...
    DDP over gloo, a save per step   torchrun ARGS benchmarks/recovery/ddp_script.py ...
                                     ARGS = --max-restarts 3 --nproc-per-node 2

Eight trials of each, with the same seeds. A trial of ours counts when torchrun ends with 0 and every loss,
gradient norm and learning rate in the journal equals that of an undisturbed run, bit for bit; one of the
plain script when torchrun ends with 0. The count of the plain script is shown and decides nothing.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from benchmarks.harness.result import ROOT, Result
from meshwright.run.telemetry.metrics_log import read_metrics

TRIALS, RANKS, STEPS, RESTARTS = 8, 2, 150, 3
LIMIT_S = 240.0
START_S = 6.0  # of a rank, at most; in one trial of four the kill happens during the start
CLAIM = (
    "under torchrun on gloo, a job whose rank is killed at a random moment ends bitwise as if left alone: "
    "8 of 8"
)
MODEL = """
from torch import nn


class Bytes(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(256, 32), nn.Linear(32, 32), nn.Linear(32, 256)

    def forward(self, input_ids):
        return self.head(self.mix(self.embed(input_ids)).tanh())


def build():
    return Bytes()
"""
CONFIG = """
[model]
source = "model.py:build"
[data]
source = "text.txt"
sequence = 32
[train]
steps = {steps}
batch = 8
[mesh]
dp_replicate = {ranks}
[run]
save_every = 10
"""


@dataclass(frozen=True)
class Trial:
    """One killed job: the rank that was killed, the time (seconds since the start), torchrun's exit code, and
    whether the job recovered.
    """

    rank: int
    moment: str
    killed_s: float
    code: int
    seconds: float
    recovered: bool


def main() -> None:
    """Run all trials and write the result."""
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as private:
        folder = Path(private)
        (folder / "model.py").write_text(MODEL)
        (folder / "text.txt").write_text(
            "".join(f"{n} times {n + 1} makes {n * (n + 1)}\n" for n in range(500))
        )
        (folder / "config.toml").write_text(CONFIG.format(steps=STEPS, ranks=RANKS))
        _finish(_ours_argv(folder, folder / "undisturbed"))
        undisturbed = _metrics(folder / "undisturbed")
        ours, plain = [], []
        for number in range(TRIALS):
            run, script = folder / f"ours-{number}", folder / f"plain-{number}"
            ours.append(_trial(number, _ours_argv(folder, run), run / "metrics.jsonl"))
            is_exact = _metrics(run) == undisturbed
            ours[-1] = replace(ours[-1], recovered=ours[-1].recovered and is_exact)
            plain.append(_trial(number, _plain_argv(script), script / "steps.txt"))
            print(f"trial {number}: ours {ours[-1]}; plain {plain[-1]}", file=sys.stderr)
    plain_recovered = sum(trial.recovered for trial in plain)
    detail = {
        "ours": [asdict(trial) for trial in ours],
        "plain": [asdict(trial) for trial in plain],
        "plain_recovered": plain_recovered,
    }
    values = [0.0 if trial.recovered else 1.0 for trial in ours]
    print(
        Result.of_count("elastic_restart", CLAIM, values, limit=0.0, bar=TRIALS, detail=detail).write(
            "elastic_restart"
        )
    )


def _ours_argv(folder: Path, run: Path) -> list[str]:
    return ["-m", "meshwright", "train", str(folder / "config.toml"), "--run.folder", str(run)]


def _plain_argv(folder: Path) -> list[str]:
    return [str(ROOT / "benchmarks" / "recovery" / "ddp_script.py"), str(folder), str(STEPS)]


def _start(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    no_output = subprocess.DEVNULL
    return subprocess.Popen(
        [*launcher, "--max-restarts", str(RESTARTS), *argv], env=env, stdout=no_output, stderr=no_output
    )


def _finish(argv: Sequence[str]) -> None:
    code = _start(argv).wait(LIMIT_S)
    if code:
        raise RuntimeError(
            f"the undisturbed run ended with {code}; run it by hand: torchrun {' '.join(argv)}"
        )


def _trial(number: int, argv: Sequence[str], journal: Path) -> Trial:
    rng = random.Random(number)
    rank, early = rng.randrange(RANKS), rng.random() < 0.25
    moment, delay, step = (
        "start" if early else "step",
        rng.uniform(0.0, START_S),
        rng.randrange(5, STEPS - 30),
    )
    started = time.monotonic()
    job, targets, killed_s = _start(argv), list[psutil.Process](), 0.0
    try:
        while job.poll() is None and not (targets := _processes_of_rank(job, rank)):
            time.sleep(0.005)
        began = time.monotonic()
        while job.poll() is None and not (
            time.monotonic() - began > delay if early else _steps(journal) >= step
        ):
            time.sleep(0.005)
        for child in targets:
            child.kill()
        killed_s = time.monotonic() - started
        code = job.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        code = -1
    finally:
        _end(job)
    return Trial(
        rank,
        moment,
        round(killed_s, 2),
        code,
        round(time.monotonic() - started, 2),
        code == 0 and bool(targets),
    )


def _end(job: subprocess.Popen[bytes]) -> None:
    if job.poll() is not None:
        return
    for each in [*psutil.Process(job.pid).children(recursive=True), job]:
        each.kill()
    job.wait()


def _processes_of_rank(job: subprocess.Popen[bytes], rank: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(job.pid).children() if _rank_of(child) == rank]


def _rank_of(process: psutil.Process) -> int | None:
    try:
        return int(process.environ().get("RANK", -1))
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def _steps(path: Path) -> int:
    lines = path.read_text().splitlines() if path.exists() else []
    return sum("header" not in line for line in lines)


def _metrics(run: Path) -> dict[int, tuple[object, ...]]:
    """Returns the metrics of each step; of a step that ran again, the last."""
    lines = read_metrics(run / "metrics.jsonl")
    return {line["step"]: tuple(line[key] for key in ("loss", "grad_norm", "lr", "tokens")) for line in lines}


if __name__ == "__main__":
    main()
