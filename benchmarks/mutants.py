"""Measures how many planted faults the test suite notices: mutation testing with faults chosen by hand.

    python -m benchmarks.mutants                      every mutant, first the default tier, then the full one
    python -m benchmarks.mutants --until nearest      only the stages mirrored and importers
    python -m benchmarks.mutants --only NAME ...      only these mutants
    python -m benchmarks.mutants --check              apply every mutant and compile it; run no test

A mutant (benchmarks/mutants.toml) is one edit of one file of the library: a dropped wait, a wrong axis, a
shard that is off by one. Each is planted alone, in a copy of the tracked files, and pytest runs until the
first failure:

    stage      test files                                                            tier
    mirrored   tests/FOLDER/test_NAME*.py of src/meshwright/FOLDER/NAME.py           default
    importers  those that import the module, or reach it by the fewest imports           default
    rest       all others, by their distance in the graph of imports                 default
    full       files with cases that tests/tiers.toml leaves out, with --full        full

    share of a tier = mutants caught in its stages, or in those before it / all mutants

A test that fails catches a mutant only if it passes in a copy without the fault; else it is deselected and
the stage runs again. A hang (the timeout of a test, or of a whole stage) counts as caught and is recorded
as such.

All mutants run against the nearest tests first, survivors then against the others of the default tier, and
survivors of those against the full tier.

Cost: seconds for most mutants, the time of both tiers for one that survives. Rows are kept in
benchmarks/scratch by commit, so a later run continues where one was stopped. The result `suite_power` is
written when every mutant has its row.
Limits: faults chosen by hand show which kinds of faults are noticed, not how many are left. Checks of the
form of the source (tests/house) are left out.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Literal

import psutil

from benchmarks.harness.case_store import CaseStore
from benchmarks.harness.result import RESULTS, ROOT, Result
from benchmarks.nearest_tests import ImportGraph, Stage, Tier, stages

TABLE = Path(__file__).with_suffix(".toml")
PACKAGE = "src/meshwright"
NAME, CLAIM = "suite_power", "the default tier catches 90 % of the planted faults, and the full tier 95 %"
DEFAULT_BAR, FULL_BAR = 0.90, 0.95
STAGE_LIMIT_S = {"mirrored": 900.0, "importers": 1800.0, "rest": 3600.0, "full": 7200.0}
PASSED, NOTHING_COLLECTED, INTERNAL_ERROR, USAGE_ERROR = 0, 5, 3, 4  # exit codes of pytest
FAILED_LINE = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
TIMEOUT_MARKS = ("from pytest-timeout", "+ Timeout +")
FailureKind = Literal["", "test", "timeout", "error"]
Depth = Literal["nearest", "default", "full"]
PASSES: dict[Depth, tuple[str, ...]] = {
    "nearest": ("mirrored", "importers"),
    "default": ("rest",),
    "full": ("full",),
}  # stages of the passes over all mutants, the cheapest first
Row = Mapping[str, object]


@dataclass(frozen=True)
class Mutant:
    """One fault: `old`, which occurs exactly once in `file` (below src/meshwright), becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    breaks: str

    @property
    def path(self) -> str:
        """The file, relative to the repository."""
        return f"{PACKAGE}/{self.file}"

    @property
    def package(self) -> str:
        """The first package below meshwright, with the next one for strategies: "parallel/data", "engine"."""
        parts = self.file.split("/")
        return "/".join(parts[: 2 if parts[0] == "parallel" else 1])

    @property
    def digest(self) -> str:
        """A digest of the fault, so that a stored row of an older fault of this name is not used."""
        return sha256(repr((self.file, self.old, self.new)).encode()).hexdigest()[:12]

    def apply(self, source: str) -> str:
        """Returns `source` with the fault. Raises ValueError where `old` does not occur exactly once."""
        count = source.count(self.old)
        if count != 1:
            text = f"mutant {self.name}: its old text occurs {count} times in {self.path}; needed is once"
            raise ValueError(f"{text}; adapt the entry in {TABLE.name}:\n{self.old}")
        return source.replace(self.old, self.new)


