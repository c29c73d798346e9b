"""A config of another tool imported in a test, and the plan of the written file on a tiny Llama."""

import json
from pathlib import Path
from typing import Any

from meshwright.commands.import_config.import_config import (
    ImportedConfig,
    import_config,
    write_imported_config,
)
from meshwright.commands.plan import resolve_config
from meshwright.plan.plan import Plan
from tests.command_line import LLAMA, TEXT


def imported(tmp_path: Path, name: str, text: str | dict[str, Any], *, devices: int = 0) -> ImportedConfig:
    """Returns what becomes of the file `name` with `text`, without a model and data of its own."""
    path = tmp_path / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return import_config(path, "", "", "", devices)


def verdicts(result: ImportedConfig) -> dict[str, str]:
    """Returns the verdict of each option."""
    return {each.option: each.verdict for each in result.options}


def row(result: ImportedConfig, option: str) -> str:
    """Returns what became of one option, with the repair."""
    (found,) = [each for each in result.options if each.option == option]
    return f"{found.verdict}: {found.text}" + (f" -> {found.fix}" if found.fix else "")


def planned(
    tmp_path: Path, name: str, text: str | dict[str, Any], *, devices: int = 0, layers: int = 2
) -> Plan:
    """Returns the plan of the config that is written for a tiny Llama and a text."""
    path = tmp_path / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    model = tmp_path / "tiny.json"
    model.write_text(json.dumps({**LLAMA, "num_hidden_layers": layers, "num_key_value_heads": 2}))
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(TEXT)
    out = tmp_path / "written.toml"
    write_imported_config(import_config(path, "", str(model), str(corpus), devices), out)
    return resolve_config(out, ["--data.sequence", "16"], devices or None)[1].plan


def strategies(result: ImportedConfig) -> list[str]:
    """Returns the names of the strategies of the written config."""
    return [each["name"] for each in result.document["strategies"]]
