"""Writes a commented config for a model and data: the command `init`.

A comment is the meaning of its key in the config reference. What `init` decides: the tokenizer is that of the
model, where it has one; a sample is as long as the model allows, up to 512 tokens; where a GPU has bfloat16,
matrix products are in it. The rest are defaults.
"""

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.commands.config_help.key_reference import TOP_LEVEL, config_tables, toml_text
from meshwright.commands.plan import ResolvedRequest, resolve_config
from meshwright.device.local_device import has_bfloat16_products
from meshwright.model.hf.model_from_config import text_limits
from meshwright.model.hf.tokenizer_files import own_tokenizer
from meshwright.model.loading.loader import load_model
from meshwright.plan.job.errors import PlanError, refuse_write_errors
from meshwright.plan.job.model_config import ModelConfig
from meshwright.run.config.source_paths import absolute_source

MAX_SEQUENCE = 512
WIDTH = 88
# Keys of the file in their order. Those without a value given to `config_text` show their default.
TABLES: Mapping[str, tuple[str, ...]] = {
    "model": ("source", "weights"),
    "data": ("source", "tokenizer", "sequence"),
    "train": ("steps", "batch", "clip", "seed"),
    "optimizer": ("name", "lr", "weight_decay", "betas"),
    "lr_schedule": ("name", "warmup", "floor"),
    "precision": ("parameters", "compute", "master"),
    "evaluate": ("hold_out", "every"),
    "mesh": ("dp_replicate", "dp_shard", "tp", "pp", "cp"),
    "run": ("folder", "save_every", "keep"),
}
HEAD = """\
Made by `meshwright init`. Every key can be set on the command line too: --train.steps 100. All keys: \
`meshwright config`.

    meshwright plan   {name}     what a step does, sends and keeps in memory
    meshwright verify {name}     compares the plan with one device
    meshwright train  {name}

A line that begins with # shows the default of its key."""
STRATEGIES = """\
Techniques follow from the mesh: dp_replicate means DDP, dp_shard ZeRO-3 (FSDP), tp tensor parallelism, pp a \
pipeline, cp ring attention. To choose by hand, list them all, for example:"""
STRATEGY_EXAMPLE = (
    '[[strategies]]\nname = "batch_split"\naxis = "dp_shard"\n\n[[strategies]]\nname = "zero"\nstage = 1'
)


def write_starter_config(model: str, data: str, out: Path, devices: int) -> ResolvedRequest:
    """Writes a config for `model` (model.source) and `data` (data.source) to `out`; returns its plan.

    The samples are split over `devices` ranks. Raises PlanError if `out` exists, if the model cannot be
    built, and for everything that `plan` refuses; then the file stays, to be repaired.
    """
    if out.exists():
        raise PlanError(f"{out} exists", fix="name another file: --out, or remove it", location="--out")
    values = starter_values(model, data, devices)
    with refuse_write_errors("the config", out, "name a file in a folder that can be written to: --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(config_text(values, out.name), encoding="utf-8")
    return resolve_config(out, [], None)


def starter_values(model: str, data: str, devices: int) -> dict[str, Any]:
    """Returns the keys that the config of `model` and `data` sets (dotted), with their values."""
    source = absolute_source(model)
    loaded = load_model(ModelConfig(source), seed=0)
    positions = text_limits(loaded.deferred_init.instantiate()).max_positions
    values: dict[str, Any] = {"model.source": source, "data.source": absolute_source(data)}
    values["data.sequence"] = min(MAX_SEQUENCE, positions or MAX_SEQUENCE)
    if tokenizer := own_tokenizer(ModelConfig(source)):
        values["data.tokenizer"] = tokenizer
    if has_bfloat16_products():
        values["precision.compute"] = "bfloat16"
    if devices > 1:
        values |= {"mesh.dp_replicate": devices, "train.batch": 8 * devices, "micro_batch": 8}
    return values


def config_text(values: Mapping[str, Any], name: str) -> str:
    """Returns the file `name`: the keys in `values` (dotted) are set, the others of TABLES are comments."""
    lines, said = [*_comment(HEAD.format(name=name)), ""], ""
    keys = {key.name: key for table in (TOP_LEVEL, *config_tables()) for key in table.keys}
    for path, names in {"": ("micro_batch",), **TABLES}.items():
        lines += [f"[{path}]"] if path else []
        for each in names:
            dotted = f"{path}.{each}" if path else each
            lines += _comment(keys[dotted].meaning) if keys[dotted].meaning != said else []
            said = keys[dotted].meaning
            default = f"# {each} = {keys[dotted].default}"
            lines.append(f"{each} = {toml_text(values[dotted])}" if dotted in values else default)
        lines.append("")
    lines += [*_comment(STRATEGIES), "#", *(f"# {line}".rstrip() for line in STRATEGY_EXAMPLE.splitlines())]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> Iterator[str]:
    """Lines of a comment; those that are indented stay as they are."""
    for line in text.replace("`", "").splitlines():
        wrapped = [line] if line.startswith(" ") else textwrap.wrap(line, WIDTH) or [""]
        yield from (f"# {each}".rstrip() for each in wrapped)
