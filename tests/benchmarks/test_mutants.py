"""The mutants apply to the current source, and the runner finds the test that catches one, on a small
tree.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.result import stored
from benchmarks.mutants import (
    Copy,
    Mutant,
    Outcome,
    Runner,
    check,
    known_rows,
    load_mutants,
    outcome_of,
    shares,
    write_result,
)
from benchmarks.nearest_tests import ImportGraph

SUM = Mutant("sum", "sums.py", "a + b", "a - b", "sums are differences")
TREE = {
    "src/meshwright/__init__.py": "",
    "src/meshwright/sums.py": "def add(a, b):\n    return a + b\n\n\ndef same(a):\n    return a\n",
    "tests/test_sums.py": "from meshwright.sums import add\n",
}
NEVER, ADD = "tests/test_sums.py::test_never", "tests/test_sums.py::test_add"


def scripted_pytest(self: Copy, arguments: Sequence[str], limit_s: float) -> Outcome:
    """Stands for pytest: one test always fails, and one fails where the sum is mutated; a loop hangs."""
    text = (self.root / SUM.path).read_text()
    failing = [NEVER, *([ADD] if "a - b" in text else [])]
    failing = [test for test in failing if f"--deselect={test}" not in arguments]
    requested = [test for test in arguments if "::" in test and not test.startswith("-")]
    failing = [test for test in failing if test in (requested or failing)]
    if "while" in text and not requested:
        return Outcome("timeout", code=-1, tail=f"no end after {limit_s} s")
    return Outcome("test", failing[0], 1) if failing else Outcome("")


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(Copy, "pytest", scripted_pytest)
    source = tmp_path / "source"
    for name, text in TREE.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    copies = {name: Copy(tmp_path / name, TREE, source) for name in ("mutated", "unchanged")}
    return Runner(copies["mutated"], copies["unchanged"], ImportGraph(source), {})


def test_every_mutant_applies_and_compiles():
    assert check(load_mutants()) == []


def test_there_are_many_mutants_in_all_packages():
    mutants = load_mutants()
    counts: dict[str, int] = {}
    for mutant in mutants:
        counts[mutant.package] = counts.get(mutant.package, 0) + 1
        assert mutant.breaks
    assert len(mutants) >= 60
    strategies = {f"parallel/{kind}" for kind in ("data", "pipeline", "tensor", "context", "memory")}
    assert strategies | {"engine", "comm", "run", "model", "plan", "verifier"} <= counts.keys()
    assert min(counts[package] for package in ("engine", "comm", "run", "plan")) >= 6


def test_a_text_that_has_changed_is_reported(tmp_path: Path):
    path = tmp_path / SUM.path
    path.parent.mkdir(parents=True)
    path.write_text("a + b\na + b\n")
    twice, missing = check([SUM, replace(SUM, file="gone.py")], tmp_path)
    assert "its old text occurs 2 times in src/meshwright/sums.py; needed is once; adapt" in twice
    assert "there is no file src/meshwright/gone.py" in missing
    path.write_text("a + b\n")
    (broken,) = check([replace(SUM, new="a +")], tmp_path)
    assert "does not compile" in broken


def test_two_mutants_of_one_name_are_refused(tmp_path: Path):
    table = tmp_path / "mutants.toml"
    entry = '[[mutants]]\nname = "sum"\nfile = "sums.py"\nold = "+"\nnew = "-"\nbreaks = "sums"\n'
    table.write_text(entry * 2)
    with pytest.raises(ValueError, match=r"listed twice, or that change nothing: sum; repair mutants\.toml"):
        load_mutants(table)


def test_a_fault_is_caught_by_the_first_test_that_passes_without_it(runner: Runner):
    row = runner.run(SUM, "nearest")
    assert (row["tier"], row["stage"], row["failure"]) == ("default", "mirrored", "test")
    assert row["caught_by"] == ADD, "the other test fails without the fault too"
    assert (runner.mutated.root / SUM.path).read_text() == TREE[SUM.path], "the file is restored"


def test_a_fault_that_no_test_notices_survives(runner: Runner):
    row = runner.run(replace(SUM, old="return a\n", new="return -a\n"), "nearest")
    assert (row["tier"], row["caught_by"]) == ("survived nearest", "")


def test_a_hang_counts_as_caught_and_is_recorded_as_one(runner: Runner):
    row = runner.run(replace(SUM, old="return a\n", new="while a: pass\n"), "nearest")
    assert (row["tier"], row["failure"], row["caught_by"]) == ("default", "timeout", "no end after 900.0 s")


def test_a_survivor_of_the_default_tier_runs_against_the_full_one_and_keeps_its_seconds(runner: Runner):
    tiers = Runner(runner.mutated, runner.unchanged, runner.graph, {"test_sums.py": {}})
    row = tiers.run(SUM, "full", {"seconds": 100.0})
    assert (row["tier"], row["stage"], row["caught_by"]) == ("full", "full", ADD)
    assert float(str(row["seconds"])) >= 100.0


def test_the_outcome_of_a_run_follows_from_exit_code_and_output():
    assert outcome_of(0, "1 passed") == Outcome("")
    assert outcome_of(5, "no tests ran").failure == ""
    failed = outcome_of(1, "FAILED tests/a/test_b.py::test_c[2 x 2, ring] - AssertionError: 1 - 2\n1 failed")
    assert (failed.failure, failed.test) == ("test", "tests/a/test_b.py::test_c[2 x 2, ring]")
    assert outcome_of(2, "ERROR tests/a/test_b.py - ImportError: no").test == "tests/a/test_b.py"
    late = outcome_of(1, "FAILED tests/a/test_b.py::test_c - Failed: Timeout (>120.0s) from pytest-timeout.")
    assert (late.failure, late.test) == ("timeout", "tests/a/test_b.py::test_c")
    assert outcome_of(-11, "").failure == "error"


def test_rows_of_a_changed_mutant_are_not_used():
    rows = {"sum": {"digest": SUM.digest}, "gone": {"digest": "0"}}
    assert known_rows(rows, [SUM]) == {"sum": rows["sum"]}
    assert known_rows(rows, [replace(SUM, new="a * b")]) == {}


def test_the_full_tier_catches_what_the_default_tier_has_caught_too():
    tiers = ["default"] * 8 + ["full", "survived full"]
    assert shares([{"tier": tier} for tier in tiers]) == {"default": 0.8, "full": 0.9}


def test_the_result_names_each_survivor_with_its_effect(tmp_path: Path):
    tiers = {"sum": "default", "late": "full", "never": "survived full"}
    mutants = [replace(SUM, name=name, breaks=f"{name} breaks") for name in tiers]
    rows = {
        name: {"case": name, "package": "sums.py", "tier": tier, "failure": ""}
        for name, tier in tiers.items()
    }
    write_result(mutants, rows, tmp_path)
    result = stored("suite_power", tmp_path)
    assert (result["median"], result["bar"], result["holds"]) == (1 / 3, 0.9, False)
    assert result["detail"]["survivors"] == {"never": "never breaks"}
    assert result["detail"]["missed_by_default"] == {"late": "late breaks", "never": "never breaks"}
    assert result["detail"]["packages"] == {"sums.py": {"mutants": 3, "default": 1, "full": 2}}
    assert result["detail"]["full"] == {"share": 2 / 3, "bar": 0.95, "holds": False}
