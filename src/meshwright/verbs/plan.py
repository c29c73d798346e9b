"""`plan`: a request resolved, shown and written."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Group, RenderableType
from rich.text import Text

import meshwright
from meshwright.api import judge_of
from meshwright.core.anatomy import NBYTES
from meshwright.core.errors import PlanError, raise_faults
from meshwright.core.mesh import AXES
from meshwright.model.configs import text_limits
from meshwright.model.sources import load_model
from meshwright.model.survey import Survey, survey
from meshwright.prepare import Prepared, loss_of, prepared
from meshwright.report.explain import explain_dict, explain_view
from meshwright.report.terminal import plan_view
from meshwright.run.config import Request, read_request, write_request
from meshwright.strategies import STRATEGIES
from meshwright.verifier.static import prove

Resolved = tuple[Request, Prepared]
Explained = tuple[Survey, int]


def resolve(config: Path, overrides: Sequence[str], world: int | None) -> Resolved:
    """The request in `config`, resolved, and what it resolves to; refused when its program cannot be proved."""
    request = read_request(config, overrides, STRATEGIES)
    ready = prepared(request, world)
    plan = ready.plan
    raise_faults(prove(plan))
    if request.extra.get("plan_hash") not in (None, plan.hash) and not overrides:
        text = (
            f"plan_hash is {request.extra['plan_hash']}, the contents make {plan.hash}: the file was edited, or the model changed"
        )
        raise PlanError(text, fix="remove the line plan_hash, or make the plan again with `meshwright plan`", where=str(config))
    mesh = {axis: plan.mesh.size(axis) for axis in AXES}
    extra = {"plan_hash": plan.hash, "version": meshwright.__version__}
    job = replace(request.job, model=plan.job.model)  # a branch of the hub has become a commit
    resolved = replace(request, job=job, mesh=mesh, micro_batch=plan.micro_batch, strategies=plan.strategies, extra=extra)
    return replace(resolved, cluster=""), ready  # what it was asked for stands in the strategies now


def view(resolved: Resolved, *, every: bool) -> RenderableType:
    """The plan as a table; below it what was chosen for it, and why."""
    return Group(plan_view(resolved[1].plan, every=every), *(Text(note, style="green") for note in resolved[1].notes))


def explain(config: Path, overrides: Sequence[str]) -> Explained:
    """What the model of `config` is made of, and the bytes of one parameter element. Neither data nor mesh are looked at.

    Raises PlanError for a config that cannot be read, and for a model that cannot be built; a forward that fails is told
    in the survey.
    """
    job = read_request(config, overrides, STRATEGIES).job
    raise_faults(job.model.faults())
    loaded = load_model(job.model, job.train.seed)
    loss, limits = loss_of(loaded.loss), text_limits(loaded.blueprint.instance())
    length = max(1, min(job.data.sequence, limits.positions or job.data.sequence))
    tokens = torch.zeros(1, length, dtype=torch.long)
    example = loaded.example or {"input_ids": tokens, "labels": tokens}
    return survey(loaded, example, loss.targets, judge_of(loss)), NBYTES[job.precision.parameters]


def explained(found: Explained) -> RenderableType:
    """What `explain` found, as tables."""
    return explain_view(*found)


def write_explanation(found: Explained, path: Path) -> None:
    """Write what `explain` found as JSON. Raises PlanError when the file cannot be written."""
    try:
        path.write_text(json.dumps(explain_dict(*found), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        text = f"the explanation cannot be written: {error.strerror}"
        raise PlanError(text, fix="name another file: --json", where=str(path)) from error


def write_plan(resolved: Resolved, path: Path) -> None:
    """Write the resolved request as a plan file."""
    write_request(resolved[0], path)
