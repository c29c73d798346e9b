"""`plan` and `inspect`: resolve a request, predict its step time, describe its model, and
write the results.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

import meshwright
from meshwright.api import default_strategies
from meshwright.commands.predict import NOT_PREDICTED, predict_plan
from meshwright.engine.runtime.loss_definition import make_loss_spec
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.analysis.model_report import ModelReport, make_model_report
from meshwright.model.analysis.plan_for_model import model_spec_for
from meshwright.model.loading.loader import load_model
from meshwright.parallel import STRATEGIES
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.plan.hardware.device_specs import find_device
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics, refuse_write_errors
from meshwright.plan.job.field_constraints import with_valid_fields
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.strategy_compatibility import strategy_field_diagnostics
from meshwright.plan.strategy_interface import sort_by_phase
from meshwright.planner.program_cost.prediction import StepPrediction
from meshwright.report.terminal.action_table import plan_details
from meshwright.report.terminal.explain_model import model_report_dict, model_report_view
from meshwright.report.terminal.params_table import param_rows, params_view
from meshwright.report.terminal.plan_overview import PlanOverview, data_line
from meshwright.report.terminal.prediction import prediction_dict, prediction_view
from meshwright.resolve_config import ResolvedRun, factory_loss, resolve_request, zero_tokens
from meshwright.run.config.config_and_plan_files import PlanRequest, read_request, write_request
from meshwright.run.measure.hardware_file import is_hardware_file
from meshwright.verifier.static_checks import static_checks

ResolvedRequest = tuple[PlanRequest, ResolvedRun]


@dataclass(frozen=True)
class ModelExplanation:
    """The description of a model; `param_dtype` is the dtype of its parameters.

    `sharding` is the placement of the parameters under a plan (None: the forward fails), `is_divided`
    whether the config asks for a plan that shards them, and `diagnostics` are the reasons why such a plan
    cannot be made.
    """

    report: ModelReport
    param_dtype: str
    sharding: ShardingPlan | None
    is_divided: bool
    diagnostics: tuple[Diagnostic, ...]

    @property
    def param_itemsize(self) -> int:
        """The bytes of one parameter element."""
        return FLOAT_NBYTES[self.param_dtype]


def resolve_config(
    config: Path, overrides: Sequence[str], world: int | None, *, needs_data: bool = True
) -> ResolvedRequest:
    """Returns the resolved request of `config`, and its run; without `needs_data` it may name no data yet.

    Raises PlanError if the static checks of the program fail.
    """
    request = read_request(config, overrides, STRATEGIES)
    if request.run.hardware and not request.run.cluster:
        request = replace(request, run=replace(request.run, cluster=request.cluster))
    ready = resolve_request(request, world, needs_data=needs_data)
    plan = ready.plan
    raise_diagnostics(static_checks(plan))
    if request.extra.get("plan_hash") not in (None, plan.hash) and not overrides:
        text = (
            f"plan_hash is {request.extra['plan_hash']}, the contents make {plan.hash}: the "
            f"file was edited, or the model changed"
        )
        raise PlanError(
            text,
            fix="remove the line plan_hash, or make the plan again with `meshwright plan`",
            location=str(config),
        )
    mesh = plan.mesh.as_dict()
    extra = {"plan_hash": plan.hash, "version": meshwright.__version__}
    job = replace(request.job, model=plan.job.model)  # a branch of the hub has become a commit
    resolved = replace(
        request, job=job, mesh=mesh, micro_batch=plan.micro_batch, strategies=plan.strategies, extra=extra
    )
    return replace(resolved, cluster=""), ready  # what it was asked for stands in the strategies now


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
    if not actions:
        line = data_line(resolved[0].job, resolved[1].num_samples)
        hardware = plan.run.hardware
        device = None if is_hardware_file(hardware) else find_device(hardware)
        return PlanOverview(plan, line, prediction, NOT_PREDICTED, device, notes)
    taken = Text(NOT_PREDICTED) if prediction is None else prediction_view(plan, prediction)
    return Group(plan_details(plan), "", taken, *(Text(note, style="green") for note in notes))


def write_prediction(resolved: ResolvedRequest, prediction: StepPrediction | None, path: Path) -> None:
    """Writes the planned memory, bytes and predicted time as JSON. Raises PlanError when the file cannot be
    written.
    """
    plan = resolved[1].plan
    said = {"plan": plan.hash, "mesh": str(plan.mesh), **prediction_dict(plan, prediction)}
    with refuse_write_errors("the prediction", path, "name another file: --json"):
        path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def explain_model(config: Path, overrides: Sequence[str]) -> ModelExplanation:
    """Returns the description of the model of `config`, and the placement of its parameters; data and batch
    are not used.

    Raises PlanError for a config that cannot be read and a model that cannot be built. A forward that fails,
    and obstacles to sharding, are part of the result.
    """
    request = read_request(config, overrides, STRATEGIES)
    job = request.job
    raise_diagnostics(job.model.diagnostics())
    loaded = load_model(job.model, job.train.seed)
    loss, example = factory_loss(loaded.loss), loaded.example or zero_tokens(loaded, job.data)
    found = make_model_report(loaded, example, loss.targets, make_loss_spec(loss))
    if found.analyzed is None:
        return ModelExplanation(found, job.precision.parameters, None, False, found.diagnostics)
    sharding, asked, diagnostics = _place_strategies(found.analyzed, request)
    return ModelExplanation(found, job.precision.parameters, sharding, asked, tuple(diagnostics))


def _place_strategies(
    analyzed: AnalyzedModel, request: PlanRequest
) -> tuple[ShardingPlan, bool, list[Diagnostic]]:
    """Returns the sharding under the strategies of `request`, whether any of them shards the model, and the
    diagnostics.

    If none does: the sharding under tensor parallelism on two ranks.
    """
    mesh = Mesh.infer({axis: 1 if size == -1 else size for axis, size in request.mesh.items()})
    chosen = (
        default_strategies(mesh, analyzed.model_spec) if request.strategies is None else request.strategies
    )
    field_errors = strategy_field_diagnostics(chosen)
    chosen = tuple(map(with_valid_fields, chosen))
    asked = mesh.pp > 1 or any(
        strategy.phase == "shard" and not isinstance(strategy, BatchSplit) for strategy in chosen
    )
    if not asked:
        mesh = Mesh(tp=2)
        chosen = default_strategies(mesh, analyzed.model_spec)
    try:
        model_spec, diagnostics = model_spec_for(analyzed, request.job, mesh, chosen), list[Diagnostic]()
    except PlanError as error:  # it cannot be cut into parts
        model_spec, diagnostics = (
            replace(analyzed.model_spec, sequence_info=analyzed.sequence_info),
            list(error.diagnostics),
        )
    sharding = ShardingPlan.one_device(mesh, model_spec)
    sharding_strategies = [
        strategy
        for strategy in chosen
        if strategy.phase == "shard" or (strategy.phase == "schedule" and not diagnostics)
    ]
    sharding_strategies = sharding_strategies if asked else []
    for strategy in sort_by_phase(chosen):
        diagnostics += strategy.check(request.job, sharding) if strategy in sharding_strategies else ()
        sharding = strategy.place(sharding)
    return (
        sharding,
        asked,
        [
            *field_errors,
            *diagnostics,
            *(
                diagnostic
                for strategy in sharding_strategies
                for diagnostic in strategy.check_combined(sharding)
            ),
        ],
    )


def explanation_view(explanation: ModelExplanation) -> RenderableType:
    """Returns what `explain_model` found, as tables."""
    view = model_report_view(explanation.report, explanation.param_itemsize)
    if explanation.sharding is None:
        return view
    return Group(
        view, params_view(explanation.sharding, explanation.param_dtype, plan_given=explanation.is_divided)
    )


def write_explanation(explanation: ModelExplanation, path: Path) -> None:
    """Writes what `explain_model` found as JSON. Raises PlanError when the file cannot be written."""
    rows = [] if explanation.sharding is None else param_rows(explanation.sharding, explanation.param_dtype)
    plain = {
        **model_report_dict(explanation.report, explanation.param_itemsize),
        "parameters": [asdict(row) for row in rows],
    }
    with refuse_write_errors("the explanation", path, "name another file: --json"):
        path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


def write_plan(resolved: ResolvedRequest, path: Path) -> None:
    """Writes the resolved request as a plan file."""
    write_request(resolved[0], path)
