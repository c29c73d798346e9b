"""`plan`: a request resolved, priced, shown and written."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Group, RenderableType
from rich.text import Text

import meshwright
from meshwright.api import default_strategies, judge_of, seen_by
from meshwright.commands.predict import HOW, predicted
from meshwright.model.analysis.analyze import Reading
from meshwright.model.analysis.model_report import Survey, survey
from meshwright.model.hf.config import text_limits
from meshwright.model.loading.loader import load_model
from meshwright.parallel import STRATEGIES
from meshwright.parallel.data.batch_split import Batch
from meshwright.plan.job.errors import Fault, PlanError, raise_faults
from meshwright.plan.model_spec.model_spec import NBYTES
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.strategy import in_phase_order
from meshwright.planner.program_cost.prediction import Prediction
from meshwright.report.terminal.explain_model import explain_dict, explain_view
from meshwright.report.terminal.params_table import parameter_rows, parameters_view
from meshwright.report.terminal.plan_table import plan_view
from meshwright.report.terminal.prediction import prediction_dict, prediction_view
from meshwright.resolve import Prepared, loss_of, prepared
from meshwright.run.config.config_file import Request, read_request, write_request
from meshwright.run.measure.hardware_lookup import is_file
from meshwright.verifier.static_checks import prove

Resolved = tuple[Request, Prepared]


@dataclass(frozen=True)
class Explained:
    """What a model is made of; `width` is the bytes of one parameter element, `parameters` their dtype.

    `space` is where a plan would lay its weights (None: its forward fails), `asked` whether the config asks for one that divides
    them, and `faults` are all that keeps such a plan from being made.
    """

    found: Survey
    parameters: str
    space: Space | None
    asked: bool
    faults: tuple[Fault, ...]

    @property
    def width(self) -> int:
        """The bytes of one parameter element."""
        return NBYTES[self.parameters]


def resolve(config: Path, overrides: Sequence[str], world: int | None) -> Resolved:
    """The request in `config`, resolved, and what it resolves to; refused when its program cannot be proved."""
    request = read_request(config, overrides, STRATEGIES)
    if request.run.hardware and not request.run.cluster:
        request = replace(request, run=replace(request.run, cluster=request.cluster))
    ready = prepared(request, world)
    plan = ready.plan
    raise_faults(prove(plan))
    if request.extra.get("plan_hash") not in (None, plan.hash) and not overrides:
        text = (
            f"plan_hash is {request.extra['plan_hash']}, the contents make {plan.hash}: the file was edited, or the model changed"
        )
        raise PlanError(text, fix="remove the line plan_hash, or make the plan again with `meshwright plan`", where=str(config))
    mesh = plan.mesh.as_dict()
    extra = {"plan_hash": plan.hash, "version": meshwright.__version__}
    job = replace(request.job, model=plan.job.model)  # a branch of the hub has become a commit
    resolved = replace(request, job=job, mesh=mesh, micro_batch=plan.micro_batch, strategies=plan.strategies, extra=extra)
    return replace(resolved, cluster=""), ready  # what it was asked for stands in the strategies now


def on_hardware(resolved: Resolved, hardware: str, cluster: str) -> Resolved:
    """`resolved`, to be predicted on what these name (files are meant from the current folder); empty: as its config says.

    Of a kind of device the links are known, so those that the config names are another machine's.
    """
    request, ready = resolved
    known = request.run.cluster if not hardware or is_file(hardware) else ""
    run = replace(request.run, hardware=_absolute(hardware) or request.run.hardware, cluster=_absolute(cluster) or known)
    return replace(request, run=run), replace(ready, plan=replace(ready.plan, run=run))


def _absolute(word: str) -> str:
    return str(Path(word).absolute()) if Path(word).is_file() else word


def priced(resolved: Resolved) -> Prediction | None:
    """What a step takes; None where no hardware is named. Raises PlanError with all that is wrong with what is."""
    plan = resolved[1].plan
    return predicted(plan, plan.run.hardware, plan.run.cluster)


def view(resolved: Resolved, prediction: Prediction | None, *, every: bool) -> RenderableType:
    """The plan as a table; below it what it takes, and what was chosen for it, and why."""
    plan, notes = resolved[1].plan, resolved[1].notes
    taken = Text(HOW) if prediction is None else prediction_view(plan, prediction)
    return Group(plan_view(plan, every=every), "", taken, *(Text(note, style="green") for note in notes))


def write_prediction(resolved: Resolved, prediction: Prediction | None, path: Path) -> None:
    """Write what the plan will hold, send and take as JSON. Raises PlanError when the file cannot be written."""
    plan = resolved[1].plan
    said = {"plan": plan.hash, "mesh": str(plan.mesh), **prediction_dict(plan, prediction)}
    try:
        path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        text = f"the prediction cannot be written: {error.strerror}"
        raise PlanError(text, fix="name another file: --json", where=str(path)) from error


def explain(config: Path, overrides: Sequence[str]) -> Explained:
    """What the model of `config` is made of, and where its weights would lie. Data and batch are not looked at.

    Raises PlanError for a config that cannot be read, and for a model that cannot be built; a forward that fails, and what keeps
    weights from being divided, is told in what is returned.
    """
    request = read_request(config, overrides, STRATEGIES)
    job = request.job
    raise_faults(job.model.faults())
    loaded = load_model(job.model, job.train.seed)
    loss, limits = loss_of(loaded.loss), text_limits(loaded.blueprint.instance())
    length = max(1, min(job.data.sequence, limits.positions or job.data.sequence))
    tokens = torch.zeros(1, length, dtype=torch.long)
    example = loaded.example or {"input_ids": tokens, "labels": tokens}
    found = survey(loaded, example, loss.targets, judge_of(loss))
    if found.reading is None:
        return Explained(found, job.precision.parameters, None, False, found.faults)
    space, asked, faults = _laid(found.reading, request)
    return Explained(found, job.precision.parameters, space, asked, tuple(faults))


def _laid(reading: Reading, request: Request) -> tuple[Space, bool, list[Fault]]:
    """Where the strategies of `request` lay weights, whether any of them divides the model, and what keeps those from it.

    Without one: where tensor parallelism on two ranks would.
    """
    mesh = Mesh.infer({axis: 1 if size == -1 else size for axis, size in request.mesh.items()})
    chosen = default_strategies(mesh, reading.anatomy) if request.strategies is None else request.strategies
    asked = mesh.pp > 1 or any(strategy.phase == "shard" and not isinstance(strategy, Batch) for strategy in chosen)
    if not asked:
        mesh = Mesh(tp=2)
        chosen = default_strategies(mesh, reading.anatomy)
    try:
        anatomy, faults = seen_by(reading, request.job, mesh, chosen), list[Fault]()
    except PlanError as error:  # it cannot be cut into parts
        anatomy, faults = replace(reading.anatomy, tokens=reading.tokens), list(error.faults)
    space = Space.one_device(mesh, anatomy)
    dividing = [strategy for strategy in chosen if strategy.phase == "shard" or (strategy.phase == "order" and not faults)]
    dividing = dividing if asked else []
    for strategy in in_phase_order(chosen):
        faults += strategy.check(request.job, space) if strategy in dividing else ()
        space = strategy.place(space)
    return space, asked, [*faults, *(fault for strategy in dividing for fault in strategy.partners(space))]


def explained(found: Explained) -> RenderableType:
    """What `explain` found, as tables."""
    view = explain_view(found.found, found.width)
    if found.space is None:
        return view
    return Group(view, parameters_view(found.space, found.parameters, asked=found.asked))


def write_explanation(found: Explained, path: Path) -> None:
    """Write what `explain` found as JSON. Raises PlanError when the file cannot be written."""
    try:
        rows = [] if found.space is None else parameter_rows(found.space, found.parameters)
        plain = {**explain_dict(found.found, found.width), "parameters": [asdict(row) for row in rows]}
        path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        text = f"the explanation cannot be written: {error.strerror}"
        raise PlanError(text, fix="name another file: --json", where=str(path)) from error


def write_plan(resolved: Resolved, path: Path) -> None:
    """Write the resolved request as a plan file."""
    write_request(resolved[0], path)
