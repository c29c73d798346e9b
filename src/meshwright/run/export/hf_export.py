"""Writes a trained model as a folder that `from_pretrained` loads: config, tokenizer, and safetensors with
published names.

    names, shapes          from transformers, on tensors without values: the position of each is known at once
    config                 as transformers writes it; files next to the model's source are copied
    tokenizer              the one that the model was trained with (`tokenizer_export`)
    tensors                one group at a time: read, cast, converted to published tensors, written at their
                           offsets
    round trip             transformers loads the folder, which must give the logits of the model here
    rename                 only now the folder gets its name

Memory: the tensors of one conversion, twice (a fused tensor of experts and its parts; otherwise one
parameter), and then, for the round trip, one model, because ours is freed before theirs is loaded. A module
that is not of transformers becomes a model.safetensors with logical names, which is read back and compared.
"""

import copy
import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.model.hf.declared_tp_plan import is_transformers_model
from meshwright.model.hf.peft_name_map import is_adapted
from meshwright.model.loading.deferred_init import DeferredInit
from meshwright.model.loading.loader import load_model
from meshwright.model.loading.safetensors_reader import DTYPES, INDEX_FILE, SINGLE_FILE
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.model_config import ModelConfig
from meshwright.run.checkpoint.shard_io import CHUNK_NBYTES, write_all_bytes
from meshwright.run.data.tokenizer import Tokenizer
from meshwright.run.export.adapter_export import merge_adapter, write_adapter
from meshwright.run.export.roundtrip_check import RoundTripResult, check_import, compare_files, compare_logits
from meshwright.run.export.stored_tensors import StoredTensors
from meshwright.run.export.tokenizer_export import (
    companion_files,
    copy_files,
    use_special_tokens,
    write_tokenizer,
)

SAFETENSORS_TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
MAX_SHARD_NBYTES = 5_000_000_000


@dataclass(frozen=True)
class ExportableModel:
    """A model and its values: `read_value(name)` returns a full logical parameter (by its first name) or a
    persistent buffer.

    `source_folder` contains the config whose companions are copied; None without one. `tokenizer` is the one
    that the model was trained with; None if it is that of `source_folder`. `adapter_base` locates the base of
    an adapter if the model does not know it.
    """

    deferred_init: DeferredInit
    read_value: Callable[[str], torch.Tensor]
    source_folder: Path | None = None
    tokenizer: Tokenizer | None = None
    adapter_base: str = ""

    @classmethod
    def from_checkpoint(
        cls, deferred_init: DeferredInit, tensors: Mapping[str, torch.Tensor]
    ) -> "ExportableModel":
        """Returns the model whose values are `tensors`, by the names of a checkpoint: "model/...",
        "buffer/...".
        """
        return cls(
            deferred_init,
            lambda name: tensors[
                f"model/{name}" if name in deferred_init.logical_params else f"buffer/{name}"
            ],
        )


@dataclass(frozen=True)
class ExportResult:
    """The result of an export: the files in `folder`, the bytes of the tensors, and the comparison."""

    folder: Path
    files: tuple[str, ...]
    nbytes: int
    round_trip: RoundTripResult


@dataclass(frozen=True)
class _Slot:
    file: str
    start: int  # bytes from the end of the header
    tensor: torch.Tensor  # without values


