"""Writes tests/tiers.toml: the cases that `make test` keeps of the expensive test functions.

    python -m benchmarks.suite_tiers JUNIT.xml          from the seconds of a full run
                                                        (make test-full ARGS=--junitxml=JUNIT.xml)
    python -m benchmarks.suite_tiers --add JUNIT.xml    for functions without a selection, from the seconds of
                                                        `make test`, or of a part of it
    python -m benchmarks.suite_tiers --add --slowdown 1.5 JUNIT.xml    on a host that takes so much longer

`make test-full` runs every case. `make test` runs every case of a cheap function; of an expensive one it runs
a selection that covers all pairs of its parameters within a budget of seconds per function, the cheapest
cover first. The selection depends on the file only: the same commit runs the same tests.

    per function:  kept = argmin(seconds)  such that every pair (value of one parameter, value of another) is
                                           in a case
    stop:          when the kept cases take FUNCTION_S, or nothing is left to cover

A function of a single case is left out when that case takes more than CASE_S, unless KEEP names it: those are
the only tests of an entire path (a killed run that resumes, a launch over several processes, a hang that is
reported).
"""

import re
import tomllib
import xml.etree.ElementTree as ElementTree
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean

import pytest
import tomli_w

ROOT = Path(__file__).parents[1]
TIERS = ROOT / "tests" / "tiers.toml"
FUNCTION_S, CASE_S, UNKNOWN_S = 0.35, 2.0, 0.05
KEEP = frozenset(
    {
        "test_a_run_that_is_killed_and_stopped_ends_like_one_left_alone",
        "test_a_rank_killed_under_torchrun_is_started_again_and_repeats_its_steps_bit_for_bit",
    }
)
WORD = re.compile(r"[^\s,\-\[\]]+")
Case = tuple[str, str, str]  # file, function, id of the case ("" without parameters)
Tiers = dict[str, dict[str, list[str]]]  # by file and function, the ids of the cases to keep


class Collector:
    """A pytest plugin that keeps the cases that are collected, in order."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keeps the collected cases."""
        self.cases = [case_of(item) for item in items]


def case_of(item: pytest.Item) -> Case:
    """Returns file (relative to tests/), function and case id of a test item."""
    function, _, case = item.name.partition("[")
    return item.path.relative_to(ROOT / "tests").as_posix(), function, case.removesuffix("]")


def read_tiers() -> Tiers:
    """Returns tests/tiers.toml."""
    return tomllib.loads(TIERS.read_text(encoding="utf-8"))


def is_kept(case: Case, tiers: Tiers) -> bool:
    """Returns whether the default tier runs `case`."""
    file, function, name = case
    kept = tiers.get(file, {}).get(function)
    return kept is None or name in kept


def seconds_of(junit: Path, slowdown: float = 1.0) -> dict[Case, float]:
    """Returns the seconds of every case of a JUnit file that pytest wrote, on a host without `slowdown`."""
    found: dict[Case, float] = {}
    for element in ElementTree.parse(junit).iter("testcase"):
        classname, name = element.get("classname", ""), element.get("name", "")
        function, _, case = name.partition("[")
        file = "/".join(classname.removeprefix("tests.").split(".")) + ".py"
        found[file, function, case.removesuffix("]")] = float(element.get("time", "0")) / slowdown
    return found


def features(case: str) -> set[tuple[str, ...]]:
    """Returns the features of a case: the words of its id, and all pairs of them."""
    words = sorted(set(WORD.findall(case)))
    return {*((word,) for word in words), *combinations(words, 2)}


def cover(cases: Sequence[tuple[str, float]], budget_s: float) -> list[str]:
    """Returns the ids that cover most features per second, until `budget_s` is spent; at least one."""
    missing = set().union(*(features(case) for case, _ in cases))
    kept: list[str] = []
    spent, left = 0.0, list(cases)
    while left and (missing or not kept):
        best = max(left, key=lambda each: (len(features(each[0]) & missing) + 1e-9) / max(each[1], 0.01))
        if kept and (spent + best[1] > budget_s or not features(best[0]) & missing):
            break
        left.remove(best)
        kept.append(best[0])
        spent += best[1]
        missing -= features(best[0])
    order = [case for case, _ in cases]
    return sorted(kept, key=order.index)


def selection(cases: Iterable[Case], seconds: dict[Case, float], before: Tiers, *, adds: bool) -> Tiers:
    """Returns, by file and function, the ids to keep; functions of which all are kept are left out. If it
    `adds`, functions keep what they have `before`, and those of one case, or that have not run, keep all.
    """
    known_s: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (file, function, _), spent in seconds.items():
        known_s[file, function].append(spent)
    functions: dict[tuple[str, str], list[tuple[str, float]]] = defaultdict(list)
    for file, function, case in cases:
        usual = mean(known_s[file, function] or [UNKNOWN_S])  # a case that was renamed since the run
        functions[file, function].append((case, seconds.get((file, function, case), usual)))
    found: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for (file, function), known in functions.items():
        total_s = sum(spent for _, spent in known)
        selected = before.get(file, {}).get(function) if adds else None
        if selected is not None:
            still_there = [case for case, _ in known if case in selected]
            if still_there or not selected:
                found[file][function] = still_there
                continue
        if adds and (len(known) == 1 or (file, function) not in known_s):
            continue
        if function in KEEP or total_s <= FUNCTION_S or file.startswith(("house/", "docs/")):
            continue
        cheapest = min(spent for _, spent in known)
        kept = cover(known, FUNCTION_S) if cheapest <= CASE_S else []
        if len(kept) < len(known):
            found[file][function] = kept
    return {file: dict(sorted(found[file].items())) for file in sorted(found)}


def main() -> None:
    """Writes tests/tiers.toml, and prints the number of cases and seconds of the selection."""
    parser = ArgumentParser(description="the cases that `make test` keeps of expensive functions")
    parser.add_argument("junit", type=Path, help="what pytest wrote with --junitxml")
    parser.add_argument("--add", action="store_true", help="only for functions without a selection")
    parser.add_argument("--slowdown", type=float, default=1.0, help="of the host of that run")
    asked = parser.parse_args()
    collector = Collector()
    pytest.main(["--collect-only", "-qq", "--full", "tests"], plugins=[collector])
    seconds = seconds_of(asked.junit, asked.slowdown)
    found = selection(collector.cases, seconds, read_tiers(), adds=asked.add)
    head = (
        "# Written by `python -m benchmarks.suite_tiers`: the cases that `make test` keeps of expensive "
        "functions.\n"
    )
    TIERS.write_text(head + tomli_w.dumps(found), encoding="utf-8")
    kept = [case for case in collector.cases if is_kept(case, found)]
    spent, total = (sum(seconds.get(case, UNKNOWN_S) for case in each) for each in (kept, collector.cases))
    print(f"{len(kept)} of {len(collector.cases)} cases, {spent:.0f} of {total:.0f} s")


if __name__ == "__main__":
    main()
