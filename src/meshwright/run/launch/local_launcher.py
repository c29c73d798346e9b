"""Starts the ranks of this machine, watches them, and leaves none behind.

    parent --+-- rank 0   its output is the parent's            each has a session of its own, so that Ctrl-C
                                                                reaches
             +-- rank 1   its output goes to logs/rank-1.log    only the parent, once, and the parent decides
             +-- ...      (appended)

A rank that ends abnormally ends the job: the others get a moment to record how they failed
(`failure_record`), then they are killed, because ranks that wait for a lost peer would wait forever. The
earliest failure that is not the consequence of another is returned, to be shown once; the others stay in
files.

    SIGTERM, SIGUSR1   SIGTERM to every rank: save and stop. A rank that has not ended after `terminate_s` is
                       killed.
    Ctrl-C             the same with `interrupt_s`; a second one kills at once.
    kill -9            of the parent: the ranks notice that their lifeline is closed, and end.

Exit codes: 0 done, 1 a rank failed, 2 the plan cannot work, 130 after Ctrl-C, 143 after SIGTERM.

Temporary folders contain a lock file. Its owner holds the lock, which the system releases when the process
ends, however it ends. The next job first removes the folders whose lock is free, so a killed process leaves
nothing for long:

    meshwright-k3x1/   lock  store        locked: its job runs          lock free: its job was killed; removed
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from meshwright.plan.hardware.device_specs import available_cores
from meshwright.run.launch.failure_record import FailureRecord, describe_failure, failure_path, read_failures
from meshwright.run.launch.forked_process import ForkedProcess
from meshwright.run.launch.parent_death import Lifeline, lifeline
from meshwright.run.launch.run_folder import Attempt
from meshwright.run.launch.signals import raise_if_interrupted

PREFIX, LOCK = "meshwright-", "lock"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yields a new temporary folder that only this user can read; removes it, and those
    of killed processes.
    """
    _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        lock = Path(name) / LOCK
        part = lock.with_suffix(".part")
        with part.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            part.rename(lock)  # locked before others can see it
            yield lock.parent


def _remove_abandoned() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError):  # its owner lives and holds the lock, or it is another user's, or just gone
            if lock.parent.lstat().st_uid != os.getuid():
                continue
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)


POLL_S = 0.02  # how often the parent looks at its ranks
TAIL_LINES = 20  # of its log, shown for a rank that ended without a record
SIGTERM_EXIT_CODE = 128 + signal.SIGTERM  # how ranks end that stopped together, after one of them was told to
CLEAN_EXIT_CODES = (0, -signal.SIGTERM, SIGTERM_EXIT_CODE)  # how a rank may end that was told to stop


@dataclass(frozen=True)
class LaunchTimeouts:
    """The seconds that the parent waits before it kills: for records after a failure, and for a save after a
    signal.

    `terminate_s` is below the 30 s after which schedulers kill.
    """

    failure_s: float = 2.0
    terminate_s: float = 25.0
    interrupt_s: float = 10.0


@dataclass(frozen=True)
class FirstFailure:
    """The rank that failed first, and the text to show."""

    rank: int
    text: str


@dataclass(frozen=True)
class LaunchResult:
    """The result of a launch: the exit code, the failure to show, and the ranks that had to be killed."""

    exit_code: int
    failure: FirstFailure | None = None
    killed_ranks: tuple[int, ...] = ()


LocalLauncher = Callable[[list[str], int, Attempt], LaunchResult]  # arguments of the command, ranks, attempt


class RanksFailed(Exception):
    """Local ranks failed; `result` says how."""

    def __init__(self, result: LaunchResult) -> None:
        self.result = result
        super().__init__(f"the ranks ended with code {result.exit_code}")


