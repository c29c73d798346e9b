"""Rules about what a reader may rely on: docstrings, annotations, and the essay at the top of every
technique.
"""

import ast
import re
from collections.abc import Iterator

from tests.house.source import PACKAGE, Finding, Function, Rule, Source

SECTIONS = ("Cost", "Limits", "Paper")
YEAR = re.compile(r"\b(19|20)\d\d\b(?!\.\d)")  # not the first half of an arXiv number
VENUE = re.compile(
    r"\b(arXiv[: "
    r"]\d{4}\.\d{4,5}|AAAI|ACL|ASPLOS|ATC|CVPR|ECCV|EMNLP|EuroSys|HPCA|HPDC|ICCV|ICLR|ICML|ICPP|Interspeech"
    r"|IPDPS|ISCA|JMLR|KDD|MICRO|MLSys|NAACL|NIPS|NSDI|NeurIPS|OSDI|PACT|PPoPP|PVLDB|SC|SIGCOMM|SIGMOD|SOSP|SPAA|TPDS|VLDB)\b"
)
PICTURE = re.compile(r"^ {4,}\S.*$", re.MULTILINE)
FORMULA = re.compile(r"^.*\S (=|<=|>=|~) \S.*$", re.MULTILINE)


def no_docstring(source: Source) -> Iterator[Finding]:
    if not ast.get_docstring(source.tree):
        yield Finding(1, "the module says nothing: begin with a short essay")
    members = list(_public(source.tree))
    said = {node.name for node, _ in members if ast.get_docstring(node)}
    for node, owner in members:
        # A family of methods of one name (faults, forward) is described once in its file; an override by what
        # it overrides.
        if not ast.get_docstring(node) and not (owner and (node.name in said or owner.bases)):
            yield Finding(node.lineno, f"{node.name} has no docstring: say what is returned or changed")


def not_annotated(source: Source) -> Iterator[Finding]:
    for node, owner in _public(source.tree):
        if isinstance(node, Function):
            missing = [arg.arg for arg in _arguments(node, bool(owner)) if arg.annotation is None]
            missing += [] if node.returns else ["the result"]
            if missing:
                yield Finding(node.lineno, f"{node.name} does not annotate {', '.join(missing)}")


def _public(tree: ast.Module) -> Iterator[tuple[Function | ast.ClassDef, ast.ClassDef | None]]:
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node, None
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from (
                (child, node)
                for child in node.body
                if isinstance(child, Function) and not child.name.startswith("_")
            )


def _arguments(node: Function, is_method: bool) -> list[ast.arg]:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    arguments += [arg for arg in (node.args.vararg, node.args.kwarg) if arg]
    static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in node.decorator_list)
    return arguments[1:] if is_method and not static else arguments


def no_essay(source: Source) -> Iterator[Finding]:
    essay = ast.get_docstring(source.tree) or ""
    absent = [name for name in SECTIONS if not re.search(rf"^{name}\b", essay, re.MULTILINE)]
    if absent:
        yield Finding(1, f"the essay has no paragraph that begins with {', '.join(absent)}")
    if essay and not re.match(r"\S.*[.:](\n\n|\Z)", essay):
        yield Finding(
            1, "the essay does not begin with a one-line idea that ends with a full stop, then an empty line"
        )
    if not PICTURE.search(essay):
        yield Finding(
            1,
            (
                "the essay has no picture: an indented block that shows who holds what, or the "
                "actions before -> after"
            ),
        )
    if not FORMULA.search(essay):
        yield Finding(1, "the essay has no formula (a line with ' = ')")


def no_paper(source: Source) -> Iterator[Finding]:
    essay = ast.get_docstring(source.tree) or ""
    cited = re.search(r"^Paper\b.*?(?=\n\n|\Z)", essay, re.MULTILINE | re.DOTALL)
    text = cited.group() if cited else ""
    if not YEAR.search(text):
        yield Finding(1, "the paragraph 'Paper' names no year")
    if not VENUE.search(text):
        yield Finding(
            1,
            (
                "the paragraph 'Paper' names no arXiv number (arXiv 2006.15704) and no known venue "
                "(the list is VENUE)"
            ),
        )


def _technique(source: Source) -> bool:
    return source.is_technique


ESSAY = '''"""Gradients are summed over the replicas.

It works because sums commute.

    rank 0  g0 -> g0 + g1
    rank 1  g1 -> g0 + g1

Formula: g = sum_r g_r.

Cost: 2 S (n-1)/n bytes.

Limits: one copy per rank.

Paper: Li et al., PyTorch Distributed, 2020, {where}.
"""
'''
GOOD_ESSAY = ESSAY.format(where="arXiv 2006.15704")
EXAMPLE = f"{PACKAGE}/parallel/data/example.py"

RULES = (
    Rule(
        "everything public has a docstring",
        no_docstring,
        bad=(
            "x = 1\n",
            '"""A."""\n\ndef f() -> None:\n    pass\n',
            '"""A."""\n\nclass A:\n    """A."""\n\n    def f(self) -> None:\n        pass\n',
        ),
        good=(
            '"""A."""\n\ndef _f():\n    pass\n',
            '"""A."""\n\nclass A(B):\n    """A."""\n\n    def f(self) -> None:\n        pass\n',
        ),
    ),
    Rule(
        "everything public is annotated",
        not_annotated,
        bad=(
            "def f(x) -> int: ...\n",
            "def f(x: int): ...\n",
            "class A:\n    def f(self, *args) -> None: ...\n",
        ),
        good=(
            "def f(x: int, *, y: int = 1) -> int: ...\n",
            "class A:\n    def f(self) -> None: ...\n",
            "def _f(x): ...\n",
        ),
    ),
    Rule(
        "every technique begins with its essay: idea, picture, formula, Cost, Limits, Paper",
        no_essay,
        bad=(
            "x = 1\n",
            GOOD_ESSAY.replace("Cost", "Price"),
            GOOD_ESSAY.replace("Limits", "But"),
            GOOD_ESSAY.replace("    rank", "rank"),
            GOOD_ESSAY.replace(" = ", " is "),
            GOOD_ESSAY.replace("replicas.\n\nIt", "replicas.\nIt"),
        ),
        good=(GOOD_ESSAY,),
        path=EXAMPLE,
        where=_technique,
    ),
    Rule(
        "every technique cites its paper",
        no_paper,
        bad=("x = 1\n", GOOD_ESSAY.replace("2020", "once"), ESSAY.format(where="somewhere")),
        good=(GOOD_ESSAY, ESSAY.format(where="VLDB")),
        path=EXAMPLE,
        where=_technique,
    ),
)
