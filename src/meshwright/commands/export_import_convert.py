"""`export`, `import` and `convert`: weights between checkpoints, folders of transformers, and pickles."""

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

from meshwright.model.hf.hub import is_hub_id, model_folders, pin_revision
from meshwright.model.hf.tokenizer_files import own_tokenizer
from meshwright.model.loading.loader import LoadedModel, load_model
from meshwright.model.loading.safetensors_reader import read_header
from meshwright.plan.job.errors import PlanError, suggest_name
from meshwright.plan.job.model_config import ModelConfig
from meshwright.run.checkpoint.directories import list_step_folders
from meshwright.run.checkpoint.distributed_checkpoint import newest_valid
from meshwright.run.checkpoint.manifest import MANIFEST_FILE, Manifest, read_manifest
from meshwright.run.checkpoint.shard_io import read_entry
from meshwright.run.checkpoint.sizes_and_checksums import check_checksums
from meshwright.run.data.tokenizer import make_tokenizer
from meshwright.run.export.hf_export import ExportableModel, ExportResult, export_model
from meshwright.run.export.roundtrip_check import RoundTripResult, check_import
from meshwright.run.training.train_loop import CHECKPOINTS_FOLDER

EXPORT_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
CONVERT_SCRIPT = Path(__file__).parents[1] / "run" / "export" / "convert_pickle.py"


def export_checkpoint(
    path: Path, out: Path, dtype: str, max_shard_size: str, *, merge: bool = False
) -> tuple[Path, ExportResult]:
    """Exports the checkpoint at `path` (of a run's folder: its newest valid one) to `out`; returns its path
    and the result.

    Of an adapted model it writes the adapter; with `merge`, the model with the adapter merged.
    """
    if dtype and dtype not in EXPORT_DTYPES:
        raise PlanError(
            f"there is no dtype '{dtype}' to export in",
            fix=suggest_name(dtype, EXPORT_DTYPES),
            location="--dtype",
        )
    checkpoint, manifest = _checkpoint(path)
    trained = _load_trained(checkpoint, manifest)
    return checkpoint, export_model(
        trained, out, EXPORT_DTYPES.get(dtype), _nbytes(max_shard_size), merge=merge
    )


def import_weights(source: str, revision: str) -> tuple[ModelConfig, RoundTripResult, int]:
    """Returns the folder or hub id `source` as the [model] table of a config, the comparison of logits, and
    the parameter count.
    """
    name = source if is_hub_id(source) else str(Path(source).absolute())
    model = pin_revision(ModelConfig(name, weights=name, revision=revision))
    return model, *check_import(model)