@dataclass
class _Rank:
    rank: int
    process: subprocess.Popen[bytes] | ForkedProcess
    log: Path | None
    log_start: int = 0
    ended_at: float = 0.0  # on the clock of the records
    ended_s: float | None = None  # on a clock that nobody sets; None while it runs

    def is_alive(self) -> bool:
        if self.ended_s is None and self.process.poll() is not None:
            self.ended_at, self.ended_s = time.time(), time.monotonic()
            _kill_group(self.process.pid)  # what the rank started and left behind
        return self.ended_s is None

    def has_failed(self, should_stop: bool) -> bool:
        return self.ended_s is not None and self.process.returncode not in (
            CLEAN_EXIT_CODES if should_stop else (0, SIGTERM_EXIT_CODE)
        )


ForkMain = Callable[[Mapping[str, str]], None]  # what a fork runs, called with the environment of its rank


def launch_ranks(
    program: Sequence[str] | ForkMain,
    world: int,
    attempt: Attempt,
    env: Mapping[str, str],
    timeouts: LaunchTimeouts | None = None,
) -> LaunchResult:
    """Starts `world` processes and returns how they ended; none of them, nor their children, is left.

    `program` holds the arguments of a new Python interpreter, or is what a fork of this process calls. Every
    rank finds in its environment, besides `env`: RANK, LOCAL_RANK, WORLD_SIZE, the store, the lifeline and
    the folder of the attempt.
    """
    timeouts = timeouts or LaunchTimeouts()
    start = partial(_fork, program) if callable(program) else partial(_execute, program)
    ranks: list[_Rank] = []
    raise_if_interrupted()
    with temporary_folder() as private, lifeline() as life, _signals() as received:
        try:
            for rank in range(world):
                variables = _environment(env, rank, world, private / "store", life.read_fd, attempt)
                ranks.append(_start(start, rank, attempt.run_folder, variables, life))
            killed = _watch(ranks, received, timeouts)
        finally:
            for each in ranks:
                if each.is_alive():  # only then its number surely is still its own
                    _kill_group(each.process.pid)
            for each in ranks:
                each.process.wait()
    return _outcome(ranks, killed, received, attempt.folder)


def _environment(
    env: Mapping[str, str], rank: int, world: int, store: Path, lifeline_fd: int, attempt: Attempt
) -> dict[str, str]:
    defaults = {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": str(max(1, available_cores() // world)),
        "PYTHONUNBUFFERED": "1",  # the last words of a rank that is killed are in its log
    }
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    ours = {"MESHWRIGHT_STORE": str(store), "MESHWRIGHT_LIFELINE": str(lifeline_fd)}
    ours["MESHWRIGHT_ATTEMPT"] = str(attempt.folder)
    return {**defaults, **env, **{key: str(value) for key, value in places.items()}, **ours}


def _execute(
    argv: Sequence[str], env: Mapping[str, str], life: Lifeline, output: BinaryIO | None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *argv],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(life.read_fd,),
        start_new_session=True,
    )


def _fork(main: ForkMain, env: Mapping[str, str], life: Lifeline, output: BinaryIO | None) -> ForkedProcess:
    return ForkedProcess(partial(main, env), None if output is None else output.fileno(), (life.write_fd,))


StartProcess = Callable[
    [Mapping[str, str], Lifeline, BinaryIO | None], subprocess.Popen[bytes] | ForkedProcess
]


def _start(start: StartProcess, rank: int, folder: Path, env: Mapping[str, str], life: Lifeline) -> _Rank:
    if rank == 0:
        return _Rank(rank, start(env, life, None), None)
    log = folder / "logs" / f"rank-{rank}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        log_start = output.tell()  # before the rank moves it
        return _Rank(rank, start(env, life, output), log, log_start)


def _watch(ranks: Sequence[_Rank], received: Sequence[int], limits: LaunchTimeouts) -> tuple[int, ...]:
    """Returns the ranks to kill: when all have ended (none), or when the time of those
    that have not is over.
    """
    told_s: float | None = None
    while alive := [each for each in ranks if each.is_alive()]:
        now = time.monotonic()
        if received and told_s is None:
            told_s = now
            for each in alive:
                each.process.send_signal(signal.SIGTERM)
        stopping = told_s is not None
        deadlines = [
            each.ended_s + limits.failure_s
            for each in ranks
            if each.ended_s is not None and each.has_failed(stopping)
        ]
        if told_s is not None:
            deadlines.append(
                told_s + (limits.interrupt_s if received[0] == signal.SIGINT else limits.terminate_s)
            )
        if signal.SIGINT in received[1:] or now > min(deadlines, default=now):
            return tuple(each.rank for each in alive)
        time.sleep(POLL_S)
    return ()


