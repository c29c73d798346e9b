"""Makes the page of action kinds.

An action kind is whatever stands literally in `Action("KIND", ...)`, or as a text in a module that makes
actions and describes it; its meaning is found in the essay of the module that owns it, as a column

    KIND    what it does        OTHER   what that does

or in a sentence as `KIND (what it does)`. The owner is the module that makes actions of this kind, or, when
several do, the first of them that describes the kind.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from docs.generator.essay import NOTE, PACKAGE, Essay, cell

PAGE = "docs/reference/actions.md"
INTRODUCTION = (
    "A [program](../concepts/program.md) is a list of actions. This table lists every kind of action, the",
    "module that adds it to a program, and what it does.",
)


@dataclass(frozen=True)
class Kind:
    """An action kind, the module that owns it, and its meaning; empty where no essay describes it."""

    name: str
    owner: str
    meaning: str


def kinds(modules: Iterable[Essay]) -> list[Kind]:
    """Returns every action kind that the package makes, with owner and meaning, in the order of modules."""
    modules = list(modules)
    makers: dict[str, list[Essay]] = {}
    for essay in modules:
        for name in _made(essay.tree):
            makers.setdefault(name, []).append(essay)
    for essay in modules:
        for name in _passed_on(essay):
            makers.setdefault(name, [essay])
    return [_kind(name, making, modules) for name, making in makers.items()]


def described(kind: str, text: str) -> str:
    """Returns the meaning of `kind` in an essay, from a column or a sentence; empty when there is none."""
    pattern = rf"^ +(?:.*\S {{3,}})?{re.escape(kind)} {{2,}}(?=[a-z])(.+?)(?: {{3,}}|$)"
    column = re.search(pattern, text, re.MULTILINE)
    sentence = re.search(rf"\b{re.escape(kind)} \(([^)]+)\)", text)
    found = column or sentence
    return " ".join(found.group(1).split()) if found else ""


def action_page(modules: Iterable[Essay]) -> dict[str, str]:
    """Returns the page by its path."""
    head = ["# Action kinds", "", NOTE.format(origin=PACKAGE), "", *INTRODUCTION, ""]
    rows = [f"| `{kind.name}` | `{kind.owner}` | {cell(kind.meaning)} |" for kind in kinds(modules)]
    return {PAGE: "\n".join([*head, "| kind | owner | meaning |", "| --- | --- | --- |", *rows, ""])}


def _made(tree: ast.Module) -> Iterator[str]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in sorted(found, key=lambda call: (call.lineno, call.col_offset)):
        if isinstance(node.func, ast.Name) and node.func.id == "Action":
            given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "kind")]
            yield from (
                arg.value for arg in given if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )


def _passed_on(essay: Essay) -> Iterator[str]:
    """Yields the kinds that reach Action through a variable: texts of a module that describes them."""
    nodes = list(ast.walk(essay.tree))
    if any(isinstance(node, ast.Call) and ast.unparse(node.func) == "Action" for node in nodes):
        texts = (node.value for node in nodes if isinstance(node, ast.Constant))
        yield from (
            text for text in texts if isinstance(text, str) and text.isupper() and described(text, essay.text)
        )


def _kind(name: str, making: list[Essay], modules: list[Essay]) -> Kind:
    owners = [essay for essay in making if described(name, essay.text)] or making[:1]
    found = [meaning for essay in (*making, *modules) if (meaning := described(name, essay.text))]
    return Kind(name, owners[0].path, found[0] if found else "")
