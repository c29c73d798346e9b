"""Makes the page of benchmarks: every claim with its figures, spread, date and command, from the results.

`claims.toml` in the folder above groups the claims and says each one in the words of the field; figures come
from the results alone. A result without an entry there is listed under *Others*, with the claim that it
states itself.
"""

import ast
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.generator.benchmarks.gpu_table import gpu_lines
from docs.generator.essay import NOTE, cell, markdown

PAGE = "docs/benchmarks.md"
RESULTS, CLAIMS = "benchmarks/results", "docs/generator/claims.toml"
VERDICTS = {"True": "yes", "False": "no", "unresolved": "unresolved"}
INTRODUCTION = """Every claim of this project is measured by a module of `benchmarks/`, which writes
`benchmarks/results/NAME.json`: all raw values, the machine, the versions, the date and the commit. This page
is generated from those files. `make bench NAME=...` measures a claim again.

How to read it:

- A *ratio* is ours divided by the other's, as the median of interleaved rounds, with its 95 % interval in
  brackets. Below 1 we are faster or smaller. Behind an error, brackets hold the range over the cases.
- *A/A* is the ratio of two identical configurations in the same rounds: the noise.
- A ratio passes when the upper bound of its interval is at most the bar plus the half-width of A/A. The bar
  is fixed before the first round. *Unresolved*: the noise was too large to tell.
- A *count* says how many cases of all hold. There is nothing to repeat in it.

**Nothing has been measured on more than one GPU, or on more than four processes.** Every figure is from 2
shared CPU cores, unless it stands under [On one GPU](#on-one-gpu), or its row says that it compares with
figures that others published."""


def benchmark_page(root: Path) -> dict[str, str]:
    """Returns the page by its path, once there is a result."""
    results = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((root / RESULTS).glob("*.json"))
    }
    if not results or not (root / CLAIMS).exists():
        return {}
    claims = tomllib.loads((root / CLAIMS).read_text(encoding="utf-8"))
    groups = _grouped(claims, results)
    lines = [
        "# Benchmarks",
        "",
        NOTE.format(origin=f"{RESULTS} and {CLAIMS}"),
        "",
        INTRODUCTION,
        "",
        "## All claims",
        "",
    ]
    for group, names in groups.items():
        lines += [
            f"### {group}",
            "",
            "| claim | figure | bar | holds | measured |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += [_summary(name, claims.get(name, {}), results[name]) for name in names]
        lines.append("")
    lines += gpu_lines(root)
    for group, names in groups.items():
        lines += [f"## {group}: details", ""]
        for name in names:
            lines += _section(root, name, claims.get(name, {}), results[name])
    return {PAGE: "\n".join(lines).rstrip("\n") + "\n"}


def _grouped(claims: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name, claim in claims.items():
        if name in results:
            groups.setdefault(claim["group"], []).append(name)
    others = [name for name in results if name not in claims]
    return groups | ({"Others": others} if others else {})


def _summary(name: str, claim: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    told = f"[{cell(claim.get('says', result['claim']))}](#{name.replace('_', '-')})"
    bar = _number(result["bar"], claim.get("unit", ""))
    verdict = VERDICTS[str(result["holds"])]
    return f"| {told} | {_headline(claim, result)} | {bar} | {verdict} | {result['date'][:10]} |"


def _headline(claim: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """The figure that the claim is about."""
    median, (low, high), unit = result["median"], result["spread"], claim.get("unit", "")
    if unit == "count":
        return f"{median:,.0f} of {claim.get('of', len(result['values'])):,}"
    if low == high or not low <= median <= high:  # a count, or the spread of something else than the median
        return _number(median, unit)
    return f"{_number(median, unit)} [{_number(low, unit)}, {_number(high, unit)}]"


def _number(value: float, unit: str) -> str:
    if unit == "count":
        return f"{value:,.0f}"
    if unit == "percent":
        return f"{100 * value:.3g} %"
    return f"{value:.3f}" if unit in ("", "ratio") else f"{value:.3g} {unit}"


def _section(root: Path, name: str, claim: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"### {name.replace('_', '-')}", "")
    if "says" in claim:
        yield from (f"{cell(claim['says'])}.", "")
    if "note" in claim:
        yield from (claim["note"].strip(), "")
    rows = list(_rows(result["detail"]))
    if rows:
        yield from (
            "| workload | median [95 % interval] | A/A | bar | wall time | holds |",
            "| --- | --- | --- | --- | --- | --- |",
        )
        yield from rows
        yield ""
    yield from _facts(result)
    source = next((root / "benchmarks").rglob(f"{name}.py"), None)
    essay = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")), clean=False) if source else ""
    if essay:
        yield from ("", ":::{dropdown} How it is measured", "", markdown(essay.strip()), "", ":::")
    yield ""


def _rows(detail: Mapping[str, Any]) -> Iterator[str]:
    """One row per workload whose figures are a median with an interval."""
    for name, row in detail.items():
        if not isinstance(row, Mapping):
            continue
        main = row["cpu"] if isinstance(row.get("cpu"), Mapping) else row
        found = next((main[key] for key in ("ratio", "share", "factor") if _is_interval(main.get(key))), None)
        if found is None:
            continue
        twin, wall = main.get("aa", row.get("aa")), row.get("wall")
        cells = [
            cell(name),
            _interval(found),
            _interval(twin) if _is_interval(twin) else "",
            _plain(main.get("bar", row.get("predicted"))),
            _interval(wall["ratio"]) if isinstance(wall, Mapping) and _is_interval(wall.get("ratio")) else "",
            VERDICTS.get(str(main.get("holds", row.get("holds"))), ""),
        ]
        yield f"| {' | '.join(cells)} |"


def _is_interval(value: object) -> bool:
    return isinstance(value, Mapping) and {"median", "low", "high"} <= set(value)


def _interval(found: Mapping[str, float]) -> str:
    return f"{found['median']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def _plain(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, (int, float)) else ""


def _facts(result: Mapping[str, Any]) -> Iterator[str]:
    """The date, machine and number of repeats of a measurement."""
    machine, versions, values = result["machine"], result["versions"], result["values"]
    dirty = "-dirty" if result["commit"].endswith("-dirty") else ""
    yield f"- Command: `{result['command']}`"
    yield f"- Date: {result['date'][:16].replace('T', ' ')} UTC, commit `{result['commit'][:12]}{dirty}`"
    memory = f"{machine['memory_gib']} GiB"
    yield f"- Machine: {machine['cpu']}, {machine['cores']} cores, {memory}, {machine['system']}"
    yield f"- Versions: {', '.join(f'{package} {version}' for package, version in versions.items())}"
    rounds = (
        f"{result['repeats']:,} rounds, {result['discarded']} more discarded because the machine was busy; "
    )
    yield f"- Measured: {rounds if result['repeats'] > 1 else ''}{_spread(values)}"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "no single values"
    return f"{len(values):,} values from {min(values):.3g} to {max(values):.3g}"