def _outcome(
    ranks: Sequence[_Rank], killed: tuple[int, ...], received: Sequence[int], folder: Path
) -> LaunchResult:
    records = read_failures(folder)
    stopping = bool(received)
    silent = [
        each
        for each in ranks
        if each.rank not in records and each.rank not in killed and each.has_failed(stopping)
    ]
    found = [
        (record.time, record.rank) for record in records.values() if record.kind not in ("lost_peer", "hang")
    ]
    found += [(each.ended_at, each.rank) for each in silent]
    if not found and not stopping:
        found = [(record.time, record.rank) for record in records.values()]
    if not found:
        agreed = any(each.process.returncode == SIGTERM_EXIT_CODE for each in ranks)
        return LaunchResult(
            128 + received[0] if stopping else SIGTERM_EXIT_CODE if agreed else 0, None, killed
        )
    reports = sorted((record.time, record.rank) for record in records.values() if record.kind == "hang")
    if (
        reports
        and not stopping
        and not any(record.kind in ("error", "plan_error") for record in records.values())
    ):
        return LaunchResult(1, _describe_report(records[reports[0][1]], silent, records, folder), killed)
    _, rank = min(found)
    record = records.get(rank)
    if record is not None and record.kind == "plan_error":
        return LaunchResult(2, FirstFailure(rank, record.message), killed)
    text = describe_failure(record) if record is not None else _guess_cause(ranks[rank])
    if record is not None and record.kind == "lost_peer":
        gone = [str(each.rank) for each in ranks if each.process.returncode == 0]
        text += f"\nended before, without an error: rank {', '.join(gone)}" if gone else ""
    others = [str(failure_path(folder, other)) for other in sorted(records) if other != rank]
    text += f"\nthe other ranks reported: {', '.join(others)}" if others else ""
    return LaunchResult(1, FirstFailure(rank, text), killed)


def _describe_report(
    record: FailureRecord, silent: Sequence[_Rank], records: Mapping[int, FailureRecord], folder: Path
) -> FirstFailure:
    said, guesses = describe_failure(record), [_guess_cause(each) for each in silent]
    # a backend aborts the rank that gets a message of another size than it expects: it is a victim, and the
    # report knows more
    first = [] if any(each.process.returncode == -signal.SIGABRT for each in silent) else guesses
    text = "\n".join([*first, said, *(guess for guess in guesses if guess not in first)])
    others = [str(failure_path(folder, other)) for other in sorted(records) if other != record.rank]
    text += f"\nthe other ranks reported: {', '.join(others)}" if others else ""
    return FirstFailure(silent[0].rank if first else record.rank, text)


def _guess_cause(each: _Rank) -> str:
    code = each.process.returncode
    if code < 0:
        text = f"rank {each.rank} was killed by signal {-code} ({signal.strsignal(-code)})"
        if -code == signal.SIGKILL:
            text += (
                "\nif no user did this, the system did, because memory ran out: lower micro_batch, or use "
                "a plan that needs less"
            )
    else:
        text = f"rank {each.rank} ended with exit code {code} without recording an error"
    if each.log is None:
        return text
    with each.log.open("rb") as file:
        file.seek(each.log_start)
        lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join([text, f"the end of {each.log}:" if lines else f"{each.log} is empty", *lines])


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
        os.killpg(pid, signal.SIGKILL)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Yields the SIGINT and SIGTERM that arrive meanwhile, in order; they have no other effect. Previous
    handlers are restored.

    SIGUSR1, which schedulers send ahead of a time limit, counts as SIGTERM.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.SIGTERM if number == signal.SIGUSR1 else number)

    previous = {
        number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
