"""Rules on layers: outside `parallel/` nothing compares with the name of a strategy or of a technique's
file, and outside `device/` nothing names an accelerator or its backend.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from tests.house.source import PACKAGE, Finding, Function, Rule, Source, package_sources

# Strategy names and module names that are ordinary strings elsewhere, each with the other thing that it
# names.
ORDINARY = {
    "activation_checkpointing": "a key of the strategies of a measured run, read by the search",
    "interleaved": "a kind of schedule among the choices of the search",
    "sequence_parallel": "a key of the strategies of a measured run, read by the search",
    "ulysses": "a key of the strategies of a measured run, read by the search",
}

DEVICE_WORD = re.compile(r"(?<![a-z])(cuda|nccl|rccl|xpu|xccl|hpu|mps)(?![a-z])", re.IGNORECASE)
# Files that name them as their subject, not as the device of this process.
NAMES_DEVICES = {
    "commands/import_config/accelerate.py": "its kinds of distributed launch",
    "commands/import_config/megatron_rules.py": "its options",
    "run/doctor/gpu_checks.py": "the variables of a user that it warns of",
    "run/doctor/start_up.py": "cites a measurement of NCCL",
    "verifier/nccl_deadlocks.py": "the rules of NCCL, checked on paper",
    "verifier/static_checks.py": "calls them",
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


def named_devices(source: Source) -> Iterator[Finding]:
    """Yields identifiers, attributes and strings that name an accelerator or its backend; docstrings,
    comments and the modules that are imported may.
    """
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(source.tree)
        if isinstance(node, Function | ast.ClassDef | ast.Module) and ast.get_docstring(node) is not None
    }
    for node in ast.walk(source.tree):
        match node:
            case (
                ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text) | ast.keyword(arg=str(text))
            ):
                pass
            case ast.FunctionDef(name=text) | ast.ClassDef(name=text) | ast.alias(name=text):
                pass
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                pass
            case _:
                continue
        if DEVICE_WORD.search(text):
            yield Finding(node.lineno, f"'{text[:40]}': ask src/meshwright/device")


def _outside_device(source: Source) -> bool:
    return source.path.startswith(PACKAGE) and source.organ != "device" and source.inside not in NAMES_DEVICES


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
    Rule(
        "outside device/ nothing names an accelerator",
        named_devices,
        bad=(
            "torch.cuda.synchronize()\n",
            "if tensor.is_cuda: pass\n",
            "device = 'cuda:0'\n",
            "f(f'cuda:{rank}')\n",
            "backend = 'nccl' if x else 'gloo'\n",
            "NCCL_FIX = 1\n",
            "from torch import mps\n",
            "def use_xpu(): pass\n",
            "raise ValueError('set CUDA_VISIBLE_DEVICES')\n",
        ),
        good=(
            "def f():\n    'NCCL waits.'\n",
            "x = 1  # cuda\n",
            "from meshwright.verifier.nccl_deadlocks import check\n",
            "throughput = 'lamps'\n",
            "device.type != 'cpu'\n",
        ),
        where=_outside_device,
    ),
)
