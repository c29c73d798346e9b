"""Makes the page of combinations: which techniques were tried together, and why plans are refused."""

import ast
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docs.generator.essay import NOTE, cell, markdown

RESULT, SOURCE = "benchmarks/results/random_plans.json", "benchmarks/random_plans/random_plans.py"
REVIEWED = "benchmarks/random_plans/combinations.toml"
PAGE = "docs/reference/combinations.md"


def combination_page(root: Path) -> dict[str, str]:
    """Returns the page by its path, once the benchmark has a result."""
    if not (root / RESULT).exists():
        return {}
    measured = json.loads((root / RESULT).read_text(encoding="utf-8"))
    essay = ast.get_docstring(ast.parse((root / SOURCE).read_text(encoding="utf-8")), clean=False) or ""
    refusals = tomllib.loads((root / REVIEWED).read_text(encoding="utf-8"))["refusals"]
    verdict, detail = "It holds" if measured["holds"] else "It does NOT hold", measured["detail"]
    lines = [
        *(
            "# Combinations",
            "",
            NOTE.format(origin=f"{SOURCE}, its result and {REVIEWED}"),
            "",
            markdown(essay.strip()),
            "",
        ),
        f"{verdict}: of {detail['drawn']} plans under seed {detail['seed']}, {detail['matched']} matched and "
        f"{detail['refused']} were refused; the worst difference is {detail['worst']:.1e}. "
        f"{measured['date'][:10]}, commit {measured['commit'][:12]}.",
        *("", "## Pairs of techniques", ""),
        "Techniques are named as in a config: a strategy (with its `mode` or `stage`), a `schedule` of the",
        "`pipeline` strategy, or an option of a strategy or of the job. `zero replicate_axis` is HSDP.",
        "Pipeline `scatter` sends a value in slices, one from each rank that holds it.",
        "",
        "Allowed: plans with both equal one device. Refused: all plans with both were refused; the reasons",
        "stand in brackets, the most frequent first. Two options of one strategy, such as `zero 1` and",
        "`zero 2`, are in no column.",
        *("", "| technique | allowed with | refused with | not tried with |", "| --- | --- | --- | --- |"),
        *_rows(detail["pairs"], detail["kinds"]),
        *("", "## Reasons", "", "| reason | plans | why |", "| --- | --- | --- |"),
        *(
            f"| {cell(r['reason'])} | {detail['by_reason'].get(r['reason'], 0)} | {cell(r['why'])} |"
            for r in refusals
        ),
        "",
    ]
    return {PAGE: "\n".join(lines)}


def _rows(pairs: Mapping[str, Any], kinds: Mapping[str, str]) -> Iterator[str]:
    """Yields one row per technique: the others with which it is allowed, refused, or was not tried."""
    counts = {frozenset(name.split(" + ")): found for name, found in pairs.items()}
    for name in kinds:
        allowed, refused, untried = [], [], []
        for other in (other for other in kinds if other != name):
            found = counts.get(frozenset((name, other)))
            if found is None:
                untried += [other] if kinds[other] != kinds[name] else []
            elif found["matched"]:
                allowed.append(other)
            else:
                refused.append(f"{other} ({'; '.join(list(found['refused'])[:2])})")
        columns = (name, ", ".join(allowed), ", ".join(refused), ", ".join(untried))
        yield f"| {' | '.join(map(cell, columns))} |"
