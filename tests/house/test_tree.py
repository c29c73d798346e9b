"""Rules about the tree as a whole: tests mirror the source, pages and tables are complete, imports stay
light.
"""

import ast
import configparser
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path, PurePosixPath

import pytest

from docs.generate import essays, kinds, stale
from meshwright.plan.sharding.tensor_placements import ADJOINT, REDISTRIBUTIONS
from tests.house.source import PACKAGE, ROOT, Finding, Source, package_sources, python_sources, report

TEXT = ("*.md", "*.toml", "*.sh", "*.yaml", "*.yml", "*.txt", "*.lock")
HEAVY = ("torch", "transformers", "numpy")


def sources_mirrored_by(test: str, known: set[str]) -> list[str]:
    """The files of `known` that the test file `test` may be about: `test_ring.py` and `test_ring_causal.py`
    mirror `ring.py`, of the package, of another folder, or beside the test.
    """
    path = PurePosixPath(test)
    folder = path.parent.relative_to("tests").as_posix()
    folder = "" if folder == "." else f"{folder}/"
    stems = path.stem.removeprefix("test_").split("_")
    names = ["_".join(stems[:end]) for end in range(len(stems), 0, -1)]
    tails = [tail for name in names for tail in (f"{folder}{name}.py", f"{folder}{name}/__init__.py")]
    return [path for tail in tails for path in (f"{PACKAGE}/{tail}", tail, f"tests/{tail}") if path in known]


def mirrorless(tests: list[str], known: set[str]) -> list[tuple[str, Finding]]:
    """Every test file outside `tests/house` that is about no file of `known`."""
    named = [
        test
        for test in tests
        if PurePosixPath(test).name.startswith("test_") and not test.startswith("tests/house/")
    ]
    return [
        (test, Finding(1, "mirrors no source file")) for test in named if not sources_mirrored_by(test, known)
    ]


def test_every_test_file_mirrors_a_source_file():
    known = {
        source.path for source in python_sources("src", "benchmarks", "docs", "examples", "tests/network")
    }
    found = mirrorless([source.path for source in python_sources("tests")], known)
    assert not found, report("every test file mirrors a source file", found)


def test_a_test_file_without_a_source_is_noticed():
    known = {f"{PACKAGE}/engine/step.py", f"{PACKAGE}/cli.py", "benchmarks/harness/interleaved_timing.py"}
    right = [
        "tests/engine/test_step.py",
        "tests/engine/test_step_order.py",
        "tests/test_cli.py",
        "tests/benchmarks/harness/test_interleaved_timing.py",
    ]
    wrong = ["tests/test_step.py", "tests/engine/test_cli.py", "tests/engine/test_other.py"]
    assert [path for path, _ in mirrorless([*right, *wrong, "tests/house/test_rules.py"], known)] == wrong


def open_moves(moves: Mapping[tuple[str, str], str], adjoint: Mapping[str, str]) -> list[str]:
    """Returns what keeps a table of moves from being closed under adjoint: letters that are no involution,
    moves without a backward.
    """
    odd = [
        f"adjoint(adjoint({letter})) is not {letter}"
        for letter in adjoint
        if adjoint.get(adjoint[letter]) != letter
    ]
    absent = [
        f"{src} -> {dst} is no move" for src, dst in product(adjoint, adjoint) if (src, dst) not in moves
    ]
    lost = [
        f"{src} -> {dst} has no backward" for src, dst in moves if (adjoint[dst], adjoint[src]) not in moves
    ]
    return odd + absent + lost


def test_the_move_table_is_closed_under_adjoint():
    assert open_moves(REDISTRIBUTIONS, ADJOINT) == []


def test_a_move_without_a_backward_is_noticed():
    without = {move: name for move, name in REDISTRIBUTIONS.items() if move != ("P", "I")}
    assert "I -> R has no backward" in open_moves(without, ADJOINT)
    assert "adjoint(adjoint(R)) is not R" in open_moves(REDISTRIBUTIONS, {**ADJOINT, "P": "P"})


def test_every_action_kind_is_described_by_the_essay_of_its_owner():
    found = [
        (
            kind.owner,
            Finding(
                1,
                (
                    f"{kind.name} is not described: write `{kind.name}   meaning` as a line of a "
                    f"column, or `{kind.name} (meaning)`"
                ),
            ),
        )
        for kind in kinds(essays())
        if not kind.meaning
    ]
    assert not found, report("every action kind is described", found)


def test_every_generated_page_is_up_to_date():
    said = stale()
    assert not said, "run `make docs`:\n  " + "\n  ".join(said)


