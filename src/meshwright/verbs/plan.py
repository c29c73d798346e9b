"""`plan`: a request resolved, shown and written."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import RenderableType

import meshwright
from meshwright.core.errors import PlanError, raise_faults
from meshwright.core.mesh import AXES
from meshwright.prepare import Prepared, prepared
from meshwright.report.terminal import plan_view
from meshwright.run.config import Request, read_request, write_request
from meshwright.strategies import STRATEGIES
from meshwright.verifier.static import prove

Resolved = tuple[Request, Prepared]


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
    return replace(request, mesh=mesh, micro_batch=plan.micro_batch, strategies=plan.strategies, extra=extra), ready


def view(resolved: Resolved, *, every: bool) -> RenderableType:
    """The plan as a table."""
    return plan_view(resolved[1].plan, every=every)


def write_plan(resolved: Resolved, path: Path) -> None:
    """Write the resolved request as a plan file."""
    write_request(resolved[0], path)
