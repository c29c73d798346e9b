"""The examples of the documentation: Python runs, commands, options and keys exist, links lead somewhere.

A Python block behind `<!-- run -->` is run by itself, one behind `<!-- run continue -->` with the names of
the block before it. A block of commands behind `<!-- run -->` is run beside examples/, where the model is a
tiny one.
"""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from typer.testing import CliRunner

from docs.generator.cli_page import commands as known_commands
from meshwright.cli import app
from meshwright.parallel import STRATEGIES
from meshwright.plan.job.job import Job
from meshwright.plan.job.run_options import RunConfig
from meshwright.plan.sharding.mesh import Mesh

ROOT = Path(__file__).parents[2]
HAND_WRITTEN = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/tutorial/*.md",
    "docs/howto/*.md",
    "docs/concepts/*.md",
)
PAGES = sorted(path for pattern in HAND_WRITTEN for path in ROOT.glob(pattern))
FENCE = re.compile(r"^(?:<!-- run( continue)? -->\n)?(`{3,})([^\n`]*)\n(.*?)^\2$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TABLES = {
    **{field.name: get_type_hints(Job)[field.name] for field in fields(Job)},
    "mesh": Mesh,
    "run": RunConfig,
}
TINY = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 16},
    **{"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"max_position_embeddings": 1024, "tie_word_embeddings": False},
}


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    language: str
    text: str
    runs: bool
    continues: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}: {self.text.strip()[:60]!r}"


def blocks(page: Path) -> Iterator[Block]:
    for found in FENCE.finditer(page.read_text(encoding="utf-8")):
        runs = found.group(0).startswith("<!-- run")
        yield Block(page, found.group(3).strip(), found.group(4), runs, bool(found.group(1)))


BLOCKS = [block for page in PAGES for block in blocks(page)]


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def test_every_fence_has_a_language():
    assert [str(block) for block in BLOCKS if not block.language] == []


def test_the_readme_has_at_most_200_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_every_link_between_pages_leads_somewhere():
    missing = []
    for page in [*PAGES, *(ROOT / "docs").rglob("*.md")]:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for target in LINK.findall(text):
            path = target.split("#")[0]
            if path and "://" not in target and not (page.parent / path).exists():
                missing.append(f"{page.relative_to(ROOT)} -> {target}")
    assert missing == []


def test_every_page_that_the_source_names_exists():
    named = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"docs/[\w/]+\.md", path.read_text())
    }
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_every_python_block_parses():
    for block in of("python"):
        ast.parse(block.text, str(block))


@pytest.mark.parametrize(
    "page", sorted({block.page for block in of("python") if block.runs}), ids=lambda page: page.stem
)
def test_python_blocks_that_say_so_run(page: Path, capsys: pytest.CaptureFixture[str]):
    names: dict[str, Any] = {}
    for block in (block for block in of("python") if block.page == page and block.runs):
        names = names if block.continues else {"__name__": "example"}
        exec(compile(block.text, str(block), "exec"), names)
    assert "error" not in capsys.readouterr().err


def commands(text: str) -> Iterator[list[str]]:
    """The `meshwright` commands of a shell block, each as its words; backslashes join lines."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|\|(?!\|)", line.removeprefix("$ ").split(" #")[0]):
            found = re.search(r"(?:^|\s|-m )meshwright ([a-z-].*)", part)
            if found and not part.lstrip().startswith("#"):
                yield shlex.split(found.group(1))


COMMANDS = {command.name: command for command in known_commands()}


def unknown(words: list[str]) -> str:
    """What is unknown among the words of a command; empty when there is nothing."""
    if words[0] == "--version":
        return ""
    command = COMMANDS.get(" ".join(words[:2])) or COMMANDS.get(words[0])
    if command is None:
        return f"there is no command '{words[0]}'"
    options = {flag for each in command.options for flag in each.flags} | {"--help"}
    for word in (word.split("=")[0] for word in words if word.startswith("--")):
        if word not in options and not key_exists(word.removeprefix("--").split(".")):
            return f"'{command.name}' has no option '{word}'"
    return ""


def key_exists(path: list[str]) -> bool:
    if path in (["micro_batch"], ["strategies"]):
        return True
    table = TABLES.get(path[0])
    return table is not None and unknown_keys(table, _nested(path[1:])) == []


def _nested(path: list[str]) -> Any:
    return {path[0]: _nested(path[1:])} if path else None


def test_every_command_and_option_exists():
    told = [(str(block), words) for block in of("bash", "console") for words in commands(block.text)]
    assert len(told) > 40
    assert [f"{block}: {problem}" for block, words in told if (problem := unknown(words))] == []


def unknown_keys(table: type, given: Any) -> list[str]:
    """The keys of `given` that `table` has not."""
    if not isinstance(given, dict):
        return []
    hints, found = get_type_hints(table), []
    for key, value in given.items():
        if key not in hints:
            found.append(key)
            continue
        inner = next(
            (
                each
                for each in (hints[key], *get_args(hints[key]))
                if isinstance(each, type) and is_dataclass(each)
            ),
            None,
        )
        if inner is not None:
            found += [
                f"{key}.{each}"
                for one in (value if isinstance(value, list) else [value])
                for each in unknown_keys(inner, one)
            ]
    return found


def problems(config: dict[str, Any]) -> Iterator[str]:
    """What is unknown in a config."""
    for name, given in config.items():
        if name == "strategies":
            for one in given:
                modes = STRATEGIES.get(one["name"], {})
                keys = {field.name for strategy in modes.values() for field in fields(strategy)} | {
                    "name",
                    "mode",
                }
                yield from (f"strategy {one['name']}: {key}" for key in one if not modes or key not in keys)
        elif name in TABLES:
            yield from (f"{name}.{key}" for key in unknown_keys(TABLES[name], given))
        elif name not in ("micro_batch", "cluster"):
            yield name


def test_every_config_is_valid_toml_with_keys_that_exist():
    found = []
    for block in of("toml"):
        config = tomllib.loads(block.text)
        if not {"device", "rates"} & set(config):  # a description of hardware
            found += [f"{block}: {problem}" for problem in problems(config)]
    assert found == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with examples/, whose model is a tiny one, and the text that they train on."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text/sums.py").write_text(
        "".join(f"print({n} + {n + 1} == {2 * n + 1})\n" for n in range(2000))
    )
    (tmp_path / "examples").mkdir()
    for path in (ROOT / "examples").glob("*.toml"):
        (tmp_path / "examples" / path.name).write_text(path.read_text())
    (tmp_path / "examples/llama-small.json").write_text(json.dumps(TINY))
    monkeypatch.chdir(tmp_path)
    return tmp_path


RUN = [(block, words) for block in of("bash", "console") if block.runs for words in commands(block.text)]


@pytest.mark.parametrize(("block", "words"), RUN, ids=[" ".join(words)[:40] for _, words in RUN])
def test_commands_that_say_so_run(block: Block, words: list[str], folder: Path):
    done = CliRunner().invoke(app, [word.replace("$source", str(folder / "text")) for word in words])
    assert done.exit_code == 0, f"{block}\n{done.output}"
