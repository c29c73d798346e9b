"""Reads a config of another tool, finds its format, and writes the config, the model, and the table of what
became of each option.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import yaml
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from meshwright.commands.import_config import accelerate, deepspeed, megatron, torchtitan
from meshwright.commands.import_config.megatron_model import ARCHITECTURE, transformers_config
from meshwright.commands.import_config.megatron_script import read_arguments
from meshwright.commands.import_config.option_rules import (
    TODO_VERDICTS,
    ImportedOption,
    Rules,
    Translation,
    Verdict,
    flatten,
)
from meshwright.plan.job.errors import PlanError, refuse_write_errors, suggest_name
from meshwright.run.config.source_paths import absolute_source

FORMATS: Mapping[str, Rules] = {
    "deepspeed": deepspeed.RULES,
    "accelerate": accelerate.RULES,
    "megatron": megatron.RULES,
    "torchtitan": torchtitan.RULES,
}
TITLES: dict[Verdict, str] = {
    "mapped": "mapped",
    "dropped": "dropped: changes no result, or nothing here needs it",
    "refused": "refused: not the same here until you act",
    "unknown": "unknown to this importer",
}


@dataclass(frozen=True)
class ImportedConfig:
    """A config made from another tool's: its tables, the transformers config of its model if one was made,
    what became of each option, and the keys that the file says nothing about.
    """

    source: Path
    format: str
    document: dict[str, Any]
    model: dict[str, Any] | None
    options: tuple[ImportedOption, ...]
    missing: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether no option is refused or unknown."""
        return not any(each.verdict in TODO_VERDICTS for each in self.options)


def import_config(path: Path, format_name: str, model: str, data: str, devices: int) -> ImportedConfig:
    """Returns the config of another tool in the file `path` as one of this.

    Args:
        path: a JSON, YAML, TOML or shell file, or a list of arguments.
        format_name: one of FORMATS; "" finds it by the file.
        model, data: what model.source and data.source are to be; "" leaves them to the file.
        devices: the number of ranks; 0: as the file says.

    Raises PlanError for a file that cannot be read, or whose format is not known.
    """
    text = _read(path)
    kind = format_name or _format(path, text)
    if kind not in FORMATS:
        raise PlanError(f"there is no format '{kind}'", fix=suggest_name(kind, FORMATS), location="--format")
    values = _parse(path, text, kind)
    config = Translation(FORMATS[kind], dict(flatten(values, FORMATS[kind])))
    _set_sources(config, model, data)
    rows = _translate(config, kind, path, devices)
    made = _make_model(config, kind, model)
    missing = tuple(key for key in dict.fromkeys(config.missing) if not _is_set(config.document, key))
    return ImportedConfig(path, kind, config.document, made, (*rows, *config.outcome()), missing)


def _translate(config: Translation, kind: str, path: Path, devices: int) -> list[ImportedOption]:
    """Fills `config`; returns what became of options of a second file, which an Accelerate YAML may name."""
    if kind == "deepspeed":
        deepspeed.translate(config, devices)
    elif kind == "torchtitan":
        torchtitan.translate(config, devices)
    elif kind == "megatron":
        megatron.translate(config, devices)
    else:
        named = config.get("deepspeed_config.deepspeed_config_file")
        if named is None:
            accelerate.translate(config, devices)
            return []
        file = path.parent / named if not Path(named).is_file() else Path(named)
        values = _parse(file, _read(file), "deepspeed")
        second = Translation(deepspeed.RULES, dict(flatten(values, deepspeed.RULES)), config.document)
        deepspeed.translate(second, devices or max(0, config.get("num_processes", 0)))
        config.missing += second.missing
        return second.outcome()
    return []


def _set_sources(config: Translation, model: str, data: str) -> None:
    for key, source in (("model.source", model), ("data.source", data)):
        if source:
            config.set(key, absolute_source(source))


def _make_model(config: Translation, kind: str, model: str) -> dict[str, Any] | None:
    if kind != "megatron":
        return None
    if model:
        for option in ARCHITECTURE:
            config.drop(option, "the model is that of --model")
        return None
    made = transformers_config(config, config.get("tensor-model-parallel-size", 1))
    if made is None:
        config.missing.append("model.source")
    config.made_model = made or {}
    return made


def _is_set(document: Mapping[str, Any], key: str) -> bool:
    table, _, name = key.rpartition(".")
    return name in (document.get(table, {}) if table else document)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not valid UTF-8"
        raise PlanError(
            f"the file cannot be read: {reason}", fix="name an existing text file", location=str(path)
        ) from error


