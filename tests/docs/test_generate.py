"""The generated pages, from a small package made for the purpose."""

import json
import re
import shutil
from pathlib import Path

import pytest

from docs.generate import described, essays, kinds, markdown, stale, techniques, write

STEPS = '''"""Steps.

    F       forward         B     backward
    STEP    the optimizer
"""
x = Action("F"), Action(kind="STEP")
'''
ALPHA = '''"""The first idea.

    REDUCE  sums of * stars
"""
x = Action("REDUCE")
'''
BETA = '''"""The second idea.

It brings a CAST (to a narrow dtype)."""
x = Action("CAST"), Action("REDUCE")
'''

PACKAGE = {
    "plan/step/single_device_program.py": STEPS,
    "parallel/data/alpha.py": ALPHA,
    "parallel/data/beta.py": BETA,
    "parallel/data/__init__.py": '"""A family."""\n',
    "parallel/pipeline/schedules/gamma.py": '"""The third idea."""\n',
    "parallel/pipeline/schedules/registry.py": '"""Shared by schedules."""\n',
    "parallel/__init__.py": '"""All families."""\n',
    "engine/step/executor.py": '"""Executes."""\nx = Action("LOST"), Action(kind), Other("OTHER")\n',
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in PACKAGE.items():
        path = tmp_path / "src/meshwright" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_every_technique_has_a_page_and_a_row_of_the_index(root: Path):
    assert write(root) == [
        "docs/reference/actions.md",
        "docs/techniques/data/alpha.md",
        "docs/techniques/data/beta.md",
        "docs/techniques/index.md",
        "docs/techniques/pipeline/schedules/gamma.md",
    ]
    assert "The first idea." in (root / "docs/techniques/data/alpha.md").read_text()
    index = (root / "docs/techniques/index.md").read_text()
    assert "## Data parallelism" in index
    assert "| [beta](data/beta.md) | The second idea. |" in index
    assert "| [gamma](pipeline/schedules/gamma.md) | The third idea. |" in index


def test_a_page_says_how_a_config_asks_for_the_technique(root: Path):
    text = '"""Idea."""\nclass A(Strategy):\n    name: ClassVar[str] = "a"\n    mode: ClassVar[str] = "2d"\n'
    (root / "src/meshwright/parallel/data/alpha.py").write_text(text)
    write(root)
    page = (root / "docs/techniques/data/alpha.md").read_text()
    assert (
        'In a config: `name = "a"`, `mode = "2d"` ([options](../../reference/config.md#strategies)).' in page
    )


def test_a_kind_is_owned_by_the_module_that_makes_and_describes_it(root: Path):
    found = {kind.name: (Path(kind.owner).name, kind.meaning) for kind in kinds(essays(root))}
    assert found == {
        "F": ("single_device_program.py", "forward"),
        "STEP": ("single_device_program.py", "the optimizer"),
        "REDUCE": ("alpha.py", "sums of * stars"),
        "CAST": ("beta.py", "to a narrow dtype"),
        "LOST": ("executor.py", ""),
    }


def test_a_kind_in_the_second_column_is_described():
    assert described("B", "    F       forward         B     backward") == "backward"


@pytest.mark.parametrize("text", ["    compute   F0 F1 B", "A BACK (way).", "    REDUCE  a B  thing", ""])
def test_a_kind_that_is_only_drawn_is_not_described(text: str):
    assert described("B", text) == ""


def test_pages_are_up_to_date_once_written_and_not_after_a_change(root: Path):
    assert "docs/reference/actions.md is missing" in stale(root)
    write(root)
    assert stale(root) == []
    source = root / "src/meshwright/parallel/data/alpha.py"
    source.write_text(source.read_text().replace("first", "very first"))
    assert stale(root) == [
        "docs/techniques/data/alpha.md is not up to date",
        "docs/techniques/index.md is not up to date",
    ]


def test_the_page_of_a_technique_that_is_gone_is_stale_and_then_removed(root: Path):
    write(root)
    (root / "src/meshwright/parallel/data/beta.py").unlink()
    assert "docs/techniques/data/beta.md describes nothing that is there" in stale(root)
    write(root)
    assert not (root / "docs/techniques/data/beta.md").exists()


def measured(error: float, *, holds: bool) -> str:
    row = {"family": "gpt_2", "class": "Net", "source": "config.json", "blocks": "5", "declared": "nothing"}
    row |= {"layer_roles": "2 rowwise", "round_trip": {"compared": "the outputs", "difference": 1e-8}}
    versions = {"torch": "2.13", "python": "3.11"}
    found = {
        "claim": "many models train",
        "holds": holds,
        "median": 1.0,
        "values": [error],
        "date": "2026-11-20T18:00:00+00:00",
    }
    found |= {
        "commit": f"{'a' * 40}-dirty",
        "versions": versions,
        "detail": {"families": [{**row, "errors": {"2": error, "3": 0.0}}]},
    }
    return json.dumps(found)


def test_the_page_of_models_is_made_from_the_result_of_its_benchmark(root: Path):
    assert "docs/reference/models.md" not in write(root)
    (root / "benchmarks/results").mkdir(parents=True)
    (root / "benchmarks/models").mkdir()
    (root / "benchmarks/models/model_coverage.py").write_text('"""Which models train."""\n')
    (root / "src/meshwright/model/tensor_parallel").mkdir(parents=True)
    (root / "src/meshwright/model/tensor_parallel/layer_roles.py").write_text('"""How weights split."""\n')
    result = root / "benchmarks/results/model_coverage.json"
    result.write_text(measured(2.5e-16, holds=True))
    assert "docs/reference/models.md is missing" in stale(root)
    write(root)
    page = (root / "docs/reference/models.md").read_text()
    assert "Which models train." in page
    assert "How weights split." in page
    assert (
        "| gpt\\_2 | `Net` | config.json | 5 | 2 rowwise | nothing | 2.5e-16 | 0.0e+00 | "
        "1.0e-08 (the outputs) |" in page
    )
    assert "It holds: 1 of 1 families. 2026-11-20, commit aaaaaaaaaaaa-dirty, torch 2.13." in page
    result.write_text(measured(1.0, holds=False))
    assert "docs/reference/models.md is not up to date" in stale(root)
    write(root)
    assert "It does NOT hold" in (root / "docs/reference/models.md").read_text()


def test_the_page_of_models_has_the_heads_and_the_messages_of_refusals(root: Path):
    for folder in ("benchmarks/results", "benchmarks/models", "src/meshwright/model/tensor_parallel"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for module in ("model_coverage", "hf_defaults"):
        (root / f"benchmarks/models/{module}.py").write_text(f'"""The essay of {module}."""\n')
    (root / "benchmarks/results/model_coverage.json").write_text(measured(2.5e-16, holds=True))
    common = {"kind": "causal", "collator": "causal"}
    plans = {
        "tp 2": 3e-16,
        "cp 2": "refused: ring: no\n  repair: tp",
        "cp 3": "refused: ring: no\n  repair: tp",
    }
    heads = [
        {**common, "case": "Good", "one device": 2e-15, "plans": plans},
        {**common, "case": "Bad", "refused": "loss: none\n  repair: state it"},
    ]
    result = {**json.loads(measured(2e-15, holds=True)), "detail": {"heads": heads}}
    (root / "benchmarks/results/hf_defaults.json").write_text(json.dumps(result))
    write(root)
    page = (root / "docs/reference/models.md").read_text()
    assert "The essay of hf\\_defaults." in page
    assert "| `Good` | causal | causal | 2.0e-15 | 3.0e-16 | cp 2, cp 3 |" in page
    assert "| `Good` | cp 2, cp 3 | ring: no |" in page
    assert "| `Bad` | every plan | loss: none |" in page


def test_the_page_of_collectives_is_the_docstring_of_the_group(root: Path):
    assert "docs/reference/collectives.md" not in write(root)
    (root / "src/meshwright/comm/collectives").mkdir(parents=True)
    source = root / "src/meshwright/comm/collectives/group.py"
    source.write_text(
        'class Group:\n    """The ranks.\n\n        call    sent\n        send    S\n\n'
        '    In place.\n    """\n'
    )
    assert "docs/reference/collectives.md is missing" in stale(root)
    write(root)
    page = (root / "docs/reference/collectives.md").read_text()
    assert "The ranks.\n\n```text\ncall    sent\nsend    S\n```\n\nIn place.\n" in page
    source.write_text('class Group:\n    """Others."""\n')
    assert "docs/reference/collectives.md is not up to date" in stale(root)


def test_two_techniques_of_one_name_are_refused(root: Path):
    shutil.copytree(root / "src/meshwright/parallel/data", root / "src/meshwright/parallel/other")
    with pytest.raises(
        ValueError, match=r"techniques of the same name in two families: alpha, beta; .* rename one"
    ):
        techniques(essays(root))


def test_pictures_become_fenced_text_and_prose_is_escaped():
    assert markdown("Sum a * b of `x * y`:\n\n    a * b\n\n      c\n\nCost: n.\nLimits: none.") == (
        "Sum a \\* b of `x * y`:\n\n```text\na * b\n\n  c\n```\n\n**Cost:** n.\n\n**Limits:** none."
    )


def test_the_lines_that_the_page_of_hangs_quotes_issue_collectives():
    tree = Path(__file__).parents[2]
    page = (tree / "docs/concepts/hangs.md").read_text()
    quoted = re.findall(r"(src/meshwright/\S+\.py):(\d+)", page)
    assert quoted
    for file, line in quoted:
        assert "group.all_reduce(" in (tree / file).read_text().splitlines()[int(line) - 1]
