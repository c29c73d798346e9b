"""Makes the pages of the all-reduce algorithms: one per module, and an index of their formulas.

A module of an algorithm has a class that extends `AllReduceAlgorithm`. Its essay states in one line

    rounds = 2 (n-1)      sent per rank = 2 (n-1)/n S      seconds = 2 (n-1) a + 2 (n-1)/n S/B

and in a paragraph `Use:` when to take the algorithm.
"""

import ast
import re
from collections.abc import Iterable

from docs.generator.essay import NOTE, PACKAGE, Essay, cell, markdown

SOURCE = f"{PACKAGE}/comm/allreduce"
FOLDER = "docs/allreduce"
BASE = "AllReduceAlgorithm"
FORMULA = r"\b{word}\b[^=\n]*= *(.+?)(?: {{3,}}|$)"
USE = r"^Use: ((?:.+\n?)+?)(?=[A-Z][a-z]+:|\n|\Z)"
LEGEND = "n ranks, S bytes, a seconds of latency per round, B bytes per second out of and into each rank."


def algorithm_pages(modules: Iterable[Essay]) -> dict[str, str]:
    """Returns the text of every page by its path; none where there are no algorithms.

    Raises ValueError for an essay without one of its formulas, or without the paragraph `Use:`.
    """
    found = [essay for essay in modules if essay.path.startswith(f"{SOURCE}/") and _is_algorithm(essay.tree)]
    pages = {f"{FOLDER}/{essay.name}.md": _page(essay) for essay in found}
    return pages | ({f"{FOLDER}/index.md": _index(found)} if found else {})


def _is_algorithm(tree: ast.Module) -> bool:
    bases = [base for node in tree.body if isinstance(node, ast.ClassDef) for base in node.bases]
    return any(isinstance(base, ast.Name) and base.id == BASE for base in bases)


def _page(essay: Essay) -> str:
    head = [
        f"# {essay.name}",
        "",
        NOTE.format(origin=essay.path),
        "",
        f"[All algorithms](index.md). Source: `{essay.path}`.",
        "",
    ]
    return "\n".join([*head, markdown(essay.text), ""])


def _index(found: list[Essay]) -> str:
    head = ["# All-reduce algorithms", "", NOTE.format(origin=SOURCE), "", LEGEND, ""]
    table = ["| algorithm | rounds | sent per rank | seconds | use |", "| --- | --- | --- | --- | --- |"]
    tree = ["", "```{toctree}", ":hidden:", "", *(essay.name for essay in found), "```", ""]
    return "\n".join([*head, *table, *map(_row, found), *tree])


def _row(essay: Essay) -> str:
    formulas = [_stated(essay, FORMULA.format(word=word)) for word in ("rounds", "sent", "seconds")]
    use = " ".join(_stated(essay, USE).split())
    return f"| [{essay.name}]({essay.name}.md) | " + " | ".join(map(cell, (*formulas, use))) + " |"


def _stated(essay: Essay, pattern: str) -> str:
    found = re.search(pattern, essay.text, re.MULTILINE)
    if found is None:
        wanted = "rounds = ..., sent ... = ..., seconds = ..., Use: ..."
        raise ValueError(f"{essay.path}: its essay has nothing like {pattern!r}; write {wanted}")
    return found.group(1)
