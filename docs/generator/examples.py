"""Finds the examples of hand-written pages, and what is unknown in them: commands, options, config keys.

A block behind `<!-- run -->` is run by the tests; `<!-- run continue -->` continues the block before it.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from docs.generator.cli_page import commands
from meshwright.parallel import STRATEGIES
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.errors import Diagnostic, collect_diagnostics
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.config.strategy_tables import strategies_from_tables

ROOT = Path(__file__).parents[2]
PATTERNS = (
    *("README.md", "CONTRIBUTING.md", "docs/*.md"),
    *("docs/tutorial/*.md", "docs/howto/*.md", "docs/concepts/*.md"),
)
PAGES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
FENCE = re.compile(r"^(?:<!-- run( continue)? -->\n)?(`{3,})([^\n`]*)\n(.*?)^\2$", re.MULTILINE | re.DOTALL)
TABLES = {
    **{field.name: get_type_hints(Job)[field.name] for field in fields(Job)},
    "mesh": Mesh,
    "run": RunConfig,
}
COMMANDS = {command.name: command for command in commands()}


@dataclass(frozen=True)
class Block:
    """One fenced block of a page; `runs` and `continues` say what the comment before it asks for."""

    page: Path
    language: str
    text: str
    runs: bool
    continues: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}: {self.text.strip()[:60]!r}"


def blocks(*languages: str) -> list[Block]:
    """Returns the blocks of all pages in `languages`, or in any."""
    found = [block for page in PAGES for block in _blocks_of(page)]
    return [block for block in found if not languages or block.language in languages]


def _blocks_of(page: Path) -> Iterator[Block]:
    for found in FENCE.finditer(page.read_text(encoding="utf-8")):
        runs = found.group(0).startswith("<!-- run")
        yield Block(page, found.group(3).strip(), found.group(4), runs, bool(found.group(1)))


def command_lines(text: str) -> Iterator[list[str]]:
    """Yields the `meshwright` commands of a shell block, each as a list of words; backslashes join lines."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|\|(?!\|)", line.removeprefix("$ ").split(" #")[0]):
            found = re.search(r"(?:^|\s|-m )meshwright ([a-z-].*)", part)
            if found and not part.lstrip().startswith("#"):
                yield shlex.split(found.group(1))


def command_problem(words: list[str]) -> str:
    """Returns what is unknown in a command; empty when there is nothing."""
    if words[0] == "--version":
        return ""
    command = COMMANDS.get(" ".join(words[:2])) or COMMANDS.get(words[0])
    if command is None:
        return f"there is no command '{words[0]}'"
    options = {flag for each in command.options for flag in each.flags} | {"--help"}
    for word in (word.split("=")[0] for word in words if word.startswith("--")):
        if word not in options and not _key_exists(word.removeprefix("--").split(".")):
            return f"'{command.name}' has no option '{word}'"
    return ""


def config_problems(config: dict[str, Any]) -> Iterator[str]:
    """Yields the keys of a config that do not exist."""
    for name, given in config.items():
        if name == "strategies":
            for one in given:
                yield from (f"strategy {one['name']}: {problem}" for problem in _strategy_problems(one))
        elif name in TABLES:
            yield from (f"{name}.{key}" for key in _unknown_keys(TABLES[name], given))
        elif name not in ("micro_batch", "cluster"):
            yield name


def _strategy_problems(table: dict[str, Any]) -> Iterator[str]:
    """Yields the keys of a strategy that do not exist, or what is wrong with one of a file in examples/."""
    if "source" in table:
        source = str(ROOT / "examples" / table["source"])
        found = list[Diagnostic]()
        collect_diagnostics(found, strategies_from_tables, [{**table, "source": source}], STRATEGIES)
        yield from map(str, found)
        return
    modes = STRATEGIES.get(table["name"], {})
    keys = {field.name for strategy in modes.values() for field in fields(strategy)} | {"name", "mode"}
    yield from (key for key in table if not modes or key not in keys)


def _key_exists(path: list[str]) -> bool:
    if path in (["micro_batch"], ["strategies"]):
        return True
    table = TABLES.get(path[0])
    return table is not None and _unknown_keys(table, _nested(path[1:])) == []


def _nested(path: list[str]) -> Any:
    return {path[0]: _nested(path[1:])} if path else None


def _unknown_keys(table: type, given: Any) -> list[str]:
    if not isinstance(given, dict):
        return []
    hints, found = get_type_hints(table), []
    for key, value in given.items():
        if key not in hints:
            found.append(key)
            continue
        kinds = (hints[key], *get_args(hints[key]))
        inner = next((each for each in kinds if isinstance(each, type) and is_dataclass(each)), None)
        for one in value if isinstance(value, list) else [value]:
            found += [f"{key}.{each}" for each in (_unknown_keys(inner, one) if inner else ())]
    return found
