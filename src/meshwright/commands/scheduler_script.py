"""`launch`: writes the job file of a plan for a scheduler."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.commands.plan import read_config, resolve
from meshwright.plan.job.errors import (
    Diagnostic,
    PlanError,
    raise_diagnostics,
    refuse_write_errors,
    suggest_name,
)
from meshwright.run.launch.scheduler_scripts import JOB_FILE_KINDS, JobFile, distribute_ranks

TIME_PATTERN = re.compile(
    r"(\d+-)?\d{1,2}(:\d{2}){0,2}|\d+"
)  # as sbatch reads it: minutes, h:m:s, days-hours...


@dataclass(frozen=True)
class JobFileOptions:
    """The options of a job file; None and "" follow from the plan."""

    num_hosts: int | None = None
    ranks_per_host: int | None = None
    gpus: bool = True
    name: str = ""
    image: str = ""
    volume: str = ""
    time_limit: str = "24:00:00"


def make_job_file(config: Path, overrides: Sequence[str], kind: str, options: JobFileOptions) -> str:
    """Returns the job file of `kind` that trains `config`. Raises PlanError if the plan does not fit hosts x
    ranks per host.
    """
    name = options.name or _label(f"meshwright-{config.stem}")
    raise_diagnostics(_option_diagnostics(kind, name, options))
    hosts, per_host = options.num_hosts, options.ranks_per_host
    world = hosts * per_host if hosts is not None and per_host is not None else None
    request = read_config(config, overrides)
    if -1 not in request.mesh.values():
        world = None  # the mesh says it; whether the hosts fit is said below, in terms of hosts
    elif world is None:
        fix = "say how many: --hosts N --per-host M"
        raise PlanError(
            "an axis of the mesh is -1, and the number of ranks is not known", fix=fix, location="mesh"
        )
    _, ready = resolve(request, world)
    hosts, per_host = distribute_ranks(ready.plan.mesh.world_size, hosts, per_host)
    words = [str(config), *overrides]
    return JOB_FILE_KINDS[kind](
        JobFile(words, name, hosts, per_host, options.gpus, options.image, options.volume, options.time_limit)
    )


def write_job_file(text: str, path: Path) -> None:
    """Writes a job file to `path`. Raises PlanError when it cannot be written."""
    with refuse_write_errors("the file", path, "name a file in a folder that can be written to: --out"):
        path.write_text(text, encoding="utf-8")


def _option_diagnostics(kind: str, name: str, wanted: JobFileOptions) -> list[Diagnostic]:
    diagnostics = []
    if kind not in JOB_FILE_KINDS:
        diagnostics.append(
            Diagnostic(f"there is no job file for '{kind}'", suggest_name(kind, JOB_FILE_KINDS), "--print")
        )
    if name != _label(name):
        text = f"'{name}' cannot be the name of a job: lower-case letters, digits and '-' can, at most 50"
        diagnostics.append(Diagnostic(text, f"--name {_label(name)}", "--name"))
    if not TIME_PATTERN.fullmatch(wanted.time_limit):
        diagnostics.append(
            Diagnostic(
                f"'{wanted.time_limit}' is not a time limit",
                "write hours:minutes:seconds: --time 24:00:00",
                "--time",
            )
        )
    return diagnostics


def _label(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:50].strip("-") or "meshwright"
