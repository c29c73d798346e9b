"""Converts a pickle of tensors to safetensors: a script for a child process, imported by no module.

    python -I convert_pickle.py FILE OUT REPORT [KEY]

The only module that calls torch.load. A pickle is a program. `weights_only` runs the few instructions that
build tensors and refuses the rest, and this process has nothing to lose: its environment is empty, and its
parent reads the header of OUT before it trusts any output. REPORT is JSON: {"tensors": 12} or {"refused":
"..."}.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def main(file: str, out: str, key: str = "") -> dict[str, Any]:
    """Writes the tensors in `file` to `out`; with `key`, those of that entry. Returns the report for the
    parent.
    """
    try:
        contents = _load_tensors(file)
    except Exception as error:  # torch raises many kinds for what is no pickle, or more than tensors
        return {"refused": _reason(error)}
    if key:
        if not isinstance(contents, Mapping) or key not in contents:
            return {"refused": f"it has no entry '{key}'", "entries": _entries(contents)}
        contents = contents[key]
    if isinstance(contents, torch.Tensor):
        return {"refused": "it holds one tensor without a name; needed are tensors by name"}
    others = (
        [name for name, value in contents.items() if not isinstance(value, torch.Tensor)]
        if isinstance(contents, Mapping)
        else []
    )
    if not isinstance(contents, Mapping) or others or not all(isinstance(name, str) for name in contents):
        return {"refused": "it holds other things than tensors by name", "entries": _entries(contents)}
    seen: set[int] = set()
    tensors = {}
    for name, value in contents.items():
        shared = (
            value.untyped_storage().data_ptr() in seen
        )  # the format has no ties: each name gets its own bytes
        seen.add(value.untyped_storage().data_ptr())
        tensors[name] = value.detach().clone() if shared else value.detach().contiguous()
    save_file(tensors, out, metadata={"format": "pt"})
    return {"tensors": len(tensors)}


def _load_tensors(file: str) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # written in the old format, which cannot be mapped
        return torch.load(file, map_location="cpu", weights_only=True)


def _reason(error: Exception) -> str:
    asked = re.search(
        r"GLOBAL ([\w.]+)", str(error)
    )  # not torch's own words: they advise to read it without a guard
    if asked:
        return f"it refers to {asked[1]}: it contains more than tensors"
    return f"it is not a file that torch.save wrote, or it is damaged ({type(error).__name__})"


def _entries(contents: Any) -> list[str]:
    if not isinstance(contents, Mapping):
        return [type(contents).__name__]
    return [f"{str(name)[:60]} ({type(value).__name__})" for name, value in list(contents.items())[:12]]


if __name__ == "__main__":
    file, out, report, *entry = sys.argv[1:]
    Path(report).write_text(json.dumps(main(file, out, *entry)), encoding="utf-8")