def load_mutants(table: Path = TABLE) -> tuple[Mutant, ...]:
    """Returns the mutants of a table. Raises ValueError where two have one name, or `old` equals `new`."""
    mutants = tuple(Mutant(**row) for row in tomllib.loads(table.read_text(encoding="utf-8"))["mutants"])
    names = [mutant.name for mutant in mutants]
    wrong = sorted({name for name in names if names.count(name) > 1})
    wrong += [mutant.name for mutant in mutants if mutant.old == mutant.new]
    if wrong:
        text = f"mutants listed twice, or that change nothing: {', '.join(wrong)}"
        raise ValueError(f"{text}; repair {table.name}")
    return mutants


def check(mutants: Iterable[Mutant], root: Path = ROOT) -> list[str]:
    """Returns the problems of the mutants: texts that do not occur once, files that do not compile."""
    problems = []
    for mutant in mutants:
        path = root / mutant.path
        if not path.is_file():
            problems.append(f"mutant {mutant.name}: there is no file {mutant.path}; adapt {TABLE.name}")
            continue
        try:
            ast.parse(mutant.apply(path.read_text(encoding="utf-8")), mutant.path)
        except ValueError as error:
            problems.append(str(error))
        except SyntaxError as error:
            problems.append(f"mutant {mutant.name} does not compile: {error}; adapt its new text")
    return problems


@dataclass(frozen=True)
class Outcome:
    """The end of a run of pytest: "" where nothing failed; `test` is the first that failed, if it is
    known.
    """

    failure: FailureKind
    test: str = ""
    code: int = PASSED
    tail: str = ""


def outcome_of(code: int, output: str) -> Outcome:
    """Returns the outcome for an exit code of pytest and its output."""
    if code in (PASSED, NOTHING_COLLECTED):
        return Outcome("", code=code)
    found = FAILED_LINE.findall(output)
    timed_out = any(mark in output for mark in TIMEOUT_MARKS)
    failure: FailureKind = "timeout" if timed_out else "test" if found else "error"
    return Outcome(failure, found[0].strip() if found else "", code, _tail(output))


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-20:])


def tracked_files(root: Path = ROOT) -> list[str]:
    """Returns the files that git tracks in a repository, without those that were deleted."""
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, check=True)
    return [name for name in listed.stdout.decode().split("\0") if name and (root / name).is_file()]


