"""The source as the house rules see it: a path, its text, its syntax tree.

A *rule* is a function from one source to its findings, paired with a source that breaks it (`bad`) and, where
the border is fine, one that does not (`good`). `test_rules.py` reads the tree with every rule, and shows that
every rule bites.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from docs.generate import SHARED

ROOT = Path(__file__).parents[2]
PACKAGE = "src/meshwright"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file: its path relative to the repository, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text, self.path)

    @property
    def inside(self) -> str:
        """The path inside the package: `core/mesh.py`."""
        return str(PurePosixPath(self.path).relative_to(PACKAGE))

    @property
    def organ(self) -> str:
        """The first part of the path inside the package: `core`, or `api` for `api.py`."""
        return PurePosixPath(self.inside).parts[0].removesuffix(".py")

    @property
    def is_technique(self) -> bool:
        """Whether this file is `parallel/FAMILY/NAME.py` or `nn/routing/NAME.py`, and none that the
        techniques of a family share.
        """
        parts = PurePosixPath(self.path).parts
        shared = "/".join(parts[-2:]).removesuffix(".py") in SHARED
        in_family = (parts[2:3] == ("parallel",) and len(parts) > 4) or parts[2:4] == ("nn", "routing")
        return in_family and not parts[-1].startswith("_") and not shared

    def functions(self) -> Iterator[Function]:
        """Every function and method, nested ones included."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))


@dataclass(frozen=True)
class Finding:
    """A broken rule at one line."""

    line: int
    text: str


@dataclass(frozen=True)
class Rule:
    """A sentence that is true of every source for which `find` finds nothing.

    `path` is where the examples `bad` and `good` stand; `where` tells which sources the rule is about.
    """

    sentence: str
    find: Callable[[Source], Iterator[Finding]]
    bad: tuple[str, ...]
    good: tuple[str, ...] = ()
    path: str = f"{PACKAGE}/engine/example.py"
    where: Callable[[Source], bool] = lambda source: source.path.startswith(PACKAGE)


def python_sources(*folders: str) -> list[Source]:
    """The Python files under `folders`, sorted by path."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def package_sources() -> list[Source]:
    """The files of the package."""
    return python_sources(PACKAGE)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        value = dotted(node.value)
        return f"{value}.{node.attr}" if value else node.attr
    return ""


def calls(source: Source) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the dotted name of what is called."""
    return ((dotted(node.func), node) for node in ast.walk(source.tree) if isinstance(node, ast.Call))


def imported(source: Source) -> Iterator[tuple[str, int]]:
    """The full name of everything imported, with its line: `a.b` for `import a.b` and for `from
    a import b`.
    """
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module or ''}.{alias.name}", node.lineno) for alias in node.names)


def report(rule: str, found: list[tuple[str, Finding]]) -> str:
    """The message of a failing rule: the sentence, then one `file:line: text` per finding."""
    return "\n".join(
        [
            f"{rule}: {len(found)} broken",
            *(f"  {path}:{finding.line}: {finding.text}" for path, finding in found),
        ]
    )
