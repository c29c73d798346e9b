"""The examples of the documentation: Python runs, commands, options and keys exist, links lead somewhere."""

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from docs.generator.examples import (
    FENCE,
    PAGES,
    ROOT,
    Block,
    blocks,
    command_lines,
    command_problem,
    config_problems,
)
from meshwright.cli import app

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TINY = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 16},
    **{"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"max_position_embeddings": 1024, "tie_word_embeddings": False},
}
PYTHON = sorted({block.page for block in blocks("python") if block.runs})
COMMANDS = [
    (block, words) for block in blocks("bash", "console") if block.runs for words in command_lines(block.text)
]


def test_every_fence_has_a_language():
    assert [str(block) for block in blocks() if not block.language] == []


def test_the_readme_has_at_most_200_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_every_link_between_pages_leads_somewhere():
    missing = []
    for page in {*PAGES, *(ROOT / "docs").rglob("*.md")}:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for target in LINK.findall(text):
            path = target.split("#")[0]
            if path and "://" not in target and not (page.parent / path).exists():
                missing.append(f"{page.relative_to(ROOT)} -> {target}")
    assert sorted(missing) == []


def test_every_page_that_the_source_names_exists():
    named = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"(?<!Gloo, )docs/[\w/]+\.md", path.read_text(encoding="utf-8"))
    }
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_every_python_block_parses():
    for block in blocks("python"):
        ast.parse(block.text, str(block))


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.stem)
def test_python_blocks_that_say_so_run(page: Path, capsys: pytest.CaptureFixture[str]):
    names: dict[str, Any] = {}
    for block in (block for block in blocks("python") if block.page == page and block.runs):
        names = names if block.continues else {"__name__": "example"}
        exec(compile(block.text, str(block), "exec"), names)
    assert "error" not in capsys.readouterr().err


def test_every_command_and_option_exists():
    told = [(block, words) for block in blocks("bash", "console") for words in command_lines(block.text)]
    assert len(told) > 40
    assert [f"{block}: {problem}" for block, words in told if (problem := command_problem(words))] == []


def test_an_unknown_command_option_or_key_is_noticed():
    text = "$ meshwright pln a.toml && meshwright plan a.toml --mesh.dp 2 --out \\\n b.toml\n"
    lines = list(command_lines(text))
    assert lines == [["pln", "a.toml"], ["plan", "a.toml", "--mesh.dp", "2", "--out", "b.toml"]]
    assert [command_problem(words) for words in lines] == [
        "there is no command 'pln'",
        "'plan' has no option '--mesh.dp'",
    ]
    config = {"mesh": {"dp": 2}, "strategies": [{"name": "zero", "stag": 3}, {"name": "none"}], "trian": {}}
    assert list(config_problems(config)) == ["mesh.dp", "strategy zero: stag", "strategy none: name", "trian"]


def test_every_config_has_keys_that_exist():
    found = []
    for block in blocks("toml"):
        config = tomllib.loads(block.text)
        if not {"device", "rates"} & set(config):  # a description of hardware
            found += [f"{block}: {problem}" for problem in config_problems(config)]
    assert found == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with examples/, whose model is a tiny one, and the text that they train on."""
    (tmp_path / "text").mkdir()
    text = "".join(f"print({n} + {n + 1} == {2 * n + 1})\n" for n in range(2000))
    (tmp_path / "text/sums.py").write_text(text)
    (tmp_path / "examples").mkdir()
    for path in (ROOT / "examples").glob("*.toml"):
        (tmp_path / "examples" / path.name).write_text(path.read_text())
    (tmp_path / "examples/llama-small.json").write_text(json.dumps(TINY))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("block", "words"), COMMANDS, ids=[" ".join(words)[:40] for _, words in COMMANDS])
def test_commands_that_say_so_run(block: Block, words: list[str], folder: Path):
    done = CliRunner().invoke(app, [word.replace("$source", str(folder / "text")) for word in words])
    assert done.exit_code == 0, f"{block}\n{done.output}"


def test_accelerates_loop_is_ported_in_no_more_lines():
    loops = [block.text for block in blocks("python") if block.page.name == "migration.md"]
    theirs, _, ours = loops[:3]
    assert "accelerator.prepare" in theirs
    assert "mw.parallelize" in ours
    assert len(ours.strip().splitlines()) <= len(theirs.strip().splitlines())
