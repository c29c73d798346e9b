"""Makes the pages of the all-reduce algorithms: one per module of comm/algorithms, and an index of their formulas.

A module of algorithms has one or several classes that extend `Algorithm`. The essay of the module, or, where it has several
algorithms, the docstring of each class, states in one line

    rounds = 2 (n-1)      sent per rank = 2 (n-1)/n S      seconds = 2 (n-1) a + 2 (n-1)/n S/B

and in a paragraph `Use:` when to take the algorithm.
"""

import ast
import re
from collections.abc import Iterable, Iterator

from docs.generator.essay import NOTE, PACKAGE, Essay, cell, markdown

SOURCE = f"{PACKAGE}/comm/algorithms"
FOLDER = "docs/algorithms"
FORMULA = r"\b{word}\b[^=\n]*= *(.+?)(?: {{3,}}|$)"
USE = r"^ *Use: ((?:.+\n?)+?)(?=^ *[A-Z][A-Za-z]+:|\n|\Z)"
LEGEND = "n ranks, S bytes, a seconds of latency per round, B bytes per second out of and into each rank at the same time."


def algorithm_pages(modules: Iterable[Essay]) -> dict[str, str]:
    """Returns the text of every page by its path; none where there are no algorithms.

    Raises ValueError for an algorithm without one of its formulas, or without the paragraph `Use:`.
    """
    found = [essay for essay in modules if essay.path.startswith(f"{SOURCE}/") and _classes(essay)]
    pages = {f"{FOLDER}/{essay.name}.md": _page(essay) for essay in found}
    return pages | ({f"{FOLDER}/index.md": _index(found)} if found else {})


def _classes(essay: Essay) -> list[ast.ClassDef]:
    """The classes of a module that extend `Algorithm`."""
    classes = [node for node in essay.tree.body if isinstance(node, ast.ClassDef)]
    return [node for node in classes if any(isinstance(base, ast.Name) and base.id == "Algorithm" for base in node.bases)]


def _page(essay: Essay) -> str:
    head = [f"# {essay.name}", "", NOTE.format(origin=essay.path), "", f"[All algorithms](index.md). Source: `{essay.path}`.", ""]
    lines = [*head, markdown(essay.text), ""]
    classes = _classes(essay)
    for node in classes if len(classes) > 1 else []:
        lines += [f"## {_algorithm(node)}", "", markdown(ast.get_docstring(node) or ""), ""]
    return "\n".join(lines)


def _index(found: list[Essay]) -> str:
    head = ["# All-reduce algorithms", "", NOTE.format(origin=SOURCE), "", LEGEND, ""]
    table = ["| algorithm | rounds | sent per rank | seconds | use |", "| --- | --- | --- | --- | --- |"]
    tree = ["", "```{toctree}", ":hidden:", "", *(essay.name for essay in found), "```", ""]
    return "\n".join([*head, *table, *(row for essay in found for row in _rows(essay)), *tree])


def _rows(essay: Essay) -> Iterator[str]:
    classes = _classes(essay)
    for node in classes:
        text = essay.text if len(classes) == 1 else ast.get_docstring(node) or ""
        name = essay.name if len(classes) == 1 else _algorithm(node)
        formulas = [_stated(essay, name, text, FORMULA.format(word=word)) for word in ("rounds", "sent", "seconds")]
        use = " ".join(_stated(essay, name, text, USE).split())
        yield f"| [{name}]({essay.name}.md) | " + " | ".join(map(cell, (*formulas, use))) + " |"


def _algorithm(node: ast.ClassDef) -> str:
    """The name under which a plan asks for the algorithm: its class attribute `name`, else the name of the class."""
    for each in node.body:
        target = each.target if isinstance(each, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == "name" and isinstance(each, ast.AnnAssign):
            value = each.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                return value.value
    return node.name.lower()


def _stated(essay: Essay, name: str, text: str, pattern: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        wanted = "rounds = ..., sent ... = ..., seconds = ..., Use: ..."
        raise ValueError(f"{essay.path}: the essay of {name} has nothing like {pattern!r}; write {wanted}")
    return found.group(1)