def export_model(
    trained: ExportableModel,
    folder: Path,
    dtype: torch.dtype | None = None,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    *,
    merge: bool = False,
) -> ExportResult:
    """Writes the model into `folder`, new or empty, its floating-point tensors in `dtype` (None: as they
    are), and compares.

    Of an adapted model it writes the adapter, unless `merge` merges it into its base first. No file is
    larger than `max_shard_nbytes`, unless one tensor is; an adapter is one file. If the comparison fails,
    nothing stays (see `round_trip.passed`). Raises PlanError for a folder that is not empty or cannot be
    written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PlanError(
            f"{folder} exists and is not an empty folder", fix="name another folder", location="export"
        )
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    if merge:
        deferred_init, value = merge_adapter(trained.deferred_init, _first_named(trained))
        trained = replace(trained, deferred_init=deferred_init, read_value=value)
    try:
        partial.mkdir(parents=True)
        return _export_files(trained, folder, partial, dtype, max_shard_nbytes)
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror or error}"
        raise PlanError(
            text, fix="name a folder on a disk with enough space that can be written to", location="export"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def initial_model(deferred_init: DeferredInit) -> ExportableModel:
    """Returns the model of `deferred_init` with its initial values."""
    module = deferred_init.instantiate()
    return ExportableModel(
        deferred_init,
        lambda name: (
            deferred_init.initial_value(name)
            if name in deferred_init.logical_params
            else module.get_buffer(name)
        ),
    )


def check_round_trip(source: ModelConfig, seed: int, folder: Path) -> tuple[RoundTripResult, RoundTripResult]:
    """Exports the model of `source` with the initial values of `seed` to `folder` and loads that folder
    again.

    Returns the comparison of both with what transformers loads.
    """
    deferred_init = load_model(source, seed).deferred_init
    there = export_model(initial_model(deferred_init), folder).round_trip
    if not there.passed:
        return there, there
    return there, check_import(ModelConfig(str(folder), weights=str(folder)))[0]


def _export_files(
    trained: ExportableModel, folder: Path, partial: Path, dtype: torch.dtype | None, max_shard_nbytes: int
) -> ExportResult:
    module = trained.deferred_init.instantiate()
    value = _first_named(trained)
    if is_adapted(module):
        origin = trained.deferred_init.pretrained_source
        base = trained.adapter_base or ("" if origin is None else origin.source)
        return _finish_export(
            folder, partial, *write_adapter(trained.deferred_init, value, partial, dtype, base)
        )
    stored = StoredTensors.of_model(trained.deferred_init, lambda name: value(name).dtype, dtype)
    slots = _slots(stored.without_values(), max_shard_nbytes)
    begins = _write_headers(partial, slots)
    _write_tensors(partial, slots, begins, stored, value)
    if len(begins) > 1:
        _write_index(partial, slots)
    if is_transformers_model(module):
        written = next(
            (tensor.dtype for tensor in stored.sources.values() if tensor.is_floating_point()), torch.float32
        )
        _write_config(module, partial, written, trained)
        verdict = compare_logits(trained.deferred_init, value, partial, dtype)
    else:
        dtypes = {name: tensor.dtype for name, tensor in stored.sources.items()}
        verdict = compare_files(partial, dtypes, value)
    if trained.tokenizer is not None:
        write_tokenizer(trained.tokenizer, partial)
    return _finish_export(folder, partial, sum(slot.tensor.nbytes for slot in slots.values()), verdict)


def _finish_export(folder: Path, partial: Path, nbytes: int, verdict: RoundTripResult) -> ExportResult:
    files = tuple(sorted(path.name for path in partial.iterdir()))
    if verdict.passed:
        _publish(partial, folder)
    return ExportResult(folder, files, nbytes, verdict)


def _first_named(trained: ExportableModel) -> Callable[[str], torch.Tensor]:
    first = {
        alias: name for name, entry in trained.deferred_init.logical_params.items() for alias in entry.aliases
    }
    return lambda name: trained.read_value(first.get(name, name)).detach()


def _slots(tensors: Mapping[str, torch.Tensor], max_nbytes: int) -> dict[str, _Slot]:
    """The file and offset of each tensor: in order, wide dtypes first within a file, so that each starts at a
    multiple of its width.
    """
    shards: list[list[tuple[str, torch.Tensor]]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > max_nbytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, tensor))
        filled += tensor.nbytes
    total = len(shards)
    slots = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE_FILE if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
        start = 0
        for name, tensor in sorted(shard, key=lambda pair: -pair[1].element_size()):
            slots[name] = _Slot(file, start, tensor)
            start += tensor.nbytes
    return slots


def _write_headers(folder: Path, slots: Mapping[str, _Slot]) -> dict[str, int]:
    """Writes each file's header; returns the byte at which the tensors of each file begin."""
    headers: dict[str, dict[str, Any]] = {}
    for name, slot in slots.items():
        header = headers.setdefault(slot.file, {"__metadata__": {"format": "pt"}})
        offsets = [slot.start, slot.start + slot.tensor.nbytes]
        header[name] = {
            "dtype": SAFETENSORS_TAGS[slot.tensor.dtype],
            "shape": list(slot.tensor.shape),
            "data_offsets": offsets,
        }
    begins = {}
    for file, header in headers.items():
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text)
        begins[file] = 8 + len(text)
    return begins


def _write_tensors(
    folder: Path,
    slots: Mapping[str, _Slot],
    begins: Mapping[str, int],
    stored: StoredTensors,
    value: Callable[[str], torch.Tensor],
) -> None:
    for conversion in stored.conversions:
        for name, tensor in stored.convert(conversion, value).items():
            slot = slots[name]
            data = tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
            with (folder / slot.file).open("r+b", buffering=0) as file:
                file.seek(begins[slot.file] + slot.start)
                for start in range(0, len(data), CHUNK_NBYTES):
                    write_all_bytes(file.fileno(), data[start : start + CHUNK_NBYTES])
    for name in begins:
        with (folder / name).open("r+b") as file:
            os.fsync(file.fileno())


def _write_index(folder: Path, slots: Mapping[str, _Slot]) -> None:
    tensors = [slot.tensor for slot in slots.values()]
    totals = {
        "total_parameters": sum(map(torch.numel, tensors)),
        "total_size": sum(tensor.nbytes for tensor in tensors),
    }
    index = {"metadata": totals, "weight_map": {name: slot.file for name, slot in sorted(slots.items())}}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_config(module: nn.Module, folder: Path, dtype: torch.dtype, trained: ExportableModel) -> None:
    pretrained: Any = module
    config, tokenizer = copy.deepcopy(pretrained.config), trained.tokenizer
    for part in (config, config.get_text_config()):
        if "use_cache" in part.to_dict():
            part.use_cache = _used_cache(trained.source_folder)  # it was set aside for training only
        if tokenizer is not None:
            use_special_tokens(part, tokenizer)
    if "quantization_config" in vars(config):
        del config.quantization_config  # that of the published weights; these are not packed
    config.dtype, config.architectures = str(dtype).removeprefix("torch."), [type(module).__name__]
    config.save_pretrained(folder)
    if pretrained.can_generate():
        generation = copy.deepcopy(pretrained.generation_config)
        if tokenizer is not None:
            use_special_tokens(generation, tokenizer)
        with suppress(
            ValueError
        ):  # a generation config that contradicts itself is refused by transformers; it is optional
            generation.save_pretrained(folder)
    remote = config.to_dict().get("auto_map") is not None
    copy_files(
        companion_files(trained.source_folder, with_tokenizer=tokenizer is None, remote=remote), folder
    )


def _used_cache(beside: Path | None) -> bool:
    path = None if beside is None else beside / "config.json"
    said = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}
    return bool(said.get("use_cache", True))


def _publish(partial: Path, folder: Path) -> None:
    if folder.is_dir():
        folder.rmdir()  # it is empty
    partial.rename(folder)
