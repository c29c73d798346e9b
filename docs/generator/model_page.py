"""Makes the page of models: the essays and results of their benchmarks, and the layer roles."""

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from docs.generator.essay import NOTE, PACKAGE, Essay, cell, markdown

PAGE = "docs/reference/models.md"
RESULT, SOURCE = "benchmarks/results/model_coverage.json", "benchmarks/models/model_coverage.py"
HEADS_RESULT, HEADS_SOURCE = "benchmarks/results/hf_defaults.json", "benchmarks/models/hf_defaults.py"
ROLES = f"{PACKAGE}/model/tensor_parallel/layer_roles.py"
COLUMNS = (
    "family",
    "class",
    "from",
    "blocks in block calls",
    "shardable layers by role",
    "declared",
    "error at 2",
    "error at 3",
    "round trip",
)


def model_page(root: Path, modules: Iterable[Essay]) -> dict[str, str]:
    """Returns the page by its path, once the benchmark has a result."""
    if not (root / RESULT).exists():
        return {}
    measured = json.loads((root / RESULT).read_text(encoding="utf-8"))
    roles = next((module.text for module in modules if module.path == ROLES), "")
    lines = [
        *(
            "# Models",
            "",
            NOTE.format(origin=f"{SOURCE} and its result"),
            "",
            _essay(root / SOURCE),
            "",
            "## Families",
            "",
            _claim(measured, "families"),
        ),
        *("", "| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)),
        *map(_family_row, measured["detail"]["families"]),
        *_heads_section(root),
        *("", "## Shardable layers and their roles", "", markdown(roles), ""),
    ]
    return {PAGE: "\n".join(lines)}


def _family_row(row: Mapping[str, Any]) -> str:
    errors = [f"{error:.1e}" for error in row["errors"].values()]
    sharded = row["layer_roles"]
    told = (row["family"], f"`{row['class']}`", row["source"], row["blocks"], sharded, row["declared"])
    trip = row["round_trip"]
    return (
        "| "
        + " | ".join([*map(cell, told), *errors, f"{trip['difference']:.1e} ({cell(trip['compared'])})"])
        + " |"
    )


def _heads_section(root: Path) -> Iterator[str]:
    """Yields the lines on heads with the default loss, once their benchmark has a result."""
    if not (root / HEADS_RESULT).exists():
        return
    measured = json.loads((root / HEADS_RESULT).read_text(encoding="utf-8"))
    rows = measured["detail"]["heads"]
    yield from ("", "## Heads with the default loss", "", _essay(root / HEADS_SOURCE), "")
    yield from (_claim(measured, "heads that have a loss"), "")
    yield "| head | for | batch | error on one device | worst error of a plan | plans that are refused |"
    yield "| --- | --- | --- | --- | --- | --- |"
    yield from (_head_row(row) for row in rows if "refused" not in row)
    yield from ("", "### What is refused, and why", "", "| head | refused | message |", "| --- | --- | --- |")
    for row in rows:
        for problem, where in _refusals(row).items():
            yield f"| `{row['case']}` | {', '.join(where)} | {cell(problem)} |"


def _head_row(row: Mapping[str, Any]) -> str:
    errors = [outcome for outcome in row["plans"].values() if isinstance(outcome, float)]
    refused = [name for name, outcome in row["plans"].items() if not isinstance(outcome, float)]
    cells = (
        f"`{row['case']}`",
        cell(row["kind"]),
        cell(row["collator"]),
        f"{row['one device']:.1e}" if isinstance(row["one device"], float) else cell(row["one device"]),
        f"{max(errors):.1e}" if errors else "",
        ", ".join(map(cell, refused)),
    )
    return f"| {' | '.join(cells)} |"


def _refusals(row: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the first problem of each refusal of a head, with the plans that have it."""
    outcomes = {"every plan": row["refused"]} if "refused" in row else row["plans"]
    found: dict[str, list[str]] = {}
    for name, outcome in outcomes.items():
        if not isinstance(outcome, float):
            found.setdefault(outcome.partition("\n")[0].removeprefix("refused: "), []).append(cell(name))
    return found


def _essay(source: Path) -> str:
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")), clean=False) or ""
    return markdown(text.strip())


def _claim(measured: Mapping[str, Any], cases: str) -> str:
    held = "It holds" if measured["holds"] else "It does NOT hold"
    when = f"{measured['date'][:10]}, commit {_short(measured['commit'])}, {_versions(measured['versions'])}"
    count = f"{measured['median']:.0f} of {len(measured['values'])} {cases}"
    return f"Claim: {measured['claim']}. {held}: {count}. {when}."


def _short(commit: str) -> str:
    return commit[:12] + ("-dirty" if commit.endswith("-dirty") else "")


def _versions(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {found[name]}" for name in ("torch", "transformers") if name in found)
