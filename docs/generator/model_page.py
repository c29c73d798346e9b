"""Makes the page of model families: the essay of the coverage benchmark, its result, and layer roles."""

import ast
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from docs.generator.essay import NOTE, PACKAGE, Essay, cell, markdown

PAGE = "docs/reference/models.md"
RESULT, SOURCE = "benchmarks/results/model_coverage.json", "benchmarks/models/model_coverage.py"
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
    essay = ast.get_docstring(ast.parse((root / SOURCE).read_text(encoding="utf-8")), clean=False) or ""
    roles = next((module.text for module in modules if module.path == ROLES), "")
    held = "It holds" if measured["holds"] else "It does NOT hold"
    when = f"{measured['date'][:10]}, commit {_short(measured['commit'])}, {_versions(measured['versions'])}"
    lines = [
        *(
            "# Models",
            "",
            NOTE.format(origin=f"{SOURCE} and its result"),
            "",
            markdown(essay.strip()),
            "",
            "## Families",
            "",
        ),
        f"Claim: {measured['claim']}. {held}: {measured['median']:.0f} of "
        f"{len(measured['values'])} families. {when}.",
        *("", "| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)),
        *map(_family_row, measured["detail"]["families"]),
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


def _short(commit: str) -> str:
    return commit[:12] + ("-dirty" if commit.endswith("-dirty") else "")


def _versions(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {found[name]}" for name in ("torch", "transformers") if name in found)
