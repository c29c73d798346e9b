"""Writes `run_info.json` into the run's folder: what the run is, for readers without the model or the data.

    format, version      of this file
    hash, mesh, world    the hash of the plan, its mesh as text, the number of ranks
    summary              the plan as text, as `meshwright plan` shows it
    program              the ranks and actions of every role
    prediction           predicted seconds (if hardware was named), and bytes kept and sent
    resident_memory      bytes that a rank of each role keeps all the time, by category
    stages               the block calls of each pipeline stage, in forward order
    versions, machine    versions of Python and the packages; processor, memory and device of rank 0

It holds no name of a host or a user.
"""

import json
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

from meshwright.device.local_device import device_name
from meshwright.plan.job.file_format import RUN_INFO
from meshwright.plan.plan import Plan
from meshwright.plan.step.program_json import program_to_dict
from meshwright.run.telemetry.atomic_write import replace_file

RUN_INFO_FILE = "run_info.json"
MemoryByRole = Mapping[str, Mapping[str, int]]
PACKAGES = ("meshwright", "torch", "transformers")


def write_run_info(
    plan: Plan,
    summary: Mapping[str, str],
    resident_nbytes: MemoryByRole,
    device: torch.device,
    prediction: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `run_info.json` of `plan` and returns its path. Raises OSError."""
    block_calls = plan.model_spec.block_calls
    starts = [0, *(block_calls.index(cut) for cut in plan.sharding.split_points), len(block_calls)]
    document: dict[str, Any] = {
        **RUN_INFO.header,
        "hash": plan.hash,
        "mesh": str(plan.mesh),
        "world": plan.mesh.world_size,
        "axis_sizes": {axis: plan.mesh.size(axis) for axis in _axes(plan)},
        "summary": dict(summary),
        "resident_memory": {role: dict(each) for role, each in resident_nbytes.items()},
        "prediction": dict(prediction or {}),
        "stages": [list(block_calls[begin:end]) for begin, end in pairwise(starts)],
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": processor_name(),
            "cores": psutil.cpu_count() or 0,
            "memory": psutil.virtual_memory().total,
            "device": device_name(device),
        },
        "program": program_to_dict(plan.program),
    }
    path = Path(plan.run.folder) / RUN_INFO_FILE
    replace_file(path, json.dumps(document) + "\n")
    return path


def _axes(plan: Plan) -> list[str]:
    transfers = [move for role in plan.program.roles for action in role.actions for move in action.transfers]
    return sorted({axis for move in transfers for axis in move.axes})


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # used from a source tree that is not installed
        return "not installed"


def processor_name() -> str:
    """Returns the processor's model name where the system knows it."""
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()
