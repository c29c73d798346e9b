"""Rules about the shape of a file: how long, how deep, what it is called, which characters it uses."""

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.house.source import PACKAGE, Finding, Rule, Source

MAX_FILE, MAX_FUNCTION, MAX_NESTING, MAX_COLLABORATORS = 450, 60, 4, 6
# classes outside of the engine that still take more; the list may only get shorter
CROWDED = frozenset({"TorchWorld", "PlaceholderEnv", "_StageRun", "_TrainLoop"})
HOMELESS = frozenset({"util", "utils", "helper", "helpers", "common", "misc", "base", "manager", "managers"})
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.AsyncFor, ast.AsyncWith)


def long_file(source: Source) -> Iterator[Finding]:
    essay = source.tree.body[0] if source.tree.body and ast.get_docstring(source.tree) else None
    lines = source.text.count("\n") - (essay.end_lineno or 0 if essay else 0)  # the essay is welcome
    if lines > MAX_FILE:
        yield Finding(MAX_FILE, f"{lines} lines; at most {MAX_FILE}: split it where it has two subjects")


def long_function(source: Source) -> Iterator[Finding]:
    for function in source.functions():
        body = function.body[1:] if ast.get_docstring(function) else function.body
        # signature and docstring are free
        lines = (function.end_lineno or 0) - body[0].lineno + 1 if body else 0
        if lines > MAX_FUNCTION:
            yield Finding(function.lineno, f"{function.name} has {lines} lines; at most {MAX_FUNCTION}")


def crowded_constructor(source: Source) -> Iterator[Finding]:
    for owner in (node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)):
        for function in (node for node in owner.body if isinstance(node, ast.FunctionDef)):
            arguments = function.args
            taken = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]) - 1
            if function.name == "__init__" and taken > MAX_COLLABORATORS and owner.name not in CROWDED:
                text = f"{owner.name} is made from {taken} values; at most {MAX_COLLABORATORS}: group them"
                yield Finding(function.lineno, text)


def deep_nesting(source: Source) -> Iterator[Finding]:
    for function in source.functions():
        deepest = _depth(function.body)
        if deepest > MAX_NESTING:
            yield Finding(function.lineno, f"{function.name} nests {deepest} deep; at most {MAX_NESTING}")


def _depth(body: list[ast.stmt]) -> int:
    depth = 0
    for node in body:
        if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
            depth = max(depth, 1 + _depth(node.body), _depth(node.orelse))  # elif is not deeper than its if
        elif isinstance(node, BLOCKS):
            depth = max(depth, 1 + _depth(list(_statements(node))))
    return depth


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from child.body


def homeless_name(source: Source) -> Iterator[Finding]:
    path = PurePosixPath(source.path)
    words = {word for part in (*path.parts[:-1], path.stem) for word in part.removeprefix("test_").split("_")}
    for word in sorted(words & HOMELESS):
        yield Finding(
            1, f"a file called '{word}': say what it holds; a function without a home is missing a word"
        )


def not_ascii(source: Source) -> Iterator[Finding]:
    for number, line in enumerate(source.text.splitlines(), 1):
        odd = [char for char in line if not char.isascii()]
        if odd:
            yield Finding(number, f"not ASCII: {', '.join(f'U+{ord(char):04X}' for char in odd[:5])}")


def _deep(levels: int) -> str:
    lines = [f"{'    ' * (level + 1)}for i{level} in x:" for level in range(levels)]
    return "\n".join(["def f(x):", *lines, f"{'    ' * (levels + 1)}pass\n"])


def _anywhere(source: Source) -> bool:
    return True


ELIF = "def f(x):\n    if x == 1:\n        pass\n" + "".join(
    f"    elif x == {n}:\n        pass\n" for n in range(2, 9)
)

INSIDE_EXCEPT = """
def f(x):
    try:
        pass
    except OSError:
        with x:
            while x:
                if x:
                    for i in x:
                        pass
"""

RULES = (
    Rule(
        "no file is longer than 450 lines",
        long_file,
        bad=("x = 1\n" * 451,),
        good=("x = 1\n" * 450,),
        where=_anywhere,
    ),
    Rule(
        "no function is longer than 60 lines",
        long_function,
        bad=("def f():\n" + "    x = 1\n" * 61,),
        good=("def f():\n" + "    x = 1\n" * 60,),
        where=_anywhere,
    ),
    Rule(
        "no constructor takes more than 6 parameters",
        crowded_constructor,
        bad=("class A:\n    def __init__(self, a, b, c, d, e, f, *, g):\n        pass\n",),
        good=("class A:\n    def __init__(self, a, b, c, *, d, e, f):\n        pass\n",),
    ),
    Rule(
        "no function nests deeper than 4",
        deep_nesting,
        bad=(_deep(5), INSIDE_EXCEPT),
        good=(_deep(4), ELIF),
        where=_anywhere,
    ),
    Rule(
        "no file is called after nothing in particular",
        homeless_name,
        bad=("x = 1\n",),
        path=f"{PACKAGE}/engine/tensor_utils.py",
        where=_anywhere,
    ),
    Rule("every file is ASCII", not_ascii, bad=("x = '\u2192'\n",), where=_anywhere),
)
