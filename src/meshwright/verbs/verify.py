"""`verify`: a plan compared with one device, on threads or on processes."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers
from pydantic import TypeAdapter
from rich.console import RenderableType

import meshwright
from meshwright.api import parity_case
from meshwright.core.errors import PlanError
from meshwright.model.shrink import shrunk
from meshwright.prepare import Prepared, prepared
from meshwright.report.terminal import verdict_view
from meshwright.run.config import Request, read_request
from meshwright.run.guard import guard
from meshwright.strategies import STRATEGIES
from meshwright.testing.spawn import on_threads
from meshwright.verbs.plan import resolve
from meshwright.verbs.ranks import Launcher, Ranked, RanksFailed, joined
from meshwright.verifier.parity import RankReport, compare_rank, judge
from meshwright.verifier.reference import Case, run_reference
from meshwright.verifier.verdict import Verdict


def view_verdict(verdict: Verdict) -> RenderableType:
    """The verdict as a table."""
    return verdict_view(verdict)


def verify(
    config: Path,
    overrides: Sequence[str],
    steps: int,
    world: int | None,
    out: Path | None,
    launcher: Launcher | None,
    *,
    shrink: bool,
) -> tuple[Verdict, Path]:
    """Compare the plan with one device, on threads or (with a launcher) on processes; write the verdict.

    The verdict names the hash of the plan as it would be trained. Raises RanksFailed when a process did not end well.
    """
    request, ready = resolve(config, overrides, world)
    plan = ready.plan
    case = _case(_scaled_down(request, world) if shrink else ready)
    folder = Path(plan.run.folder) / "verify"
    if launcher is None:
        reference = run_reference(case, steps)
        reports = on_threads(lambda world: compare_rank(case, world, reference), plan.mesh, timeout_s=600)
    else:
        size = ["--shrink"] if shrink else []
        argv = ["verify", str(config), "--steps", str(steps), "--world", str(plan.mesh.world), *size, *overrides]
        outcome = launcher(argv, plan.mesh.world, folder)
        if outcome.code:
            raise RanksFailed(outcome)
        reports = [_read_report(folder, rank) for rank in range(plan.mesh.world)]
    verdict = judge(case, reports, "threads" if launcher is None else "processes", _versions())
    model = f"{plan.anatomy.name} scaled down to {case.plan.anatomy.numel:,} parameters" if shrink else plan.anatomy.name
    verdict = replace(verdict, plan=plan.hash, model=model)
    path = out or folder / "verdict.json"
    try:
        verdict.write(path)
    except OSError as error:
        raise PlanError(
            f"the verdict cannot be written: {error.strerror}", fix="name another file: --json", where=str(path)
        ) from error
    return verdict, path


def verify_rank(ranked: Ranked, config: Path, overrides: Sequence[str], steps: int, *, shrink: bool) -> None:
    """Compare as one rank, and leave the report for the process that asked."""
    if ranked.store is None:
        text = "verify was started as one rank by torchrun; it starts its own ranks"
        raise PlanError(text, fix="without torchrun: meshwright verify ... --on processes", where="verify")
    request = read_request(config, overrides, STRATEGIES)
    folder = Path(request.run.folder) / "verify"
    with guard(ranked.rank, folder, ranked.lifeline_fd):
        case = _case(_scaled_down(request, ranked.world) if shrink else prepared(request, ranked.world))
        with joined(ranked, case.plan.mesh) as world:
            report = compare_rank(case, world, run_reference(case, steps))
        path = _report_path(folder, ranked.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(report)))


def _scaled_down(request: Request, world: int | None) -> Prepared:
    """What `request` becomes with a small copy of its model."""
    return prepared(replace(request, job=shrunk(request.job)), world)


def _case(ready: Prepared) -> Case:
    return parity_case(ready.reading, ready.plan, ready.loss, lambda plan, rank: ready.feed(plan, rank).batch)


def _report_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _read_report(folder: Path, rank: int) -> RankReport:
    return TypeAdapter(RankReport).validate_json(_report_path(folder, rank).read_bytes())


def _versions() -> dict[str, str]:
    return {"meshwright": meshwright.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
