"""Rules on layers: outside `parallel/` nothing compares with the name of a strategy or of a technique's file."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from tests.house.source import PACKAGE, Finding, Rule, Source, package_sources

# Strategy names and module names that are ordinary strings elsewhere, each with the other thing that it
# names.
ORDINARY = {
    "custom": "the kind of a network model",
    "ring": "an all-reduce algorithm",
    "search": "a command",
}


def technique_names(sources: Iterable[Source]) -> frozenset[str]:
    """Returns the `name` of every strategy, and the stem of every technique's file."""
    stems = {PurePosixPath(source.path).stem for source in sources if source.is_technique}
    names = {name for source in sources if source.is_technique for name in _strategy_names(source)}
    return frozenset(stems | names) - ORDINARY.keys()


def _strategy_names(source: Source) -> Iterator[str]:
    text = re.compile(r'^    name: ClassVar\[str\] = "(\w+)"', re.MULTILINE)
    yield from text.findall(source.text)


def compared_strings(source: Source) -> Iterator[tuple[str, int]]:
    """Yields every string that something is compared with (`==`, `in`, `match`), with its line."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Compare | ast.match_case):
            inside = [node.left, *node.comparators] if isinstance(node, ast.Compare) else [node.pattern]
            for constant in (leaf for part in inside for leaf in ast.walk(part)):
                if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                    yield constant.value, constant.lineno


def compared_technique(source: Source, names: frozenset[str]) -> Iterator[Finding]:
    for text, line in compared_strings(source):
        if text in names:
            what = f"a comparison with '{text}', a technique"
            yield Finding(line, f"{what}: add the missing concept to the plan, not a condition")


def _outside_parallel(source: Source) -> bool:
    return source.path.startswith(PACKAGE) and source.organ != "parallel"


RULES = (
    Rule(
        "nothing outside parallel/ compares with the name of a technique",
        lambda source: compared_technique(source, technique_names(package_sources())),
        bad=(
            "if name == 'zero': pass\n",
            "if name in ('x', 'tensor_parallel'): pass\n",
            "match x:\n    case 'pipeline': pass\n",
        ),
        good=("f('zero')\n", "zero = 1\n", "if x == 0: pass\n"),
        where=_outside_parallel,
    ),
)
