"""`inspect`: describes the model of a config, and how its parameters would be sharded."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Group, RenderableType

from meshwright.api import default_strategies
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.analysis.model_report import ModelReport, make_model_report
from meshwright.model.analysis.plan_for_model import model_spec_for
from meshwright.model.loading.loader import load_model
from meshwright.model.recording.recording_json import save_recording
from meshwright.parallel import STRATEGIES
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.plan.job.errors import (
    Diagnostic,
    PlanError,
    diagnostics_in,
    raise_diagnostics,
    refuse_write_errors,
)
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.strategy_interface import sort_by_phase
from meshwright.report.terminal.explain_model import model_report_dict, model_report_view
from meshwright.report.terminal.params_table import param_rows, params_view
from meshwright.resolve_config import choose_loss, run_labelled, zero_tokens
from meshwright.run.config.config_and_plan_files import PlanRequest, read_request


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


def explain_model(config: Path, overrides: Sequence[str]) -> ModelExplanation:
    """Returns the description of the model of `config`, and the placement of its parameters; data and batch
    are not used.

    Raises PlanError for a config that cannot be read and a model that cannot be built. A forward that fails,
    and obstacles to sharding, are part of the result.
    """
    request = read_request(config, overrides, STRATEGIES)
    job = request.job
    raise_diagnostics(diagnostics_in("model", request.job_diagnostics))
    loaded = load_model(job.model, job.train.seed)
    example = loaded.example or zero_tokens(loaded, job.data)
    labelled = run_labelled(loaded, example)
    loss = choose_loss(loaded, labelled.loss, job.data)
    found = make_model_report(loaded, loss.prepare(example), loss, labelled.resized)
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
            *request.strategy_diagnostics,
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


def write_recording(explanation: ModelExplanation, path: Path) -> None:
    """Writes the recording of a forward of the model.

    Raises PlanError for a model whose forward fails, and when the file cannot be written.
    """
    if explanation.report.analyzed is None:
        raise_diagnostics(explanation.diagnostics)
        return
    save_recording(explanation.report.analyzed.record_forward(), path)