def _format(path: Path, text: str) -> str:
    """The format by the file's ending, or else by its text."""
    by_ending = {".yaml": "accelerate", ".yml": "accelerate", ".toml": "torchtitan", ".sh": "megatron"}
    if path.suffix in by_ending:
        return by_ending[path.suffix]
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        return "accelerate" if '"distributed_type"' in text else "deepspeed"
    if "--" in text:
        return "megatron"
    fix = f"say it: --format {', '.join(FORMATS)}"
    raise PlanError("the format of this file is not known", fix=fix, location=str(path))


def _parse(path: Path, text: str, kind: str) -> dict[str, Any]:
    try:
        if kind == "megatron":
            return megatron.typed_options(read_arguments(text, str(path)))
        parse = {"deepspeed": json.loads, "torchtitan": tomllib.loads, "accelerate": yaml.safe_load}[kind]
        values = parse(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        language = {"deepspeed": "JSON", "accelerate": "YAML", "torchtitan": "TOML"}[kind]
        text = f"not {language}: {' '.join(str(error).split())}"
        raise PlanError(
            text, fix="repair the file, or say its format: --format", location=str(path)
        ) from error
    if not isinstance(values, dict):
        raise PlanError("the file holds no table of options", fix="name a config file", location=str(path))
    return deepspeed.alias_options(values) if kind == "deepspeed" else values


def write_imported_config(imported: ImportedConfig, out: Path) -> tuple[Path, ...]:
    """Writes the config to `out`, and the model that it names beside it; returns the files written.

    Raises PlanError if `out` exists, or cannot be written.
    """
    if out.exists():
        raise PlanError(f"{out} exists", fix="name another file: --out, or remove it", location="--out")
    document, files = dict(imported.document), [out]
    if imported.model is not None:
        files.append(out.with_name(f"{out.stem}.model.json"))
        document = {"model": {"source": files[1].name}, **document}
    with refuse_write_errors("the config", out, "name a file in a folder that can be written to: --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(config_text(imported, document), encoding="utf-8")
        if imported.model is not None:
            files[1].write_text(json.dumps(imported.model, indent=2) + "\n", encoding="utf-8")
    return tuple(files)


def config_text(imported: ImportedConfig, document: dict[str, Any]) -> str:
    """Returns the config as TOML, with what is refused, unknown and missing as comments at its top."""
    lines = [f"# Made from {imported.source.name} ({imported.format}) by `meshwright import-config`."]
    for each in imported.options:
        if each.verdict in TODO_VERDICTS:
            lines.append(f"# {each.verdict}: {each.option} = {each.value}: {each.text}. Repair: {each.fix}")
    if imported.missing:
        lines.append(f"# Not in that file, so the defaults hold: {', '.join(imported.missing)}")
    return "\n".join(lines) + "\n\n" + tomli_w.dumps(_ordered(document))


def _ordered(document: dict[str, Any]) -> dict[str, Any]:
    """The keys of the top level first, which TOML needs, and the tables in the order of the reference."""
    tables = (
        "model",
        "data",
        "train",
        "optimizer",
        "lr_schedule",
        "precision",
        "evaluate",
        "mesh",
        "run",
        "strategies",
    )
    keys = [key for key in document if key not in tables]
    return {key: document[key] for key in (*keys, *tables) if key in document}


def imported_view(imported: ImportedConfig) -> RenderableType:
    """Returns what became of every option, by verdict; what needs work stands last."""
    return Group(*_views(imported))


def _views(imported: ImportedConfig) -> Iterator[RenderableType]:
    for verdict in ("mapped", "dropped", "unknown", "refused"):
        found = [each for each in imported.options if each.verdict == verdict]
        if found:
            yield Text(f"\n{TITLES[verdict]} ({len(found)})", style="bold")
            yield from (line for each in found for line in _lines(each))
    if imported.missing:
        yield Text(f"\nnot in the file, so the defaults hold: {', '.join(imported.missing)}")


def _lines(option: ImportedOption) -> Iterator[RenderableType]:
    """The option with its value, and below it, indented, what became of it and the repair."""
    yield Text(f"{option.option} = {option.value}")
    yield Padding(Text(option.text), (0, 0, 0, 4))
    if option.fix and option.verdict in TODO_VERDICTS:
        yield Padding(Text(f"repair: {option.fix}", style="green"), (0, 0, 0, 4))
