"""Writes plan files: a request with every default, as TOML in the schema of config files.

The reader of both is `config_and_plan_files`. A plan file begins with its format and version
(plan/job/file_format.py); what it holds besides is a config with nothing left to resolve.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import tomli_w

from meshwright.plan.job.errors import refuse_write_errors
from meshwright.plan.job.file_format import PLAN
from meshwright.plan.job.python_file import source_of
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.config.config_and_plan_files import PlanRequest

PLAN_FILE = "plan.toml"  # its name in a run folder


def write_request(request: PlanRequest, path: Path) -> None:
    """Writes `request` to `path` as TOML, with every default; a reader sees the old or the new file.

    Raises PlanError when the file cannot be written.
    """
    text = tomli_w.dumps(PLAN.header | request_as_dict(request)).encode()
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with refuse_write_errors("the file", path, "name a file in a folder that can be written to"):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            with suppress(OSError):
                part.unlink()


def request_as_dict(request: PlanRequest) -> dict[str, Any]:
    """Returns `request` as plain values (dict, list, str, int, float, bool) in the schema of the file."""
    document: dict[str, Any] = {
        **request.extra,
        "micro_batch": request.micro_batch,
        "align_bytes": request.align_bytes,
        **_to_plain_values(request.job),
    }
    document |= {"cluster": request.cluster} if request.cluster else {}
    document |= {"run": _to_plain_values(request.run), "mesh": dict(request.mesh)}
    if request.strategies is not None:
        document["strategies"] = [
            _named(strategy) | _to_plain_values(strategy) for strategy in request.strategies
        ]
    return document


def _named(strategy: Strategy) -> dict[str, Any]:
    """Returns a strategy as a table, with the file of one of a user's own."""
    source = source_of(type(strategy))
    return {**({"source": source} if source else {}), **strategy.as_dict()}


def _to_plain_values(value: Any) -> Any:
    if is_dataclass(value):
        overridden = {
            item.name: (getattr(value, item.name), item.default) for item in fields(value) if item.init
        }
        return {
            key: _to_plain_values(now)
            for key, (now, default) in overridden.items()
            if not (now is None and default is None)
        }
    if isinstance(value, Mapping):
        return {key: _to_plain_values(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_to_plain_values(item) for item in value]
    return {} if value is None else value  # TOML has no null; toml_validation.py reads {} as None