def convert(file: Path, out: Path, key: str, environment: Mapping[str, str]) -> int:
    """Writes the tensors of the pickle `file` to the safetensors file `out` in a child process; returns
    their number.

    The child has `environment` and nothing else. Raises PlanError for a file that is no pickle of tensors.
    """
    if not file.is_file():
        raise PlanError(
            f"there is no file {file}",
            fix="give a .bin, .pt or .pth file that torch.save wrote",
            location="convert",
        )
    if out.suffix != ".safetensors" or out.exists() or not out.parent.is_dir():
        why = (
            "exists"
            if out.exists()
            else "does not end in .safetensors"
            if out.parent.is_dir()
            else "is not in an existing folder"
        )
        raise PlanError(
            f"{out} {why}",
            fix="name a new file in a folder that exists: model.safetensors",
            location="convert",
        )
    with TemporaryDirectory(prefix=".meshwright-", dir=out.parent) as private:
        part, report = (
            Path(private).absolute() / "converted.safetensors",
            Path(private).absolute() / "report.json",
        )
        text = [
            sys.executable,
            "-I",
            str(CONVERT_SCRIPT),
            str(file.absolute()),
            str(part),
            str(report),
            *([key] if key else []),
        ]
        ended = subprocess.run(
            text, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        output = _child_report(report, ended)
        if "tensors" not in output or not part.is_file():
            raise _refusal(file, output, key)
        tensors = read_header(part)
        part.replace(out)
    return len(tensors)


def _checkpoint(path: Path) -> tuple[Path, Manifest]:
    if (path / MANIFEST_FILE).is_file():
        manifest = read_manifest(path)
        check_checksums(path, manifest.files)
        return path, manifest
    folder = path / CHECKPOINTS_FOLDER if (path / CHECKPOINTS_FOLDER).is_dir() else path
    if not list_step_folders(folder):
        exists = path.exists()
        text = f"{path} is not a checkpoint, nor contains one" if exists else f"there is no folder {path}"
        fix = "give a run's folder, or the folder of one step: runs/NAME/checkpoints/step-00000100"
        raise PlanError(text, fix=fix, location="export")
    found, manifest, rejected = newest_valid(folder)
    if found is None or manifest is None:
        reasons = "; ".join(f"{bad.name}: {why}" for bad, why in rejected)
        raise PlanError(
            f"no checkpoint in {folder} is complete: {reasons}",
            fix="restore one from a copy",
            location="export",
        )
    return found, manifest


def _load_trained(checkpoint: Path, manifest: Manifest) -> ExportableModel:
    asked, seed, tokenizer = _source(checkpoint, manifest)
    loaded = load_model(replace(asked, weights="", skip=()), seed)  # the values are in the checkpoint
    _check_model(loaded, checkpoint, manifest)

    def value(name: str) -> torch.Tensor:
        key = f"model/{name}" if name in loaded.deferred_init.logical_params else f"buffer/{name}"
        return read_entry(checkpoint, manifest.entries[key])

    base = (
        asked.weights
        if not asked.weights or is_hub_id(asked.weights)
        else str(Path(asked.weights).absolute())
    )
    other = tokenizer if tokenizer not in ("", own_tokenizer(asked)) else ""
    return ExportableModel(
        loaded.deferred_init,
        value,
        source_folder=next((folder for _, folder in model_folders(asked)), None),
        tokenizer=make_tokenizer(other) if other else None,
        adapter_base=base,
    )


def _source(checkpoint: Path, manifest: Manifest) -> tuple[ModelConfig, int, str]:
    """Returns the model of the checkpoint's job, its seed, and the name of its tokenizer ("": none)."""
    plan: Any = manifest.meta.get("plan")
    job = plan.get("job", {}) if isinstance(plan, Mapping) else {}
    try:
        model = TypeAdapter(ModelConfig).validate_python(job["model"])
        return model, int(job["train"]["seed"]), str(job["data"]["tokenizer"])
    except (KeyError, AttributeError, TypeError, ValueError, ValidationError) as error:
        text = (
            "the checkpoint does not say where its model came from: it was saved from Python, or by "
            "another version"
        )
        fix = "export from where the model is: trainer.load(checkpoint), then trainer.export(folder)"
        raise PlanError(text, fix=fix, location=str(checkpoint)) from error


def _check_model(loaded: LoadedModel, checkpoint: Path, manifest: Manifest) -> None:
    logical = {f"model/{name}": entry.shape for name, entry in loaded.deferred_init.logical_params.items()}
    saved = {name: entry.shape for name, entry in manifest.entries.items() if name.startswith("model/")}
    wrong = sorted(name for name in {**logical, **saved} if logical.get(name) != saved.get(name))
    if wrong:
        text = (
            f"{len(wrong)} parameters of '{loaded.name}' as it is built now are not those of "
            f"the checkpoint: {wrong[0]}..."
        )
        raise PlanError(
            text, fix="restore the config or the file that the model was built from", location=str(checkpoint)
        )


def _nbytes(text: str) -> int:
    number = text.strip().upper().rstrip("KMGIB ")
    unit = text.strip().upper().removeprefix(number).strip()
    if not number.isdecimal() or int(number) == 0 or unit not in SIZE_UNITS:
        raise PlanError(
            f"the size '{text}'", fix="write a number and a unit: 5GB, 300MB", location="--max-shard-size"
        )
    return int(number) * SIZE_UNITS[unit]


def _child_report(report: Path, ended: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    try:
        output = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        output = None
    last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
    return (
        output
        if isinstance(output, dict)
        else {"refused": f"the child process ended with code {ended.returncode}: {last[0]}"}
    )


def _refusal(file: Path, output: Mapping[str, Any], key: str) -> PlanError:
    entries = list(_words(output.get("entries")))
    fix = "save a dict of tensors only: torch.save(model.state_dict(), ...)"
    if entries and not key:
        fix = f"name the entry that holds the tensors: --key NAME; or {fix}"
    kept = f"; it holds {', '.join(entries)}" if entries else ""
    return PlanError(
        f"{file} was not converted: {output.get('refused', 'no reason')}{kept}", fix=fix, location="convert"
    )


def _words(entries: object) -> Iterator[str]:
    yield from (str(entry) for entry in entries) if isinstance(entries, list) else ()
