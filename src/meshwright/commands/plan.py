"""`plan`: resolves a request, predicts its step time, and writes the results."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

import meshwright
from meshwright.commands.predict import NOT_PREDICTED, predict_plan
from meshwright.parallel import STRATEGIES
from meshwright.plan.hardware.device_specs import find_device
from meshwright.plan.job.errors import PlanError, raise_diagnostics, refuse_write_errors
from meshwright.plan.plan import Plan
from meshwright.planner.program_cost.prediction import StepPrediction
from meshwright.report.terminal.action_table import plan_details
from meshwright.report.terminal.data_line import data_view
from meshwright.report.terminal.plan_overview import PlanOverview
from meshwright.report.terminal.prediction import prediction_dict, prediction_view
from meshwright.resolve_config import ResolvedRun, resolve_request
from meshwright.run.config.config_and_plan_files import PlanRequest, read_request, write_request
from meshwright.run.measure.hardware_file import is_hardware_file
from meshwright.verifier.static_checks import static_checks

ResolvedRequest = tuple[PlanRequest, ResolvedRun]


def resolve_config(
    config: Path, overrides: Sequence[str], world: int | None, *, needs_data: bool = True
) -> ResolvedRequest:
    """Returns the resolved request of `config`, and its run; see `read_config` and `resolve`."""
    return resolve(read_config(config, overrides), world, needs_data=needs_data)


def read_config(config: Path, overrides: Sequence[str]) -> PlanRequest:
    """Returns the request in the file `config`, changed by `overrides`; nothing is resolved yet.

    The links by which algorithms are chosen are also those by which steps are predicted, unless it names
    others. Raises PlanError with every diagnostic of the file.
    """
    request = read_request(config, overrides, STRATEGIES)
    if request.run.hardware and not request.run.cluster:
        return replace(request, run=replace(request.run, cluster=request.cluster))
    return request


def resolve(request: PlanRequest, world: int | None, *, needs_data: bool = True) -> ResolvedRequest:
    """Returns `request` with everything resolved, and its run; without `needs_data` it may name no data yet.

    Raises PlanError if the static checks of the program fail.
    """
    return checked_request(request, resolve_request(request, world, needs_data=needs_data))


def checked_request(request: PlanRequest, ready: ResolvedRun) -> ResolvedRequest:
    """Returns `request` with the choices of its run `ready`, as a plan file holds them, and the run.

    Raises PlanError if the static checks of the program fail, or the request was that of another plan.
    """
    plan = ready.plan
    raise_diagnostics(static_checks(plan))
    check_plan_hash(request, plan)
    # a branch of the hub has become a commit, the model's own tokenizer has a name, and what `cluster` was
    # asked for stands in the strategies
    resolved = replace(
        request,
        job=replace(request.job, model=plan.job.model, data=plan.job.data),
        mesh=plan.mesh.as_dict(),
        micro_batch=plan.micro_batch,
        strategies=plan.strategies,
        cluster="",
        extra={"plan_hash": plan.hash, "meshwright": meshwright.__version__},
    )
    return resolved, ready


def load_resolved(request: PlanRequest) -> ResolvedRequest:
    """Returns a request that the launching process has resolved and checked, with its run in this process.

    Raises PlanError if model and data make another plan here.
    """
    ready = resolve_request(request)
    check_plan_hash(request, ready.plan)
    return request, ready


def check_plan_hash(request: PlanRequest, plan: Plan) -> None:
    """Raises PlanError if `request` was read from a plan file, unchanged, and is not that of `plan`."""
    found = request.extra.get("plan_hash", plan.hash)
    if found != plan.hash:
        raise PlanError(
            f"plan_hash is {found}, the contents make {plan.hash}: the file was edited, or the model changed",
            fix="remove the line plan_hash, or make the plan again with `meshwright plan`",
            location="plan_hash",
        )


def with_hardware(resolved: ResolvedRequest, hardware: str, cluster: str) -> ResolvedRequest:
    """Returns `resolved` with this hardware and cluster for predictions (paths relative to the current
    folder); "" keeps the config's.

    The links of a known kind of device are known, so the links that the config names, of another machine,
    are dropped.
    """
    request, ready = resolved
    known = request.run.cluster if not hardware or is_hardware_file(hardware) else ""
    run = replace(
        request.run,
        hardware=_make_absolute(hardware) or request.run.hardware,
        cluster=_make_absolute(cluster) or known,
    )
    return replace(request, run=run), replace(ready, plan=replace(ready.plan, run=run))


def _make_absolute(word: str) -> str:
    return str(Path(word).absolute()) if Path(word).is_file() else word


def predict_step(resolved: ResolvedRequest) -> StepPrediction | None:
    """Returns the predicted step time; None without hardware. Raises PlanError with every diagnostic of the
    hardware.
    """
    plan = resolved[1].plan
    return predict_plan(plan, plan.run.hardware, plan.run.cluster)


def resolved_view(
    resolved: ResolvedRequest, prediction: StepPrediction | None, *, actions: bool
) -> RenderableType:
    """Returns the plan on one screen, or with `actions` in full; with its prediction, and the choices that
    were made for it.
    """
    plan, notes = resolved[1].plan, resolved[1].notes
    summary = resolved[1].data_summary()
    if not actions:
        hardware = plan.run.hardware
        device = None if is_hardware_file(hardware) else find_device(hardware)
        return PlanOverview(plan, summary, prediction, NOT_PREDICTED, device, notes)
    taken = Text(NOT_PREDICTED) if prediction is None else prediction_view(plan, prediction)
    notes_view = (Text(note, style="green") for note in notes)
    return Group(plan_details(plan), "", data_view(summary), taken, *notes_view)


def write_prediction(resolved: ResolvedRequest, prediction: StepPrediction | None, path: Path) -> None:
    """Writes the planned memory, bytes and predicted time as JSON. Raises PlanError when the file cannot be
    written.
    """
    plan = resolved[1].plan
    said = {"plan": plan.hash, "mesh": str(plan.mesh), **prediction_dict(plan, prediction)}
    with refuse_write_errors("the prediction", path, "name another file: --json"):
        path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def write_plan(resolved: ResolvedRequest, path: Path) -> None:
    """Writes the resolved request as a plan file."""
    write_request(resolved[0], path)
