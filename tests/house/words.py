"""Rules about words that the library does without: state that anybody can change, silent failure, unsafe
formats.
"""

import ast
from collections.abc import Callable, Iterator

from tests.house.source import PACKAGE, Finding, Rule, Source, calls, dotted, imported

PICKLES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"})
UNSAFE_CALLS = {
    "torch.load": "reads a pickle: use safetensors",
    "torch.save": "writes a pickle: use safetensors",
    "yaml.load": "runs code from the file: use TOML or JSON",
    "yaml.unsafe_load": "runs code from the file: use TOML or JSON",
    "eval": "runs text as code",
    "exec": "runs text as code",
}
OBJECT_COLLECTIVES = frozenset(
    {
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "scatter_object_list",
        "send_object_list",
        "recv_object_list",
    }
)
FOREIGN = "run/export/convert_pickle.py"  # the one reader of pickles, a script that only a child process runs
ENVIRONMENT = frozenset({"os.environ", "os.environb", "os.getenv", "os.getenvb"})


def global_statement(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield Finding(
                node.lineno, f"global {', '.join(node.names)}: pass the value, or keep it in the state"
            )


def bare_assert(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assert):
            yield Finding(
                node.lineno,
                "assert vanishes under -O and says no repair: raise an error with its three parts",
            )


def unsafe_format(source: Source) -> Iterator[Finding]:
    for name, line in imported(source):
        if PICKLES & set(name.split(".")):
            yield Finding(
                line, f"imports {name}: a file or message made of pickles runs code when it is read"
            )
        if name in UNSAFE_CALLS or name.split(".")[-1] in OBJECT_COLLECTIVES:
            yield Finding(line, f"imports {name}: {UNSAFE_CALLS.get(name, 'sends pickles')}")
    for name, call in calls(source):
        last = name.split(".")[-1]
        if name in UNSAFE_CALLS:
            yield Finding(call.lineno, f"{name} {UNSAFE_CALLS[name]}")
        if last in OBJECT_COLLECTIVES:
            yield Finding(
                call.lineno, f"{last} sends pickles: send a tensor of bytes, or JSON through the store"
            )
        if any(keyword.arg == "allow_pickle" and not _is_false(keyword.value) for keyword in call.keywords):
            yield Finding(call.lineno, "allow_pickle: a file made of pickles runs code when it is read")


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def environment(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and dotted(node) in ENVIRONMENT:
            yield Finding(node.lineno, f"{dotted(node)}: only cli knows the environment; take an argument")
    for name, line in imported(source):
        if name in ENVIRONMENT:
            yield Finding(line, f"imports {name}: only cli knows the environment; take an argument")


def prints(source: Source) -> Iterator[Finding]:
    for name, call in calls(source):
        if name in ("print", "rich.print", "sys.stdout.write", "sys.stderr.write"):
            yield Finding(call.lineno, f"{name}: only cli prints; return the text, or log it")


def guessed_attribute(source: Source) -> Iterator[Finding]:
    for name, call in calls(source):
        if name == "hasattr":
            yield Finding(call.lineno, "hasattr: let the type say what there is")
        if name == "getattr" and len(call.args) > 2:
            yield Finding(call.lineno, "getattr with a default: let the type say what there is")


def swallowed_exception(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.ExceptHandler)
            and _catches_all(node.type)
            and all(map(_does_nothing, node.body))
        ):
            yield Finding(
                node.lineno, "catches everything and goes on: name the exception, and say what became of it"
            )
    for name, call in calls(source):
        if name.split(".")[-1] == "suppress" and any(map(_catches_all, call.args)):
            yield Finding(call.lineno, "suppresses everything: name the exception")


def _catches_all(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Tuple):
        return any(map(_catches_all, node.elts))
    return node is None or dotted(node) in ("Exception", "BaseException")


def _does_nothing(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass | ast.Continue) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def module_state(source: Source) -> Iterator[Finding]:
    for node in source.tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        names = [dotted(target) for target in targets]
        if (
            value is not None
            and _is_mutable(value)
            and not all(name.strip("_").isupper() or name == "__all__" for name in names)
        ):
            yield Finding(
                node.lineno,
                (
                    f"{', '.join(names)} is a mutable value of the module: a constant has a "
                    f"NAME_LIKE_THIS and stays"
                ),
            )


def _is_mutable(node: ast.expr) -> bool:
    made = isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in (
        "dict",
        "list",
        "set",
        "defaultdict",
        "deque",
        "Counter",
    )
    return made or isinstance(node, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def _in_package(source: Source) -> bool:
    return source.path.startswith(PACKAGE)


def _not_foreign(source: Source) -> bool:
    return _in_package(source) and source.inside != FOREIGN


def _not_cli(source: Source) -> bool:
    return _in_package(source) and not source.inside.startswith("cli/")


def _except(body: str, caught: str = "Exception") -> str:
    return f"for x in y:\n    try:\n        f(x)\n    except {caught}:\n        {body}\n"


def _each(lines: str) -> tuple[str, ...]:
    return tuple(line.strip() + "\n" for line in lines.strip().splitlines())


def _rule(
    sentence: str, find: Callable[[Source], Iterator[Finding]], bad: str, good: str = "", **options
) -> Rule:
    return Rule(sentence, find, _each(bad), _each(good), **options)


RULES = (
    Rule("nothing is global", global_statement, bad=("def f():\n    global x\n    x = 1\n",)),
    _rule("the library has no bare assert", bare_assert, bad="assert x, 'x'"),
    _rule(
        "nothing that is read or received can run code",
        unsafe_format,
        bad="""
            import pickle
            from torch.serialization import pickle
            from torch import load; from torch import save; torch.load(f)
            torch.load(f, weights_only=True)
            torch.save(x, f)
            yaml.load(f)
            eval(text)
            exec(text)
            numpy.load(f, allow_pickle=True)
            dist.all_gather_object(out, x)
            broadcast_object_list(x)
            from torch.distributed import gather_object
        """,
        good="""
            safetensors.torch.load_file(f)
            json.load(f)
            numpy.load(f, allow_pickle=False)
            model.eval()
        """,
        where=_not_foreign,
    ),
    _rule(
        "only cli reads the environment",
        environment,
        bad="""
            import os; x = os.environ["X"]
            x = os.getenv("X")
            from os import environ
            from os import getenv
        """,
        good="x = settings.environ",
        where=_not_cli,
    ),
    _rule(
        "only cli prints",
        prints,
        bad="print(1)\nsys.stdout.write(x)",
        good="pprint.pformat(x)",
        where=_not_cli,
    ),
    _rule(
        "no attribute is guessed",
        guessed_attribute,
        bad="hasattr(x, 'y')\ngetattr(x, 'y', None)",
        good="getattr(x, name)",
    ),
    Rule(
        "no exception is swallowed unnamed",
        swallowed_exception,
        bad=(
            _except("pass"),
            _except("continue"),
            _except("..."),
            _except("pass", "(OSError, BaseException)"),
            "with suppress(Exception):\n    f()\n",
        ),
        good=(_except("pass", "KeyError"), _except("raise"), _except("log(x)")),
    ),
    _rule(
        "no module has a state of its own",
        module_state,
        bad="cache = {}\nseen: set[int] = set()\ntable = [x for x in y]",
        good="MOVES = {1: 2}\nx = (1, 2)\n__all__ = ['a']",
    ),
)
