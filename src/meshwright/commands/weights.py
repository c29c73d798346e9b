"""`export`, `import` and `convert`: weights between checkpoints, folders of transformers, and files of others."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from meshwright.model.hf.hub import is_hub_id, located, pinned
from meshwright.model.loading.loader import Loaded, load_model
from meshwright.model.loading.safetensors_io import read_header
from meshwright.plan.job.data_source import ModelSource
from meshwright.plan.job.errors import PlanError, nearest
from meshwright.run.checkpoint.directories import listed
from meshwright.run.checkpoint.manifest import FILE_NAME, Manifest
from meshwright.run.checkpoint.save_load import newest_good
from meshwright.run.checkpoint.shard_io import check_sums, read_entry, read_manifest
from meshwright.run.export.hf_export import Exported, Trained, export
from meshwright.run.export.roundtrip_check import RoundTrip, check_import
from meshwright.run.training.train_loop import CHECKPOINTS

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
SCRIPT = Path(__file__).parents[1] / "run" / "export" / "convert_pickle.py"


def export_checkpoint(path: Path, out: Path, dtype: str, max_shard_size: str, *, merge: bool = False) -> tuple[Path, Exported]:
    """The checkpoint at `path` (a run's folder: its newest good one) written to `out`, and what was written.

    Of an adapted model, its adapter; with `merge`, the model that it makes of its base.

    Raises PlanError for a path without a checkpoint, one of a model that cannot be built here, and wrong words.
    """
    if dtype and dtype not in FLOATS:
        raise PlanError(f"there is no dtype '{dtype}' to export in", fix=nearest(dtype, FLOATS), where="--dtype")
    checkpoint, manifest = _checkpoint(path)
    trained = _trained(checkpoint, manifest)
    return checkpoint, export(trained, out, FLOATS.get(dtype), _nbytes(max_shard_size), merge=merge)


def import_weights(source: str, revision: str) -> tuple[ModelSource, RoundTrip, int]:
    """The folder or hub id `source` as the [model] table of a config, how its logits compare, and its parameters."""
    name = source if is_hub_id(source) else str(Path(source).absolute())
    model = pinned(ModelSource(name, weights=name, revision=revision))
    return model, *check_import(model)


def convert(file: Path, out: Path, key: str, environment: Mapping[str, str]) -> int:
    """Write the tensors of the pickle `file` to the safetensors file `out`, in a child process; returns their number.

    The child has `environment` and no more. Raises PlanError when `file` holds anything but tensors by name.
    """
    if not file.is_file():
        raise PlanError(f"there is no file {file}", fix="give a .bin, .pt or .pth file that torch.save wrote", where="convert")
    if out.suffix != ".safetensors" or out.exists() or not out.parent.is_dir():
        why = "exists" if out.exists() else "does not end in .safetensors" if out.parent.is_dir() else "lies in no folder"
        raise PlanError(f"{out} {why}", fix="name a new file in a folder that exists: model.safetensors", where="convert")
    with TemporaryDirectory(prefix=".meshwright-", dir=out.parent) as private:
        part, report = Path(private).absolute() / "converted.safetensors", Path(private).absolute() / "report.json"
        words = [sys.executable, "-I", str(SCRIPT), str(file.absolute()), str(part), str(report), *([key] if key else [])]
        ended = subprocess.run(words, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, check=False)
        said = _said(report, ended)
        if "tensors" not in said or not part.is_file():
            raise _refused(file, said, key)
        tensors = read_header(part)
        part.replace(out)
    return len(tensors)


def _checkpoint(path: Path) -> tuple[Path, Manifest]:
    if (path / FILE_NAME).is_file():
        manifest = read_manifest(path)
        check_sums(path, manifest.files)
        return path, manifest
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    if not listed(folder):
        text = f"{path} is no checkpoint, and holds none" if path.exists() else f"there is no folder {path}"
        fix = "give a run's folder, or the folder of one step: runs/NAME/checkpoints/step-00000100"
        raise PlanError(text, fix=fix, where="export")
    found, manifest, rejected = newest_good(folder)
    if found is None or manifest is None:
        reasons = "; ".join(f"{bad.name}: {why}" for bad, why in rejected)
        raise PlanError(f"no checkpoint in {folder} is whole: {reasons}", fix="restore one from a copy", where="export")
    return found, manifest


def _trained(checkpoint: Path, manifest: Manifest) -> Trained:
    asked, seed = _source(checkpoint, manifest)
    loaded = load_model(replace(asked, weights="", skip=()), seed)  # the values are in the checkpoint
    _check_model(loaded, checkpoint, manifest)

    def value(name: str) -> torch.Tensor:
        key = f"model/{name}" if name in loaded.blueprint.logical else f"buffer/{name}"
        return read_entry(checkpoint, key, manifest.entries[key])

    base = asked.weights if not asked.weights or is_hub_id(asked.weights) else str(Path(asked.weights).absolute())
    return Trained(loaded.blueprint, value, _beside(asked), base)


def _source(checkpoint: Path, manifest: Manifest) -> tuple[ModelSource, int]:
    """Where the model of a checkpoint came from, and its seed."""
    plan: Any = manifest.meta.get("plan")
    job = plan.get("job", {}) if isinstance(plan, Mapping) else {}
    try:
        return TypeAdapter(ModelSource).validate_python(job["model"]), int(job["train"]["seed"])
    except (KeyError, AttributeError, TypeError, ValueError, ValidationError) as error:
        text = "the checkpoint does not say where its model came from: it was saved from Python, or by another version"
        fix = "export from where the model is: engine.load(checkpoint), then engine.export(folder)"
        raise PlanError(text, fix=fix, where=str(checkpoint)) from error


def _check_model(loaded: Loaded, checkpoint: Path, manifest: Manifest) -> None:
    logical = {f"model/{name}": entry.shape for name, entry in loaded.blueprint.logical.items()}
    saved = {name: entry.shape for name, entry in manifest.entries.items() if name.startswith("model/")}
    wrong = sorted(name for name in {**logical, **saved} if logical.get(name) != saved.get(name))
    if wrong:
        text = f"{len(wrong)} parameters of '{loaded.name}' as it is built now are not those of the checkpoint: {wrong[0]}..."
        raise PlanError(text, fix="restore the config or the file that the model was built from", where=str(checkpoint))


def _beside(source: ModelSource) -> Path | None:
    """The folder with the tokenizer: that of the weights, or else that of the config."""
    small = replace(source, weights="", skip=())
    for name in (source.weights, source.source):
        if name and ".py" not in name:
            path = located(name, small, "model.source")
            path = path.parent if path.name == "config.json" else path
            if path.is_dir():
                return path
    return None


def _nbytes(words: str) -> int:
    """The bytes that "5GB" or "300 MiB" are."""
    number = words.strip().upper().rstrip("KMGIB ")
    unit = words.strip().upper().removeprefix(number).strip()
    if not number.isdecimal() or int(number) == 0 or unit not in UNITS:
        raise PlanError(f"the size '{words}'", fix="write a number and a unit: 5GB, 300MB", where="--max-shard-size")
    return int(number) * UNITS[unit]


def _said(report: Path, ended: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    try:
        said = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        said = None
    last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
    return said if isinstance(said, dict) else {"refused": f"the child process ended with code {ended.returncode}: {last[0]}"}


def _refused(file: Path, said: Mapping[str, Any], key: str) -> PlanError:
    entries = list(_words(said.get("entries")))
    fix = "save a dict of tensors only: torch.save(model.state_dict(), ...)"
    if entries and not key:
        fix = f"name the entry that holds the tensors: --key NAME; or {fix}"
    held = f"; it holds {', '.join(entries)}" if entries else ""
    return PlanError(f"{file} was not converted: {said.get('refused', 'no reason')}{held}", fix=fix, where="convert")


def _words(entries: object) -> Iterator[str]:
    yield from (str(entry) for entry in entries) if isinstance(entries, list) else ()
