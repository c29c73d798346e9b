"""Ranks as real processes: small scripts that report their state, and a parent that can be sent signals."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil

from meshwright.run.launch import local_launcher as launch_module
from meshwright.run.launch.failure_record import failure_path
from meshwright.run.launch.local_launcher import FirstFailure, LaunchResult, LaunchTimeouts, launch_ranks
from meshwright.run.launch.run_folder import Attempt, claim_run_folder

ENV = {**os.environ, "PYTHONPATH": str(Path(launch_module.__file__).parents[3])}
ENV = {
    key: value
    for key, value in ENV.items()
    if key not in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "PYTHONUNBUFFERED")
}
WORLD = 3
PATIENT = LaunchTimeouts(failure_s=60)  # where all ranks end by themselves, nobody waits for it
CHILD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from meshwright.plan.job.errors import PlanError
from meshwright.run.launch.failure_record import record_failure

rank, world, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])
attempt_folder = Path(os.environ["MESHWRIGHT_ATTEMPT"])

def until(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)

def until_recorded(*ranks):
    until(*(attempt_folder / "failures" / f"rank-{other}.json" for other in ranks))

def say(word, text=""):
    part = folder / f"part-{word}-{rank}"
    part.write_text(str(text))
    part.replace(folder / f"{word}-{rank}")

def meet(*pids):
    say("here", " ".join(map(str, [os.getpid(), *pids])))
    until(*(f"here-{other}" for other in range(world)))

def on_term(act):
    signal.signal(signal.SIGTERM, lambda number, frame: act())

def for_ever():
    while True:
        time.sleep(0.01)

with record_failure(rank, attempt_folder, int(os.environ["MESHWRIGHT_LIFELINE"])) as progress:
"""
PARENT = """
import json, os, runpy, sys
from dataclasses import asdict
from pathlib import Path
from meshwright.run.launch.local_launcher import LaunchTimeouts, launch_ranks
from meshwright.run.launch.run_folder import claim_run_folder

folder, timeouts = Path(sys.argv[1]), LaunchTimeouts(**json.loads(sys.argv[2]))
command = [str(folder / "child.py"), str(folder)]

def fork_main(env):
    os.environ.update(env)
    runpy.run_path(command[0])

with claim_run_folder(folder) as attempt:
    program = fork_main if sys.argv[3] == "forks" else command
    outcome = launch_ranks(program, 3, attempt, os.environ, timeouts)
(folder / "outcome.json").write_text(json.dumps(asdict(outcome)))
sys.exit(outcome.exit_code)
"""


def first_failure_path(folder: Path, rank: int) -> Path:
    """The file in which `rank` records a failure in the first attempt in `folder`."""
    return failure_path(Attempt(folder, 1).folder, rank)


def write_child(folder: Path, body: str) -> list[str]:
    lines = [f"    {line}" for line in body.strip().splitlines()]
    (folder / "child.py").write_text(CHILD + "\n".join(lines) + "\n")
    return [str(folder / "child.py"), str(folder)]


def run(
    folder: Path, body: str, limits: LaunchTimeouts | None = None, env: dict[str, str] | None = None
) -> LaunchResult:
    """Returns how three ranks end that run `body`; afterwards no process of any rank that said where it
    was is left.
    """
    with claim_run_folder(folder) as attempt:
        outcome = launch_ranks(
            write_child(folder, body), WORLD, attempt, env or ENV, limits or LaunchTimeouts()
        )
    assert_all_ended([[int(pid) for pid in path.read_text().split()] for path in folder.glob("here-*")])
    return outcome


def assert_all_ended(pids: list[list[int]]) -> None:
    """For each rank, its pid and those of what it started; the latter are killed,
    but not ours to wait for.
    """
    assert not [pid for pid, *_ in pids if is_running(pid)]
    while any(is_running(pid) for _, *helpers in pids for pid in helpers):
        time.sleep(0.01)  # for ever, if they stay: then the time limit of the suite fails the test


class Job:
    """A parent in a process of its own, which can be sent signals, and all processes below it: `start` says
    whether the ranks are "forks" or "interpreters".
    """

    def __init__(self, folder: Path, start: str, body: str, limits: LaunchTimeouts | None = None) -> None:
        self.folder = folder
        write_child(folder, body)
        (folder / "parent.py").write_text(PARENT)
        argv = [
            sys.executable,
            str(folder / "parent.py"),
            str(folder),
            json.dumps(asdict(limits or LaunchTimeouts())),
            start,
        ]
        # a parent that is killed leaves its store behind: here, in the folder of the test
        self.process = subprocess.Popen(argv, env={**ENV, "TMPDIR": str(folder)}, start_new_session=True)
        self.wait_for("here")
        self.pids = [
            int(pid) for rank in range(WORLD) for pid in (folder / f"here-{rank}").read_text().split()
        ]
        assert all(is_running(pid) for pid in self.pids)

    def wait_for(self, word: str) -> None:
        """Return when every rank has said `word`."""
        while not all((self.folder / f"{word}-{rank}").exists() for rank in range(WORLD)):
            assert self.process.poll() is None, "the parent ended too early"
            time.sleep(0.01)

    def send(self, number: int) -> None:
        """Send a signal as a terminal does: to the whole group of the parent."""
        os.killpg(self.process.pid, number)

    def outcome(self) -> LaunchResult:
        """Returns how it ended; every process is gone by then."""
        code = self.process.wait()
        assert_all_ended([[pid] for pid in self.pids])
        told = json.loads((self.folder / "outcome.json").read_text())
        assert code == told["exit_code"]
        failure = told["failure"] and FirstFailure(**told["failure"])
        return LaunchResult(code, failure, tuple(told["killed_ranks"]))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
