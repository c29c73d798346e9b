"""The order of test files, on a small tree."""

from pathlib import Path

import pytest

from benchmarks.nearest_tests import ImportGraph, Stage, module_name, stages

ZERO = "src/meshwright/parallel/data/zero.py"
TREE = {
    "src/meshwright/__init__.py": "",
    "src/meshwright/parallel/data/zero.py": "STAGE = 3\n",
    "src/meshwright/parallel/registry.py": "from meshwright.parallel.data.zero import STAGE\n",
    "tests/parallel/data/test_zero.py": "from meshwright.parallel.data.zero import STAGE\n",
    "tests/parallel/data/test_zero_tokens.py": "import json\n",
    "tests/parallel/data/test_ddp.py": "from meshwright.parallel.data import zero\n",
    "tests/engine/test_step.py": "def f():\n    import meshwright.parallel.data.zero as z\n",
    "tests/plan/test_plan.py": "from meshwright.parallel.registry import STAGE\n",
    "tests/plan/test_mesh.py": "import meshwright\n",
    "tests/plan/cases.py": "from meshwright.parallel.data.zero import STAGE\n",
    "tests/docs/test_pages.py": "",
    "tests/house/test_rules.py": "from meshwright.parallel.data.zero import STAGE\n",
    "tests/benchmarks/test_mutants.py": "from meshwright.parallel.data.zero import STAGE\n",
}


@pytest.fixture
def graph(tmp_path: Path) -> ImportGraph:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return ImportGraph(tmp_path)


def test_the_distance_of_a_file_is_its_number_of_imports(graph: ImportGraph):
    distances = graph.distances(ZERO)
    assert distances["tests/parallel/data/test_zero.py"] == 1
    assert distances["tests/parallel/data/test_ddp.py"] == 1, (
        "`from package import module` imports the module"
    )
    assert distances["tests/engine/test_step.py"] == 1, "imports within a function count"
    assert distances["tests/plan/test_plan.py"] == 2
    assert "tests/plan/test_mesh.py" not in distances


def test_files_without_tests_are_no_test_files(graph: ImportGraph):
    assert "tests/plan/cases.py" not in graph.test_files


def test_mirrored_files_come_first_then_importers_by_folder_then_the_rest(graph: ImportGraph):
    mirrored = "tests/parallel/data/test_zero.py", "tests/parallel/data/test_zero_tokens.py"
    importers = "tests/parallel/data/test_ddp.py", "tests/engine/test_step.py"
    rest = "tests/plan/test_plan.py", "tests/plan/test_mesh.py"
    assert stages(ZERO, graph, {"plan/test_plan.py": {}}) == [
        Stage("mirrored", "default", mirrored),
        Stage("importers", "default", importers),
        Stage("rest", "default", rest),
        Stage("full", "full", ("tests/plan/test_plan.py", "tests/docs/test_pages.py")),
    ]


def test_a_module_that_no_test_imports_is_tested_by_those_that_import_its_importers_first(tmp_path: Path):
    for name, text in (
        TREE | {"tests/parallel/data/test_zero.py": "", "src/meshwright/alone.py": ""}
    ).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text if name.startswith("src") or "plan" in name else "")
    graph = ImportGraph(tmp_path)
    far = stages(ZERO, graph, {})[1]
    assert far == Stage("importers", "default", ("tests/plan/test_plan.py",))
    assert stages("src/meshwright/alone.py", graph, {})[0].name == "rest"


def test_stages_without_files_are_left_out(graph: ImportGraph):
    names = [stage.name for stage in stages("src/meshwright/parallel/registry.py", graph, {})]
    assert names == ["importers", "rest", "full"]


def test_a_package_is_the_module_of_its_init():
    assert module_name("src/meshwright/plan/__init__.py") == "meshwright.plan"
    assert module_name("tests/plan/test_plan.py") == "tests.plan.test_plan"
