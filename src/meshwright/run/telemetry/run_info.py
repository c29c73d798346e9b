"""`run_info.json` in the run's folder: what the run is, for those who look at it later without the model or the data.

hash, mesh, world    the plan's name, its mesh in words, the number of ranks
words                the plan in words, as `meshwright plan` shows it
program              the actions of every role (core/written.py)
predicted            what was predicted of it: seconds where hardware was named, bytes held and sent (report/prediction.py)
held                 bytes that a rank of each role holds all the time, by category
parts                the visits of each part of the model, in order of the forward
versions, machine    of Python and the packages; processor, memory and device of rank 0. No host or user name.
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

from meshwright.plan.plan import Plan
from meshwright.plan.step.action import program_to_dict
from meshwright.run.telemetry.accounting import device_name
from meshwright.run.telemetry.trace import replace_file

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
    """Write what `plan` is into its run's folder; returns the file. Raises OSError."""
    visits = plan.model_spec.block_calls
    starts = [0, *(visits.index(cut) for cut in plan.sharding.split_points), len(visits)]
    said: dict[str, Any] = {
        "hash": plan.hash,
        "mesh": str(plan.mesh),
        "world": plan.mesh.world_size,
        "axis_sizes": {axis: plan.mesh.size(axis) for axis in _axes(plan)},
        "summary": dict(summary),
        "resident_memory": {role: dict(each) for role, each in resident_nbytes.items()},
        "prediction": dict(prediction or {}),
        "stages": [list(visits[begin:end]) for begin, end in pairwise(starts)],
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
    replace_file(path, json.dumps(said) + "\n")
    return path


def _axes(plan: Plan) -> list[str]:
    """The axes over which some action moves something."""
    moves = [move for _, actions in plan.program.roles for action in actions for move in action.transfers]
    return sorted({axis for move in moves for axis in move.axes})


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # used from a source tree that is not installed
        return "not installed"


def processor_name() -> str:
    """The processor as its maker calls it, where that can be found."""
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        if named:
            return named[0]
    return platform.processor() or platform.machine()
