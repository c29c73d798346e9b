"""Rules about who may know whom: an organ knows no technique, neither by an identifier nor by a compared string.

Some techniques are called by an everyday word. `ORDINARY` lists those that organs use in the everyday sense, each with
that sense; the list may hold no more than is used. Such a word is still refused where a string is compared with it.
`FOREIGN` lists identifiers of torch that contain a technique's name.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from tests.house.source import PACKAGE, Finding, Rule, Source, package_sources

ORGANS = frozenset({"plan", "engine", "comm", "planner", "verifier", "run", "report"})

ORDINARY = {
    "batch": "the samples of one step, job.train.batch",
    "given": "what a user or a caller gave",
    "interleaved": "the samples of several sources by turns",
    "line": "a line of text or source",
    "master": "the host and port where processes meet, as torch and its MASTER_ADDR have it",
    "replicate": "half of the name of the mesh axis dp_replicate",
    "ring": "the slots in which a rank notes its last collectives, the newest over the oldest",
    "vocabulary": "the words that a tokenizer and a model know",
    "sequence": "the tokens of a sample, job.data.sequence",
}

FOREIGN = {
    "grid": "rich.table.Table.grid",
    "zero_": "torch.Tensor.zero_",
    "zero_grad": "torch.optim.Optimizer.zero_grad",
}

WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def technique_names(sources: Iterable[Source]) -> frozenset[str]:
    """The stems of `parallel/FAMILY/NAME.py`."""
    return frozenset(PurePosixPath(source.path).stem for source in sources if source.is_technique)


def identifiers(source: Source) -> Iterator[tuple[str, int]]:
    """Every identifier with its line; text in docstrings and strings is none."""
    for node in ast.walk(source.tree):
        match node:
            case (
                ast.Name(id=name)
                | ast.Attribute(attr=name)
                | ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield name, node.lineno
            case ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.keyword(arg=str(name)):
                yield name, node.value.lineno
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                parts = [
                    getattr(node, "module", None),
                    *(part for alias in names for part in (alias.name, alias.asname)),
                ]
                yield from ((word, node.lineno) for part in parts if part for word in part.split("."))


def compared_strings(source: Source) -> Iterator[tuple[str, int]]:
    """Every string that something is compared with: ==, in, match."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Compare | ast.match_case):
            inside = [node.left, *node.comparators] if isinstance(node, ast.Compare) else [node.pattern]
            for constant in (leaf for part in inside for leaf in ast.walk(part)):
                if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                    yield constant.value, constant.lineno


def named_techniques(source: Source, names: frozenset[str]) -> Iterator[tuple[str, Finding]]:
    """Each technique that an identifier of `source` names, in whole words, with where."""
    for identifier, line in identifiers(source):
        if identifier in FOREIGN:
            continue
        said = "_".join(word.lower() for word in WORD.findall(identifier))
        for name in sorted(names):
            if f"_{name}_" in f"_{said}_":
                yield (
                    name,
                    Finding(
                        line,
                        f"{identifier} names the technique '{name}': the core lacks a word; add the word, not the if",
                    ),
                )


def technique_in_organ(source: Source, names: frozenset[str]) -> Iterator[Finding]:
    yield from (finding for name, finding in named_techniques(source, names) if name not in ORDINARY)
    for text, line in compared_strings(source):
        if text in names:
            yield Finding(
                line,
                f"a comparison with '{text}', a technique: the core lacks a word; add the word, not the if",
            )


def _organ(source: Source) -> bool:
    # all-reduce algorithms are called what lectures call them, and one has the name of a technique that does the same by hand
    return (
        source.path.startswith(PACKAGE) and source.organ in ORGANS and "/comm/algorithms/" not in source.path
    )


RULES = (
    Rule(
        "organs contain no technique's name",
        lambda source: technique_in_organ(source, technique_names(package_sources())),
        bad=(
            "if naive_reduction: pass\n",
            "class NaiveState: pass\n",
            "f(naive=1)\n",
            "from x.naive import y\n",
            "def is_naive(): pass\n",
            "x.naive = 1\n",
            "if name == 'batch': pass\n",
            "if name in ('x', 'naive'): pass\n",
            "match x:\n    case 'naive': pass\n",
        ),
        good=(
            '"""Made for naive."""\n',
            "naivety = 1\n",
            "f('naive')\n",
            "micro_batch = 1\n",
            "x.zero_grad()\n",
        ),
        where=_organ,
    ),
)