@pytest.mark.parametrize("command", ["import meshwright", "--help"])
def test_the_first_answer_does_not_wait_for_heavy_imports(command: str):
    shown = (
        "import meshwright"
        if command.startswith("import")
        else f"import meshwright.cli; sys.argv = ['meshwright', {command!r}]; meshwright.cli.main()"
    )
    code = (
        f"import atexit, sys; atexit.register(lambda: print('LOADED', *sorted(set({HEAVY}) & "
        f"set(sys.modules)))); {shown}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    loaded = re.search(r"^LOADED(.*)$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, done.stderr
    assert loaded is not None, done.stdout
    assert loaded.group(1).split() == []


MAX_MODULES = 12


def modules_by_folder() -> dict[str, list[str]]:
    """The names of the modules of every folder of the package and the benchmarks, `__init__` left out."""
    found: dict[str, list[str]] = {}
    for source in [*package_sources(), *python_sources("benchmarks")]:
        path = PurePosixPath(source.path)
        names = found.setdefault(path.parent.as_posix(), [])
        if path.stem not in ("__init__", "__main__"):
            names.append(path.stem)
    return found


def test_a_folder_holds_at_most_twelve_modules():
    crowded = {
        folder: len(names) for folder, names in modules_by_folder().items() if len(names) > MAX_MODULES
    }
    assert not crowded, f"more than {MAX_MODULES} modules: {crowded}"


def test_the_docstring_of_every_package_names_its_modules_and_no_others():
    sources = [*package_sources(), *python_sources("benchmarks")]
    docs = {source.path: ast.get_docstring(source.tree) or "" for source in sources}
    found = []
    for folder, names in modules_by_folder().items():
        text = docs.get(f"{folder}/__init__.py", "")
        lacking = [name for name in names if not re.search(rf"\b{name}\b", text)]
        if lacking and folder != PACKAGE:
            found.append((f"{folder}/__init__.py", Finding(1, f"does not name {', '.join(lacking)}")))
        listed = re.findall(r"^ *(\w+) {2,}\S", text, re.MULTILINE)
        gone = [name for name in listed if not list((ROOT / folder).glob(f"{name}*"))]
        if gone:
            found.append((f"{folder}/__init__.py", Finding(1, f"names {', '.join(gone)}, which is gone")))
    assert not found, report("the docstring of every package is its map", found)


def test_no_two_public_classes_have_one_name():
    places: dict[str, list[str]] = {}
    for source in package_sources():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(source.path)
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not twice, f"{len(twice)} class names occur twice: {twice}"


def test_every_organ_has_its_layer():
    config = configparser.ConfigParser()
    config.read(ROOT / ".importlinter")
    layers = set(re.findall(r"\w+", config["importlinter:contract:layers"]["layers"]))
    organs = {source.organ for source in package_sources()} - {"__init__", "__main__"}
    assert organs <= layers, f"no layer in .importlinter for: {', '.join(sorted(organs - layers))}"


def odd_characters(path: Path) -> list[Finding]:
    """The lines of a text file that are not ASCII."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Finding(number, "not ASCII") for number, line in enumerate(lines, 1) if not line.isascii()]


def test_every_text_file_is_ascii():
    own = [
        path
        for folder in (".", "docs", "examples", "benchmarks")
        for pattern in TEXT
        for path in (ROOT / folder).glob(pattern)
    ]
    own += [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.toml"),
        ROOT / "Makefile",
        ROOT / "LICENSE",
        ROOT / ".importlinter",
    ]
    found = [
        (path.relative_to(ROOT).as_posix(), finding)
        for path in sorted(set(own))
        for finding in odd_characters(path)
    ]
    assert not found, report("every text file is ASCII", found)


def test_a_character_that_is_not_ascii_is_noticed(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("plain\na \u2192 b\n", encoding="utf-8")
    assert [finding.line for finding in odd_characters(page)] == [2]


def test_every_fenced_block_in_a_page_has_a_language():
    found = []
    for path in sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")}):
        fences = [
            (number, line)
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if line.lstrip().startswith("```")
        ]
        found += [
            (path.relative_to(ROOT).as_posix(), Finding(number, "a block without a language"))
            for number, line in fences[::2]
            if line.strip() == "```"
        ]
    assert not found, report("every fenced block has a language", found)


MODULE_NAME = re.compile(r"(?<![\w./-])meshwright(?!\.pth\b)(?:\.[a-z]\w*)+")  # pip has meshwright.pth
FILE_NAME = re.compile(r"(?<![\w/.-])(?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|c|h|csv|toml)\b")
FOLDERS = ("", "docs", "tests", "benchmarks", PACKAGE)


def missing_module(name: str) -> bool:
    """Whether the dotted `name` is no module of the package, nor a name inside of one."""
    path = ROOT / "src" / name.replace(".", "/")
    package = path.parent / "__init__.py"
    is_module = path.is_dir() or path.with_suffix(".py").exists() or path.parent.with_suffix(".py").exists()
    # what else a package has is imported or defined in its `__init__`
    return not is_module and not (
        package.exists() and re.search(rf"\b{path.name}\b", package.read_text(encoding="utf-8"))
    )


def missing_references(source: Source) -> Iterator[Finding]:
    """The modules and files that `source` names and that do not exist."""
    folders = [ROOT / folder for folder in FOLDERS]
    folders += [path for path in (ROOT / PACKAGE).iterdir() if path.is_dir()]
    for number, line in enumerate(source.text.splitlines(), 1):
        for name in MODULE_NAME.findall(line):
            if missing_module(name):
                yield Finding(number, f"names the module {name}, which does not exist")
        for name in FILE_NAME.findall(line):
            if not any((folder / name).exists() for folder in folders):
                yield Finding(number, f"names the file {name}, which does not exist")
    for call in ast.walk(source.tree):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "import_command":
            name = f"meshwright.commands.{ast.literal_eval(call.args[0])}"
            if not (ROOT / "src" / f"{name.replace('.', '/')}.py").exists():
                yield Finding(call.lineno, f"imports the module {name}, which does not exist")


def test_modules_and_files_that_are_named_exist():
    sources = python_sources("src", "benchmarks", "docs")
    found = [(source.path, finding) for source in sources for finding in missing_references(source)]
    assert not found, report("modules and files that are named exist", found)


@pytest.mark.parametrize(
    "line",
    [
        'import_command("gone")',
        'import_module("meshwright.engine.gone.executor")',
        'import_module("meshwright.plan.sharding.gone")',
        '"""See planner/gone.py."""',
    ],
)
def test_a_name_without_a_module_is_noticed(line: str):
    assert len(list(missing_references(Source("src/meshwright/api.py", line)))) == 1
