"""The pages of the all-reduce algorithms: one per file of comm/algorithms, and an index that puts their formulas side by side.

A file of an algorithm is one in which a class is an `Algorithm`. Its essay says, in the line of its formulas,

    rounds = 2 (n-1)      sent per rank = 2 (n-1)/n S      seconds = 2 (n-1) a + 2 (n-1)/n S/B

and in a paragraph `Use:` when to take it.
"""

import ast
import re
from collections.abc import Iterable

from docs.essay import NOTE, PACKAGE, Essay, cell, markdown

FOLDER = f"{PACKAGE}/comm/algorithms"
FORMULA = r"\b{word}\b[^=\n]*= *(.+?)(?: {{3,}}|$)"


def algorithm_pages(modules: Iterable[Essay]) -> dict[str, str]:
    """The text of every page by its path; none where there are no algorithms.

    Raises ValueError for an essay without one of its formulas, or without the paragraph `Use:`.
    """
    found = [essay for essay in modules if essay.path.startswith(f"{FOLDER}/") and _is_algorithm(essay.tree)]
    pages = {f"docs/algorithms/{essay.name}.md": _page(essay) for essay in found}
    return pages | ({"docs/algorithms/README.md": _index(found)} if found else {})


def _is_algorithm(tree: ast.Module) -> bool:
    bases = [base for node in tree.body if isinstance(node, ast.ClassDef) for base in node.bases]
    return any(isinstance(base, ast.Name) and base.id == "Algorithm" for base in bases)


def _page(essay: Essay) -> str:
    head = [
        f"# {essay.name}",
        "",
        NOTE.format(origin=essay.path),
        "",
        f"[All algorithms](README.md). Source: `{essay.path}`.",
        "",
    ]
    return "\n".join([*head, markdown(essay.text), ""])


def _index(found: list[Essay]) -> str:
    head = [
        *("# All-reduce algorithms", "", NOTE.format(origin=FOLDER), ""),
        "n ranks, S bytes, a seconds of latency per round, B bytes per second out of and into each rank at the same time.",
        *("", "| algorithm | rounds | sent per rank | seconds | use |", "| --- | --- | --- | --- | --- |"),
    ]
    return "\n".join([*head, *(_row(essay) for essay in found), ""])


def _row(essay: Essay) -> str:
    formulas = [_said(essay, FORMULA.format(word=word)) for word in ("rounds", "sent", "seconds")]
    use = " ".join(_said(essay, r"^Use: ((?:.+\n?)+?)(?=[A-Z][a-z]+:|\n|\Z)").split())
    return f"| [{essay.name}]({essay.name}.md) | " + " | ".join(map(cell, (*formulas, use))) + " |"


def _said(essay: Essay, pattern: str) -> str:
    found = re.search(pattern, essay.text, re.MULTILINE)
    if found is None:
        raise ValueError(
            f"{essay.path}: its essay has nothing like {pattern!r}; say rounds = ..., sent ... = ..., seconds = ..., Use: ..."
        )
    return found.group(1)
