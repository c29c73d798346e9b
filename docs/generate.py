"""Writes the pages that follow from the source, from results and from the schema.

    python -m docs.generate          writes the pages
    python -m docs.generate --check  writes nothing; fails when a page is not up to date

Techniques, algorithms, action kinds and collectives are read from module docstrings, without importing
anything. The config, command and API references import the package, but not torch.
"""

import argparse
import ast
import sys
from collections.abc import Iterable
from pathlib import Path

from docs.generator.action_page import action_page, described, kinds
from docs.generator.algorithm_pages import algorithm_pages
from docs.generator.api_pages import api_pages
from docs.generator.benchmarks.benchmark_page import benchmark_page
from docs.generator.cli_page import cli_page
from docs.generator.combination_page import combination_page
from docs.generator.config_page import config_page
from docs.generator.essay import NOTE, PACKAGE, Essay, markdown
from docs.generator.essay import essays as read_essays
from docs.generator.model_page import model_page
from docs.generator.reference_lists import reference_lists
from docs.generator.technique_pages import SHARED, technique_pages, techniques

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs/techniques", "docs/allreduce", "docs/reference/api")
GROUP = f"{PACKAGE}/comm/collectives/group.py"

__all__ = [
    "SHARED",
    "described",
    "essays",
    "kinds",
    "main",
    "markdown",
    "pages",
    "stale",
    "techniques",
    "write",
]


def essays(root: Path = ROOT) -> list[Essay]:
    """Returns every module of the package with its docstring."""
    return read_essays(root)


def pages(root: Path = ROOT) -> dict[str, str]:
    """Returns the text of every generated page by its path relative to the repository."""
    modules = essays(root)
    made = (
        technique_pages(modules)
        | algorithm_pages(modules)
        | action_page(modules)
        | _collectives_page(modules)
    )
    made |= model_page(root, modules) | combination_page(root) | benchmark_page(root)
    # what follows from the package as it is imported, so not from another tree
    return made | (api_pages() | cli_page() | config_page() | reference_lists() if root == ROOT else {})


def _collectives_page(modules: Iterable[Essay]) -> dict[str, str]:
    """What the class `Group` says: what goes into every collective, what comes out, and what is sent."""
    for essay in modules:
        if essay.path == GROUP:
            group = next(
                node for node in essay.tree.body if isinstance(node, ast.ClassDef) and node.name == "Group"
            )
            head = ["# Collectives", "", NOTE.format(origin=essay.path), ""]
            return {
                "docs/reference/collectives.md": "\n".join(
                    [*head, markdown(ast.get_docstring(group) or ""), ""]
                )
            }
    return {}


def stale(root: Path = ROOT) -> list[str]:
    """Returns what is not up to date, a sentence per page: missing, different, or of something gone."""
    made = pages(root)
    found = [f"{path} is missing" for path in made if not (root / path).exists()]
    present = {path: text for path, text in made.items() if (root / path).exists()}
    found += [
        f"{path} is not up to date" for path, text in present.items() if (root / path).read_text() != text
    ]
    return found + [
        f"{path} describes nothing that is there" for path in sorted(_generated(root) - set(made))
    ]


def write(root: Path = ROOT) -> list[str]:
    """Writes every page and removes those of techniques that are gone; returns the paths written."""
    made = pages(root)
    for path in _generated(root) - set(made):
        (root / path).unlink()
    for name, text in made.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return sorted(made)


def _generated(root: Path) -> set[str]:
    """The pages in folders that hold generated pages only."""
    return {path.relative_to(root).as_posix() for folder in FOLDERS for path in (root / folder).rglob("*.md")}


def main() -> int:
    """Writes the pages, or with --check says which are not up to date; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write the documentation pages that follow from the source.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing, fail when a page is not up to date"
    )
    if parser.parse_args().check:
        found = stale()
        print("\n".join([*found, "run: make docs"]) if found else "every page is up to date")
        return 1 if found else 0
    print("\n".join(write()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