class Copy:
    """A copy of the files of a repository, in which a mutant is planted and tested."""

    def __init__(self, folder: Path, files: Iterable[str], source: Path = ROOT) -> None:
        self.root = folder
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, folder / name)

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Plants the mutant, and restores the file afterwards."""
        path = self.root / mutant.path
        before = path.read_text(encoding="utf-8")
        self._write(path, mutant.apply(before))
        try:
            yield
        finally:
            self._write(path, before)
            # examples that failed with this mutant would be tried first with the next one
            shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)

    def pytest(self, arguments: Sequence[str], limit_s: float) -> Outcome:
        """Runs pytest until its first failure; ends it, with all its processes, after `limit_s`."""
        argv = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
        env = {**os.environ, "PYTHONPATH": f"{self.root / 'src'}{os.pathsep}{self.root}"}
        # a file, not a pipe: a process that outlives pytest would keep a pipe open
        with TemporaryFile() as written:
            with subprocess.Popen(argv, cwd=self.root, env=env, stdout=written, stderr=written) as job:
                try:
                    code = job.wait(limit_s)
                except subprocess.TimeoutExpired:
                    _kill(job.pid)
                    code = None
            written.seek(0)
            output = written.read().decode(errors="replace")
        return Outcome("timeout", code=-1, tail=_tail(output)) if code is None else outcome_of(code, output)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Python matches compiled code by time in seconds and size, and both may equal those of the last text
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


def _kill(pid: int) -> None:
    parent = psutil.Process(pid)
    for process in [*parent.children(recursive=True), parent]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


@dataclass
class Runner:
    """Tests mutants in `mutated`, and repeats failed tests in `unchanged`, a copy without a mutant."""

    mutated: Copy
    unchanged: Copy
    graph: ImportGraph
    tiers: Mapping[str, object]
    num_processes: int = 1
    _failing_unchanged: set[str] = field(default_factory=set)

    def run(self, mutant: Mutant, depth: Depth, before: Row | None = None) -> dict[str, object]:
        """Returns the row of a mutant after the stages of a pass; `before` is its row of the pass before."""
        spent_s = float(str(before["seconds"])) if before else 0.0
        started, row = time.monotonic(), _row(mutant, f"survived {depth}")
        with self.mutated.planted(mutant):
            for stage in stages(mutant.path, self.graph, self.tiers):
                outcome = self._run_stage(stage) if stage.name in PASSES[depth] else Outcome("")
                if outcome.failure:
                    caught_by = outcome.test or outcome.tail[-200:]
                    row |= {
                        "tier": stage.tier,
                        "stage": stage.name,
                        "failure": outcome.failure,
                        "caught_by": caught_by,
                    }
                    break
        return {**row, "seconds": round(spent_s + time.monotonic() - started, 1)}

    def _run_stage(self, stage: Stage) -> Outcome:
        while True:
            files = [file for file in stage.files if file not in self._failing_unchanged]
            deselected = [f"--deselect={test}" for test in sorted(self._failing_unchanged)]
            arguments = [*self._options(stage), *deselected, *files]
            outcome = self.mutated.pytest(arguments, STAGE_LIMIT_S[stage.name])
            if (
                not outcome.failure
                or outcome.test in self._failing_unchanged
                or self._is_caused_by_mutant(outcome, stage)
            ):
                return outcome
            self._failing_unchanged.add(outcome.test)

    def _is_caused_by_mutant(self, outcome: Outcome, stage: Stage) -> bool:
        limit_s = STAGE_LIMIT_S["mirrored"]
        if outcome.test:
            collect = [] if "::" in outcome.test else ["--collect-only"]  # a file that cannot be imported
            repeated = self.unchanged.pytest([*collect, outcome.test], limit_s)
            return not repeated.failure or repeated.code == USAGE_ERROR  # an id that pytest has shortened
        if outcome.code in (INTERNAL_ERROR, USAGE_ERROR):  # perhaps conftest.py cannot be imported
            collected = self.unchanged.pytest(["--collect-only", *stage.files[:1]], limit_s)
            if collected.failure:
                text = "pytest does not run in a copy without a mutant; repair the suite first"
                raise RuntimeError(f"{text}:\n{collected.tail}")
        return True

    def _options(self, stage: Stage) -> list[str]:
        parallel = self.num_processes > 1 and stage.name in ("rest", "full")
        options = ["-n", str(self.num_processes), "--dist", "worksteal"] if parallel else []
        return [*options, *(["--full"] if stage.tier == "full" else [])]


def _row(mutant: Mutant, tier: str) -> dict[str, object]:
    names = {"case": mutant.name, "digest": mutant.digest, "file": mutant.file, "package": mutant.package}
    return {**names, "tier": tier, "stage": "", "failure": "", "caught_by": ""}


def known_rows(rows: Mapping[str, Row], mutants: Iterable[Mutant]) -> dict[str, Row]:
    """Returns of stored rows those of the mutants as they are now."""
    digests = {mutant.name: mutant.digest for mutant in mutants}
    return {name: row for name, row in rows.items() if digests.get(name) == row["digest"]}


def run_all(mutants: Sequence[Mutant], last: Depth, num_processes: int, num_workers: int) -> dict[str, Row]:
    """Runs the mutants without a stored row, `num_workers` at a time; returns all known rows."""
    store, graph, files = CaseStore(NAME), ImportGraph(ROOT), tracked_files()
    known = known_rows(store.read(), mutants)
    tiers = tomllib.loads((ROOT / "tests" / "tiers.toml").read_text(encoding="utf-8"))
    with TemporaryDirectory(prefix="mutants-") as folder:
        runners: SimpleQueue[Runner] = SimpleQueue()
        for number in range(num_workers):
            folders = (Path(folder, f"{kind}-{number}") for kind in ("mutated", "unchanged"))
            mutated, unchanged = (Copy(each, files) for each in folders)
            runners.put(Runner(mutated, unchanged, graph, tiers, num_processes))

        def run_one(mutant: Mutant, depth: Depth) -> None:
            runner = runners.get()
            try:
                row = runner.run(mutant, depth, known.get(mutant.name))
            finally:
                runners.put(runner)
            store.add(row)
            known[mutant.name] = row
            summary = f"{mutant.name:<44} {row['tier']:<17} {row['seconds']:>7} s"
            print(f"{summary}  {row['caught_by']}", flush=True)

        with ThreadPoolExecutor(num_workers) as pool:
            for depth in PASSES:
                if _rank(depth) <= _rank(last):
                    todo = [mutant for mutant in mutants if not _is_answered(known.get(mutant.name), depth)]
                    list(pool.map(partial(run_one, depth=depth), todo))
    return known


def _rank(depth: str) -> int:
    return [str(each) for each in PASSES].index(depth)


def _is_answered(row: Row | None, depth: Depth) -> bool:
    if row is None:
        return False
    survived = str(row["tier"]).removeprefix("survived ")
    return survived == row["tier"] or _rank(survived) >= _rank(depth)


def shares(rows: Iterable[Row]) -> dict[Tier, float]:
    """Returns the shares of mutants that the default tier and the full tier catch."""
    found = [row["tier"] for row in rows]
    default, full = found.count("default"), found.count("full")
    return {"default": default / len(found), "full": (default + full) / len(found)}


def write_result(mutants: Sequence[Mutant], rows: Mapping[str, Row], folder: Path = RESULTS) -> Path:
    """Writes suite_power.json from the rows of all mutants; returns its path."""
    share = shares(rows.values())
    breaks = {mutant.name: mutant.breaks for mutant in mutants}
    packages: dict[str, dict[str, int]] = {}
    for row in rows.values():
        counts = packages.setdefault(str(row["package"]), {"mutants": 0, "default": 0, "full": 0})
        counts["mutants"] += 1
        counts["default"] += row["tier"] == "default"
        counts["full"] += row["tier"] in ("default", "full")
    detail = {
        "default": {"share": share["default"], "bar": DEFAULT_BAR, "holds": share["default"] >= DEFAULT_BAR},
        "full": {"share": share["full"], "bar": FULL_BAR, "holds": share["full"] >= FULL_BAR},
        "packages": dict(sorted(packages.items())),
        "missed_by_default": {name: breaks[name] for name, row in rows.items() if row["tier"] != "default"},
        "survivors": {name: breaks[name] for name, row in rows.items() if row["tier"] == "survived full"},
        "timeouts": [name for name, row in rows.items() if row["failure"] == "timeout"],
        "mutants": [rows[mutant.name] for mutant in mutants],
    }
    result = Result.of(
        "mutants",
        CLAIM,
        values=[share["default"], share["full"]],
        median=share["default"],
        spread=(share["default"], share["default"]),
        bar=DEFAULT_BAR,
        holds=share["default"] >= DEFAULT_BAR and share["full"] >= FULL_BAR,
        repeats=len(rows),
        detail=detail,
    )
    return result.write(NAME, folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=CLAIM)
    option = parser.add_argument
    option("--only", nargs="+", default=(), metavar="NAME", help="run only these mutants")
    option("--until", choices=list(PASSES), default="full", help="the last pass over the mutants")
    option("--workers", type=int, default=1, help="mutants at a time")
    option("--processes", type=int, default=1, help="of pytest, for the stages rest and full")
    option("--check", action="store_true", help="apply every mutant, and run no test")
    args = parser.parse_args(argv)
    mutants = load_mutants()
    if unknown := sorted(set(args.only) - {mutant.name for mutant in mutants}):
        parser.error(f"no mutant is called {', '.join(unknown)}; the names are in {TABLE.name}")
    if problems := check(mutants):
        print("\n".join(problems), file=sys.stderr)
        return 1
    if args.check:
        print(f"{len(mutants)} mutants apply and compile")
        return 0
    chosen = [mutant for mutant in mutants if not args.only or mutant.name in args.only]
    rows = run_all(chosen, args.until, args.processes, args.workers)
    share = shares(rows.values())
    caught = ", ".join(f"the {tier} tier catches {tier_share:.1%}" for tier, tier_share in share.items())
    print(f"{len(rows)} mutants: {caught}")
    if len(chosen) == len(mutants) and all(_is_answered(row, "full") for row in rows.values()):
        print(f"wrote {write_result(mutants, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
