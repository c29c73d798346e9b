"""Saves recordings as JSON, gzip-compressed if the file's name ends in ".gz", and loads them.

    {"format": "meshwright recording", "version": 1,
     "tensors": [[1, 1, 0, [3, 7], ...], ...],           each record once
     "events": [["AtenOp", "aten.mm.default", ...], ...]}

A value is written as it is if JSON has it; anything else is a list whose first item says what it is:
["T", 12] is tensor record 12, ["(", 1, 2] a tuple, ["[", 1] a list, ["{", "a", 1] a dict, ["d", "float32"] a
dtype. So nothing in a file is run when it is loaded, and a file of another format or version is refused.
"""

import gzip
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import torch

from meshwright.model.recording.forward_recording import (
    BlockBoundaries,
    Event,
    Opaque,
    Recording,
    TensorRecord,
)
from meshwright.plan.job.errors import PlanError, refuse_write_errors
from meshwright.plan.job.file_format import RECORDING

EVENTS: dict[str, type[Any]] = {event.__name__: event for event in get_args(Event)}
DTYPES = {
    str(each).removeprefix("torch."): each for each in vars(torch).values() if type(each) is torch.dtype
}
PLAIN = (type(None), bool, int, str)


def save_recording(recording: Recording, path: Path) -> None:
    """Writes `recording` to `path`. Raises PlanError if the file cannot be written."""
    tensors: dict[TensorRecord, int] = {}
    plain = {
        **RECORDING.header,
        **{field.name: _plain(_attribute(recording, field.name), tensors) for field in fields(Recording)},
    }
    plain["events"] = [
        [type(event).__name__, *(_plain(_attribute(event, field.name), tensors) for field in fields(event))]
        for event in recording.events
    ]
    plain["boundaries"] = [_plain(each, tensors) for each in vars(recording.boundaries).values()]
    plain["tensors"] = [_plain_tensor(tensor) for tensor in tensors]
    text = json.dumps(plain, separators=(",", ":"))
    with refuse_write_errors("the recording", path, "name another file: --record"):
        # without a time, so that equal recordings are equal files
        data = gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode()
        path.write_bytes(data)


def load_recording(path: Path) -> Recording:
    """Returns the recording in a file.

    Raises PlanError for a file of another format or version, or one that lacks a table.
    """
    try:
        data = path.read_bytes()
        found = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, EOFError, ValueError) as error:
        text = f"'{path}' cannot be read: {error}"
        raise PlanError(text, fix="name a file that `inspect --record` wrote", location="record") from error
    found = RECORDING.contents(found, str(path))
    missing = [
        f"'{name}'" for name in ("tensors", *(field.name for field in fields(Recording))) if name not in found
    ]
    if missing:
        text = f"the recording lacks its {', '.join(missing)}"
        raise PlanError(text, fix=RECORDING.fix, location=str(path))
    tensors = [_tensor(each) for each in found["tensors"]]
    values = {field.name: found[field.name] for field in fields(Recording)}
    events = [EVENTS[kind](*(_value(each, tensors) for each in rest)) for kind, *rest in values.pop("events")]
    boundaries = BlockBoundaries(*(_value(each, tensors) for each in values.pop("boundaries")))
    known = {name: _value(each, tensors) for name, each in values.items()}
    return Recording(**known, events=events, boundaries=boundaries)


def _attribute(value: Any, name: str) -> Any:
    return value.__getattribute__(name)


def _plain(value: Any, tensors: dict[TensorRecord, int]) -> Any:
    """Returns `value` as JSON; tensor records get numbers in `tensors`."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, TensorRecord):
        return ["T", tensors.setdefault(value, len(tensors))]
    if isinstance(value, torch.Size):
        return ["s", *value]
    if isinstance(value, frozenset):
        return ["f", *(_plain(each, tensors) for each in sorted(value))]
    if isinstance(value, (tuple, list)):
        return ["(" if isinstance(value, tuple) else "[", *(_plain(each, tensors) for each in value)]
    if isinstance(value, Mapping):
        return ["{", *(_plain(each, tensors) for item in value.items() for each in item)]
    match value:
        case float() | complex():
            return ["n", repr(value)]
        case slice():
            return ["l", *(_plain(each, tensors) for each in (value.start, value.stop, value.step))]
        case torch.dtype():
            return ["d", str(value).removeprefix("torch.")]
        case torch.device():
            return ["v", str(value)]
        case Opaque():
            return ["o", value.text]
    return ["e"] if value is Ellipsis else ["o", str(value)]


def _value(plain: Any, tensors: list[TensorRecord]) -> Any:
    """Returns the value that `_plain` wrote."""
    if not isinstance(plain, list):
        return plain
    kind, *rest = plain
    if kind == "T":
        return tensors[rest[0]]
    if kind == "s":
        return torch.Size(rest)
    if kind in "([f{l":
        items = [_value(each, tensors) for each in rest]
        if kind == "{":
            return dict(zip(items[::2], items[1::2], strict=True))
        return {"(": tuple, "[": list, "f": frozenset, "l": lambda given: slice(*given)}[kind](items)
    if kind == "n":
        return complex(rest[0]) if "j" in rest[0] else float(rest[0])
    if kind == "e":
        return ...
    return {"d": DTYPES.__getitem__, "v": torch.device, "o": Opaque}[kind](rest[0])


def _plain_tensor(tensor: TensorRecord) -> list[Any]:
    number, storage, version, shape, stride, offset, dtype, *rest = (
        _attribute(tensor, field.name) for field in fields(TensorRecord)
    )
    name = str(dtype).removeprefix("torch.")
    return [number, storage, version, list(shape), list(stride), offset, name, *rest]


def _tensor(plain: list[Any]) -> TensorRecord:
    number, storage, version, shape, stride, offset, dtype, needs_grad, nbytes, strided, values = plain
    known = None if values is None else tuple(values)
    size, strides, kind = torch.Size(shape), tuple(stride), DTYPES[dtype]
    return TensorRecord(
        number, storage, version, size, strides, offset, kind, needs_grad, nbytes, strided, known
    )
