"""The page of combinations: which techniques were tried together, with what outcome, and for which reasons plans are refused."""

import ast
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docs.essay import NOTE, cell, markdown

RESULT, SOURCE = "benchmarks/results/random_plans.json", "benchmarks/random_plans.py"
REVIEWED = "benchmarks/combinations.toml"
PAGE = "docs/combinations.md"


def combination_page(root: Path) -> dict[str, str]:
    """The page by its path, once the benchmark has a result."""
    if not (root / RESULT).exists():
        return {}
    measured = json.loads((root / RESULT).read_text(encoding="utf-8"))
    essay = ast.get_docstring(ast.parse((root / SOURCE).read_text(encoding="utf-8")), clean=False) or ""
    refusals = tomllib.loads((root / REVIEWED).read_text(encoding="utf-8"))["refusals"]
    held, detail = "It holds" if measured["holds"] else "It does NOT hold", measured["detail"]
    lines = [
        *(
            "# Combinations",
            "",
            NOTE.format(origin=f"{SOURCE}, its result and {REVIEWED}"),
            "",
            markdown(essay.strip()),
            "",
        ),
        f"{held}: of {detail['drawn']} plans under seed {detail['seed']}, {detail['matched']} matched and {detail['refused']} "
        f"were refused; the worst gap is {detail['worst']:.1e}. {measured['date'][:10]}, commit {measured['commit'][:12]}.",
        *("", "## Pairs of techniques", ""),
        "Allowed: plans with both matched one device. Refused: all plans with both were refused, for these reasons, the most",
        "frequent first. What no column names is one technique with other options, of which a plan has one.",
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
    """One row per technique: with which others it is allowed, refused, or was not tried."""
    met = {frozenset(name.split(" + ")): found for name, found in pairs.items()}
    for name in kinds:
        allowed, refused, untried = [], [], []
        for other in (other for other in kinds if other != name):
            found = met.get(frozenset((name, other)))
            if found is None:
                untried += [other] if kinds[other] != kinds[name] else []
            elif found["matched"]:
                allowed.append(other)
            else:
                refused.append(f"{other} ({'; '.join(list(found['refused'])[:2])})")
        yield f"| {' | '.join(map(cell, (name, ', '.join(allowed), ', '.join(refused), ', '.join(untried))))} |"
