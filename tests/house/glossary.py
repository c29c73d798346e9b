"""Rules on names: the words of the field, and of our own only those in docs/glossary.md."""

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.house.source import ROOT, Finding, Rule, Source

GLOSSARY = ROOT / "docs" / "glossary.md"
# Whole names that say nothing of what they name.
BARE = frozenset(
    [
        "about",
        "afterwards",
        "again",
        "ahead",
        "alike",
        "alone",
        "among",
        "anew",
        "apart",
        "around",
        "aside",
        "away",
        "before",
        "behind",
        "below",
        "beside",
        "besides",
        "between",
        "beyond",
        "came",
        "done",
        "few",
        "forth",
        "found",
        "further",
        "given",
        "gone",
        "handed",
        "held",
        "here",
        "hereby",
        "kept",
        "known",
        "learnt",
        "made",
        "met",
        "mine",
        "moved",
        "near",
        "nowhere",
        "only",
        "other",
        "others",
        "ours",
        "own",
        "put",
        "said",
        "seen",
        "sent",
        "set_out",
        "shown",
        "so",
        "stood",
        "taken",
        "theirs",
        "then",
        "there",
        "through",
        "together",
        "told",
        "toward",
        "tried",
        "under",
        "unlike",
        "upon",
        "way",
        "whole",
        "with",
        "without",
        "within",
        "yet",
    ]
)
WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def table(heading: str) -> list[tuple[str, str]]:
    """Returns the rows (first and second cell) of the table under `heading` of the glossary."""
    text = GLOSSARY.read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [(cells[0].strip(), cells[1].strip()) for cells in rows[2:]]


@cache
def retired() -> dict[str, str]:
    """Returns the words that no identifier may contain, with their replacements: those without a bracket."""
    return {word: instead for word, instead in table("Retired words") if re.fullmatch(r"[a-z0-9]+", word)}


def definitions(source: Source) -> Iterator[tuple[str, int]]:
    """Yields every name that is defined: functions, classes, parameters, fields, variables; with its line."""
    for node in ast.walk(source.tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.arg(arg=name):
                yield name, node.lineno
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno


def retired_word(source: Source) -> Iterator[Finding]:
    for name, line in definitions(source):
        for word in sorted({part.lower() for part in WORD.findall(name)} & retired().keys()):
            yield Finding(line, f"{name}: '{word}' is retired; say {retired()[word]} (docs/glossary.md)")


def bare_name(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            name = node.name.strip("_").lower()
            if name in BARE:
                yield Finding(node.lineno, f"{node.name}: say what it is (a noun) or does (a verb)")


RULES = (
    Rule(
        "no definition uses a retired word",
        retired_word,
        bad=(
            "def bundle_of(): ...\n",
            "class Arena: ...\n",
            "def f(anatomy): ...\n",
            "def f():\n    dealt = 1\n",
        ),
        good=("def param_group(): ...\n", "class FlatParam: ...\n"),
        where=lambda source: True,
    ),
    Rule(
        "no function or class is named by a bare participle, adverb or preposition",
        bare_name,
        bad=("def told(): ...\n", "class Apart: ...\n", "def _own(): ...\n"),
        good=("def report_failure(): ...\n",),
    ),
)
