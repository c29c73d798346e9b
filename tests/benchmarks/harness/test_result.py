"""The JSON file of a benchmark: its fields, the worst workload in front, and nothing that identifies this
machine.
"""

import json
import socket
from dataclasses import fields, replace
from math import inf
from pathlib import Path

import pytest

from benchmarks.harness.interleaved_timing import Comparison, Cost, Rounds, compare
from benchmarks.harness.result import Result, commit, stored, unresolved, versions

FIELDS = [
    "claim",
    "command",
    "date",
    "commit",
    "machine",
    "versions",
    "repeats",
    "discarded",
    "values",
    "median",
    "spread",
    "bar",
    "holds",
]


def workload(
    ratio: float, bar: float, discarded: int = 0, twin: float = 1.0
) -> tuple[Rounds, Comparison, Comparison]:
    costs = {"torch": Cost(1.0, 1.0), "twin": Cost(twin, twin), "meshwright": Cost(ratio, ratio)}
    rounds = Rounds((costs,) * 15, discarded, 0.25, (0.1,))
    cpu = compare(rounds, "meshwright", base="torch", twin="twin", bar=bar)
    return (
        rounds,
        cpu,
        compare(rounds, "meshwright", base="torch", twin="twin", bar=bar, figure="wall_s"),
    )


def test_a_result_has_the_agreed_fields_and_a_detail():
    assert [field.name for field in fields(Result)] == [*FIELDS, "detail"]


def test_the_workload_furthest_above_its_bar_is_the_figure_of_the_claim():
    result = Result.of_comparisons(
        "x",
        "x is cheap",
        {"large": workload(1.01, 1.02, 2), "small": workload(1.05, 1.02, 3), "toy": workload(1.06, 1.1)},
    )
    assert (result.median, result.bar, result.holds) == (1.05, 1.02, False)
    assert (result.repeats, result.discarded) == (15, 5)
    assert set(result.detail) == {"large", "small", "toy"}


def test_a_claim_holds_when_every_workload_does():
    assert (
        Result.of_comparisons(
            "x", "x is cheap", {"large": workload(1.01, 1.02), "toy": workload(1.06, 1.1)}
        ).holds
        is True
    )


@pytest.mark.parametrize(
    ("values", "bar", "holds"), [([0.1, 0.2], 2, True), ([0.1, 0.2], 3, False), ([0.1, 0.2, inf], 2, False)]
)
def test_a_count_holds_when_enough_cases_are_below_the_limit_and_none_above(
    values: list[float], bar: int, holds: bool
):
    result = Result.of_count("x", "many do", values, limit=0.5, bar=bar, detail={"cases": []})
    assert result.holds is holds
    assert (result.median, result.spread, result.bar) == (2, (2, 2), bar)
    assert "Infinity" not in json.dumps(result.values)


def test_a_result_is_written_as_json_without_the_name_of_the_machine(tmp_path: Path):
    path = Result.of_comparisons("x", "x is cheap", {"large": workload(1.01, 1.02)}).write(
        "x", tmp_path / "results"
    )
    written = json.loads(path.read_text())
    assert path.name == "x.json"
    assert list(written) == [*FIELDS, "detail"]
    assert written["command"] == "make bench NAME=x"
    assert written["values"] == [1.01] * 15
    assert "name" not in written["machine"]
    assert socket.gethostname() not in json.dumps(written["machine"])


def test_rows_that_were_measured_again_are_merged_with_the_others_and_have_their_dates(tmp_path: Path):
    noisy = workload(1.05, 1.1, 3, twin=1.2)
    first = Result.of_comparisons("x", "x is cheap", {"large": workload(1.01, 1.02, 2), "small": noisy})
    first = replace(first, commit="before", detail={**first.detail, "peak": {"ours": 3}})
    assert first.holds == "unresolved"
    first.write("x", tmp_path)
    previous = stored("x", tmp_path)
    assert previous["holds"] == "unresolved"
    assert unresolved(previous) == ("small",)
    merged = Result.of_comparisons("x", "x is cheap", {"small": workload(1.06, 1.1, 1)}).merge_previous(
        previous
    )
    assert (merged.holds, merged.median, merged.bar, merged.repeats, merged.discarded) == (
        True,
        1.01,
        1.02,
        15,
        3,
    )
    assert merged.detail["peak"] == {"ours": 3}
    merged.write("x", tmp_path)
    rows = stored("x", tmp_path)["detail"]
    assert rows["large"]["measured"]["commit"] == "before"
    assert rows["small"]["measured"]["commit"] == merged.commit
    assert rows["small"]["cpu"]["ratio"]["median"] == 1.06


def test_a_missing_package_is_reported_as_not_installed():
    assert versions(["no-such-package"])["no-such-package"] == "not installed"


def test_a_folder_without_git_has_an_unknown_commit(tmp_path: Path):
    assert commit(tmp_path) == "unknown"
