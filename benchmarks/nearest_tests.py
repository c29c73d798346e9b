"""Orders the test files by their distance to a module: by mirrored name, by imports, by folder.

The import graph is read from the sources of src, tests and benchmarks, without importing them:

    test_zero.py -> parallel/data/zero.py <- test_zero_tokens.py        distance 1: they import the module
    test_train.py -> engine/step/executor.py -> ... -> zero.py          distance 2 and more
    test_essay.py                                                       no path: last

Limits: imports within a function count; modules that a file runs as a command do not.
"""

import ast
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

# the check of the mutants fails on every mutant; checks of the source's form do not test behaviour
LEFT_OUT = ("tests/house/", "tests/benchmarks/test_mutants.py")
DOCS = "tests/docs/"  # not part of `make test`
UNREACHED = 1000  # the distance of a file that does not reach the module
Tier = Literal["default", "full"]


class ImportGraph:
    """The imports between Python files of the folders src, tests and benchmarks of a repository."""

    def __init__(self, root: Path) -> None:
        paths = [path for folder in ("src", "tests", "benchmarks") for path in (root / folder).rglob("*.py")]
        self.files = {path.relative_to(root).as_posix(): path for path in sorted(paths)}
        self._by_module = {module_name(file): file for file in self.files}
        self._importers: dict[str, set[str]] = defaultdict(set)
        for file, path in self.files.items():
            for imported in self._imported_files(path.read_text(encoding="utf-8")):
                self._importers[imported].add(file)

    @property
    def test_files(self) -> list[str]:
        """The files that contain tests."""
        tests = (file for file in self.files if file.startswith("tests/"))
        return [file for file in tests if Path(file).name.startswith("test_")]

    def distances(self, file: str) -> dict[str, int]:
        """Returns the number of imports by which each file reaches `file`: 1 for those that import it."""
        found, todo = {file: 0}, deque([file])
        while todo:
            reached = todo.popleft()
            for importer in sorted(self._importers[reached] - found.keys()):
                found[importer] = found[reached] + 1
                todo.append(importer)
        return found

    def _imported_files(self, source: str) -> Iterator[str]:
        for node in ast.walk(ast.parse(source)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                # `from a import b` imports the module a.b, or the name b of the module a
                joined = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in self._by_module else node.module for name in joined]
            yield from (self._by_module[name] for name in names if name in self._by_module)


def module_name(file: str) -> str:
    """Returns the module of a file: "src/meshwright/plan/plan.py" -> "meshwright.plan.plan"."""
    return file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True)
class Stage:
    """Test files that run together, in this order."""

    name: str
    tier: Tier
    files: tuple[str, ...]


def stages(file: str, graph: ImportGraph, tiers: Mapping[str, object]) -> list[Stage]:
    """Returns the stages for a file of src/meshwright; `tiers` is the content of tests/tiers.toml."""
    inner = file.removeprefix("src/meshwright/")
    distances, parts = graph.distances(file), inner.split("/")

    def rank(test: str) -> tuple[int, int, str]:
        pairs = zip(test.split("/")[1:-1], parts[:-1], strict=False)
        num_shared_folders = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return distances.get(test, UNREACHED), -num_shared_folders, test

    tests = sorted((file for file in graph.test_files if not file.startswith(LEFT_OUT)), key=rank)
    default = [file for file in tests if not file.startswith(DOCS)]
    mirror = f"tests/{inner.removesuffix('.py')}"
    folder, _, stem = mirror.rpartition("/")
    mirrored = [file for file in default if file.startswith(f"{folder}/test_{stem}")]
    others = [file for file in default if file not in mirrored]
    nearest = min((distances[file] for file in others if file in distances), default=UNREACHED)
    importers = [file for file in others if distances.get(file) == nearest]
    rest = [file for file in others if file not in importers]
    full = [file for file in tests if file.startswith(DOCS) or file.removeprefix("tests/") in tiers]
    found = [
        Stage("mirrored", "default", tuple(mirrored)),
        Stage("importers", "default", tuple(importers)),
        Stage("rest", "default", tuple(rest)),
        Stage("full", "full", tuple(full)),
    ]
    return [stage for stage in found if stage.files]
