"""Makes the config reference from the schema: every table of a config file with keys, types and defaults."""

import re
from collections.abc import Iterator

from docs.generator.essay import NOTE, cell, markdown
from meshwright.commands.config_help.key_reference import TOP_LEVEL, ConfigKey, ConfigTable, config_tables

PAGE = "docs/reference/config.md"
INTRODUCTION = """A config is a TOML file. Each section below is one table of it. Every key has a default,
except where the table says *required*. Any key can also be set on the command line: `--optimizer.lr 1e-3`. An
unknown key is an error that names the nearest known one. `meshwright plan CONFIG --out plan.toml` writes the
same file with nothing left open."""
STRATEGY_INTRODUCTION = """## strategies

`[[strategies]]` is a list of tables; each names one technique and sets its options. Without any, the mesh
decides: `dp_replicate` means `ddp`, `dp_shard` means `zero` with stage 3, `tp` means `tensor_parallel` (and
`vocab_parallel` where the model allows it), `pp` means `pipeline`, and `cp` means `ring`. What each technique
does is described on [its page](../techniques/index.md)."""


def config_page() -> dict[str, str]:
    """Returns the page by its path."""
    note = NOTE.format(origin="the schema (meshwright.plan.job, meshwright.parallel)")
    lines = ["# Config reference", "", note, "", INTRODUCTION, ""]
    lines += ["## Top level", "", markdown(TOP_LEVEL.text), "", *_keys(TOP_LEVEL), ""]
    tables = list(config_tables())
    for table in tables:
        if not _is_strategy(table):
            level = "##" if "." not in table.path else "###"
            lines += [f"{level} {table.path}", "", markdown(table.text), "", *_keys(table), ""]
    lines += [STRATEGY_INTRODUCTION, ""]
    for table in filter(_is_strategy, tables):
        lines += [_strategy_head(table), "", markdown(table.text), "", *_keys(table), ""]
    return {PAGE: "\n".join(lines).rstrip("\n") + "\n"}


def _is_strategy(table: ConfigTable) -> bool:
    return table.path.startswith("strategies.")


def _strategy_head(table: ConfigTable) -> str:
    name, _, mode = table.path.removeprefix("strategies.").partition(" (mode ")
    return f'### name = "{name}"' + (f', mode = "{mode.removesuffix(")")}"' if mode else "")


def _keys(table: ConfigTable) -> Iterator[str]:
    if not table.keys:
        yield "No options."
        return
    yield from ("| key | type | default |", "| --- | --- | --- |")
    for key in table.keys:
        yield f"| `{key.name.rpartition('.')[2]}` | {_type(key)} | {_default(key)} |"


def _type(key: ConfigKey) -> str:
    return cell(re.sub(r'"[^"]*"', r"`\g<0>`", key.type))


def _default(key: ConfigKey) -> str:
    words = {"required": "*required*", "not set": "not set", "see below": "see below"}
    return words.get(key.default, f"`{key.default}`")
