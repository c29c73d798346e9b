"""Writes the pages that follow from the source: one per technique and algorithm, indices, tables of kinds and collectives.

    python -m docs.generate          writes docs/{techniques,algorithms}/*.md, docs/{actions,collectives,models,combinations}.md
    python -m docs.generate --check  writes nothing; fails when a page is not up to date

Nothing is imported, only read: a technique's page is the essay at the top of its file. An action kind is whatever stands
literally in `Action("KIND", ...)`; its meaning is found in the essay of the module that owns it, as a column

    KIND    what it does        OTHER   what that does

or in a sentence as `KIND (what it does)`. The owner is the module that makes actions of this kind, or, when several do,
the first of them in which the kind is described.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs.algorithm_pages import algorithm_pages
from docs.combination_page import combination_page
from docs.essay import NOTE, PACKAGE, Essay, cell, markdown

ROOT = Path(__file__).parents[1]
# what the techniques of a family share: no technique itself
SHARED = (
    "pipeline/send_recv",
    *(f"schedules/{name}" for name in ("list_scheduler", "registry", "schedule")),
    *(
        f"context/{name}"
        for name in (
            "attention_inputs",
            "attention_kernel",
            "head_exchange",
            "mask_blocks",
            "memory_model",
            "ring_attention",
        )
    ),
    "context/sequence_sharding",
    *(f"tensor/{name}" for name in ("comm_accounting", "comm_overlap", "layer_sharding", "validation")),
)
FOLDERS = ("docs/techniques", "docs/algorithms")
COVERAGE, COVERAGE_SOURCE = "benchmarks/results/model_coverage.json", "benchmarks/model_coverage.py"


@dataclass(frozen=True)
class Kind:
    """An action kind, the module that owns it, and its meaning; empty where no essay describes it."""

    name: str
    owner: str
    meaning: str


def essays(root: Path = ROOT) -> list[Essay]:
    """Every module of the package, organ by organ; `plan` first, because its words are defined first."""
    paths = sorted(
        (root / PACKAGE).rglob("*.py"), key=lambda path: ("plan" not in path.parts, path.as_posix())
    )
    trees = [
        (path.relative_to(root).as_posix(), ast.parse(path.read_text(encoding="utf-8"))) for path in paths
    ]
    # Not cleaned: a module's docstring stands at the margin, and cleaning could move an indented picture there.
    return [Essay(path, tree, (ast.get_docstring(tree, clean=False) or "").strip()) for path, tree in trees]


def techniques(modules: Iterable[Essay]) -> list[Essay]:
    """The modules `parallel/FAMILY/NAME.py`, but for what those of a family share.

    Raises ValueError when two families have a technique of one name, because names stand alone in plan files.
    """
    found = [
        essay
        for essay in modules
        if re.fullmatch(rf"{PACKAGE}/parallel/\w+/(schedules/)?[a-z]\w*\.py", essay.path)
    ]
    found = [essay for essay in found if f"{essay.family}/{essay.name}" not in SHARED]
    names = [essay.name for essay in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"techniques of the same name in two families: {', '.join(twice)}; a plan names them alone: rename one"
        )
    return found


def kinds(modules: Iterable[Essay]) -> list[Kind]:
    """Every action kind that the package makes, with its owner and meaning, in the order of the modules."""
    modules = list(modules)
    makers: dict[str, list[Essay]] = {}
    for essay in modules:
        for name in _made(essay.tree):
            makers.setdefault(name, []).append(essay)
    return [_kind(name, making, modules) for name, making in makers.items()]


def _made(tree: ast.Module) -> Iterator[str]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in sorted(found, key=lambda call: (call.lineno, call.col_offset)):
        if isinstance(node.func, ast.Name) and node.func.id == "Action":
            given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "kind")]
            yield from (
                arg.value for arg in given if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )
    for bind in (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "bind"
    ):
        named = (node.value for node in ast.walk(bind) if isinstance(node, ast.Constant))
        yield from (name for name in named if isinstance(name, str) and name.isupper())


def _kind(name: str, making: list[Essay], modules: list[Essay]) -> Kind:
    owners = [essay for essay in making if described(name, essay.text)] or making[:1]
    told = [meaning for essay in (*making, *modules) if (meaning := described(name, essay.text))]
    return Kind(name, owners[0].path, told[0] if told else "")


def described(kind: str, text: str) -> str:
    """The meaning of `kind` in an essay: from a column, else from a sentence; empty when it is not described."""
    column = re.search(
        rf"^ +(?:.*\S {{3,}})?{re.escape(kind)} {{2,}}(?=[a-z])(.+?)(?: {{3,}}|$)", text, re.MULTILINE
    )
    sentence = re.search(rf"\b{re.escape(kind)} \(([^)]+)\)", text)
    found = column or sentence
    return " ".join(found.group(1).split()) if found else ""


def pages(root: Path = ROOT) -> dict[str, str]:
    """The text of every generated page by its path relative to the repository."""
    modules = essays(root)
    found = techniques(modules)
    made = {f"docs/techniques/{essay.name}.md": _technique_page(essay) for essay in found}
    made["docs/techniques/README.md"] = _index_page(found)
    made |= algorithm_pages(modules)
    made["docs/actions.md"] = _actions_page(kinds(modules))
    for essay in modules:
        if essay.path == f"{PACKAGE}/comm/group.py":
            made["docs/collectives.md"] = _collectives_page(essay)
    if (root / COVERAGE).exists():
        made["docs/models.md"] = _models_page(root, modules)
    return made | combination_page(root)


def _technique_page(essay: Essay) -> str:
    head = [
        f"# {essay.name}",
        "",
        NOTE.format(origin=essay.path),
        "",
        f"Family: {essay.family}. Source: `{essay.path}`.",
        "",
    ]
    return "\n".join([*head, markdown(essay.text), ""])


def _index_page(found: Iterable[Essay]) -> str:
    head = [
        "# Techniques",
        "",
        NOTE.format(origin=f"{PACKAGE}/parallel"),
        "",
        "| technique | family | idea |",
        "| --- | --- | --- |",
    ]
    rows = [f"| [{essay.name}]({essay.name}.md) | {essay.family} | {cell(essay.idea)} |" for essay in found]
    return "\n".join([*head, *rows, ""])


def _actions_page(found: Iterable[Kind]) -> str:
    head = [
        "# Action kinds",
        "",
        NOTE.format(origin=PACKAGE),
        "",
        "| kind | owner | meaning |",
        "| --- | --- | --- |",
    ]
    rows = [f"| `{kind.name}` | `{kind.owner}` | {cell(kind.meaning)} |" for kind in found]
    return "\n".join([*head, *rows, ""])


def _collectives_page(essay: Essay) -> str:
    """What stands at the class `Group`: what goes into every collective, what comes out, and what is sent."""
    group = next(node for node in essay.tree.body if isinstance(node, ast.ClassDef) and node.name == "Group")
    head = ["# Collectives", "", NOTE.format(origin=essay.path), ""]
    return "\n".join([*head, markdown(ast.get_docstring(group) or ""), ""])


def _models_page(root: Path, modules: Iterable[Essay]) -> str:
    """The essay of the coverage benchmark, its result family by family, and the roles of sockets."""
    measured = json.loads((root / COVERAGE).read_text(encoding="utf-8"))
    essay = (
        ast.get_docstring(ast.parse((root / COVERAGE_SOURCE).read_text(encoding="utf-8")), clean=False) or ""
    )
    roles = next(
        module.text for module in modules if module.path == f"{PACKAGE}/model/tensor_parallel/layer_roles.py"
    )
    held = "It holds" if measured["holds"] else "It does NOT hold"
    when = f"{measured['date'][:10]}, commit {_short(measured['commit'])}, {_versions(measured['versions'])}"
    lines = [
        *(
            "# Models",
            "",
            NOTE.format(origin=f"{COVERAGE_SOURCE} and its result"),
            "",
            markdown(essay.strip()),
            "",
            "## Families",
            "",
        ),
        f"Claim: {measured['claim']}. {held}: {measured['median']:.0f} of {len(measured['values'])} families. {when}.",
        *(
            "",
            "| family | class | from | blocks in visits | sockets by role | declared | error at 2 | error at 3 | round trip |",
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *map(_family_row, measured["detail"]["families"]),
        *("", "## Sockets and their roles", "", markdown(roles), ""),
    ]
    return "\n".join(lines)


def _family_row(row: Mapping[str, Any]) -> str:
    errors = [f"{error:.1e}" for error in row["errors"].values()]
    said = (row["family"], f"`{row['class']}`", row["source"], row["blocks"], row["sockets"], row["declared"])
    trip = row["round_trip"]
    return (
        "| "
        + " | ".join([*map(cell, said), *errors, f"{trip['difference']:.1e} ({cell(trip['compared'])})"])
        + " |"
    )


def _short(commit: str) -> str:
    return commit[:12] + ("-dirty" if commit.endswith("-dirty") else "")


def _versions(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {found[name]}" for name in ("torch", "transformers") if name in found)


def stale(root: Path = ROOT) -> list[str]:
    """What is not up to date, one sentence per page: missing, different, or of a technique that is gone."""
    made = pages(root)
    kept = {path.relative_to(root).as_posix() for folder in FOLDERS for path in (root / folder).glob("*.md")}
    said = [f"{path} is missing" for path in made if not (root / path).exists()]
    said += [
        f"{path} is not up to date"
        for path, text in made.items()
        if (root / path).exists() and (root / path).read_text() != text
    ]
    return said + [f"{path} describes nothing that is there" for path in sorted(kept - set(made))]


def write(root: Path = ROOT) -> list[str]:
    """Write every page, remove those of techniques that are gone; return the paths written."""
    made = pages(root)
    for path in (path for folder in FOLDERS for path in (root / folder).glob("*.md")):
        if path.relative_to(root).as_posix() not in made:
            path.unlink()
    for name, text in made.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return sorted(made)


def main() -> int:
    """Write the pages, or with --check say which are not up to date; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write the documentation pages that follow from the source.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing, fail when a page is not up to date"
    )
    if parser.parse_args().check:
        said = stale()
        print("\n".join([*said, "run: make docs"]) if said else "every page is up to date")
        return 1 if said else 0
    print("\n".join(write()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
