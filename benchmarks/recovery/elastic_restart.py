"""Recovery under torchrun: a random rank is killed with SIGKILL at a random moment; does the job end as if
nobody had been?

    torchrun --max-restarts 3 --nproc-per-node 2 -m meshwright train ...      ours
    torchrun --max-restarts 3 --nproc-per-node 2 benchmarks/recovery/ddp_script.py ...  DDP over gloo, one save per step

Eight trials of each, the same seeds. A trial of ours counts when torchrun ends with 0 and every loss,
gradient norm and learning rate in the journal equals that of a run left alone, bit for bit; one of the plain
script when torchrun ends with 0. The plain count is shown beside it and decides nothing.
"""

import json
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

TRIALS, RANKS, STEPS, RESTARTS = 8, 2, 150, 3
LIMIT_S = 240.0
START_S = 6.0  # of a rank, at most: a kill falls into it in one trial of four
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
    """One killed job: which rank was hit and when (seconds since its start), torchrun's exit code, and
    whether it recovered.
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
        _finish(_ours(folder, folder / "alone"))
        alone = _figures(folder / "alone")
        ours, plain = [], []
        for number in range(TRIALS):
            run, script = folder / f"ours-{number}", folder / f"plain-{number}"
            ours.append(_trial(number, _ours(folder, run), run / "metrics.jsonl"))
            right = _figures(run) == alone
            ours[-1] = replace(ours[-1], recovered=ours[-1].recovered and right)
            plain.append(_trial(number, _plain(script), script / "steps.txt"))
            print(f"trial {number}: ours {ours[-1]}; plain {plain[-1]}", file=sys.stderr)
    counted = sum(trial.recovered for trial in plain)
    detail = {
        "ours": [asdict(trial) for trial in ours],
        "plain": [asdict(trial) for trial in plain],
        "plain_recovered": counted,
    }
    values = [0.0 if trial.recovered else 1.0 for trial in ours]
    print(
        Result.of_count("elastic_restart", CLAIM, values, limit=0.0, bar=TRIALS, detail=detail).write(
            "elastic_restart"
        )
    )


def _ours(folder: Path, run: Path) -> list[str]:
    return ["-m", "meshwright", "train", str(folder / "config.toml"), "--run.folder", str(run)]


def _plain(folder: Path) -> list[str]:
    return [str(ROOT / "benchmarks" / "recovery" / "ddp_script.py"), str(folder), str(STEPS)]


def _start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    silent = subprocess.DEVNULL
    return subprocess.Popen(
        [*launcher, "--max-restarts", str(RESTARTS), *words], env=env, stdout=silent, stderr=silent
    )


def _finish(words: Sequence[str]) -> None:
    code = _start(words).wait(LIMIT_S)
    if code:
        raise RuntimeError(
            f"the undisturbed run ended with {code}; run it by hand: torchrun {' '.join(words)}"
        )


def _trial(number: int, words: Sequence[str], journal: Path) -> Trial:
    chance = random.Random(number)
    rank, early = chance.randrange(RANKS), chance.random() < 0.25
    moment, delay, step = (
        "start" if early else "step",
        chance.uniform(0.0, START_S),
        chance.randrange(5, STEPS - 30),
    )
    started = time.monotonic()
    job, hit, killed_s = _start(words), list[psutil.Process](), 0.0
    try:
        while job.poll() is None and not (hit := _ranks(job, rank)):
            time.sleep(0.005)
        began = time.monotonic()
        while job.poll() is None and not (
            time.monotonic() - began > delay if early else _lines(journal) >= step
        ):
            time.sleep(0.005)
        for child in hit:
            child.kill()
        killed_s = time.monotonic() - started
        code = job.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        code = -1
    finally:
        _end(job)
    return Trial(
        rank, moment, round(killed_s, 2), code, round(time.monotonic() - started, 2), code == 0 and bool(hit)
    )


def _end(job: subprocess.Popen[bytes]) -> None:
    if job.poll() is not None:
        return
    for each in [*psutil.Process(job.pid).children(recursive=True), job]:
        each.kill()
    job.wait()


def _ranks(job: subprocess.Popen[bytes], rank: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(job.pid).children() if _rank_of(child) == rank]


def _rank_of(process: psutil.Process) -> int | None:
    try:
        return int(process.environ().get("RANK", -1))
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def _lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def _figures(run: Path) -> dict[int, tuple[object, ...]]:
    """What each step came to; of a step that was played again, the last."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: tuple(line[key] for key in ("loss", "grad_norm", "lr", "tokens")) for line in lines}


if __name__ == "__main__":
    main()
