"""Checks a plan against the model itself: job settings that only a loaded model can honor, and code that
ranks cannot run like one device.

A job names a model and its data so that the command line can open them. A Python program hands both over, so
the names may be left out and are filled in here. Settings that are applied when a model is loaded by name
(frozen parameters, weights) are refused if the given model does not already satisfy them.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from meshwright.device.local_device import target_platform
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.analysis.forward_graph_trace import add_stage_boundaries
from meshwright.model.blocks.batch_coupling import buffer_diagnostics, norm_diagnostics, table_diagnostics
from meshwright.model.blocks.inplace_writes_in_glue import untracked_write_diagnostics
from meshwright.model.blocks.user_checkpointing import user_checkpoint_diagnostics
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.errors import Diagnostic, PlanError, diagnostics_in, raise_diagnostics
from meshwright.plan.job.job import Job
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

EXAMPLE_SOURCE = "example"  # data that comes with the model, not from a file


def complete_job(job: Job, model_spec: ModelSpec) -> Job:
    """Returns `job` with names for model and data where it has none.

    Raises PlanError if `job` freezes parameters that the model trains, or loads weights that the model does
    not load.
    """
    raise_diagnostics(_ignored_settings(job, model_spec))
    model = job.model if job.model.source else replace(job.model, source=model_spec.name)
    data = job.data if job.data.is_named else replace(job.data, source=EXAMPLE_SOURCE)
    return replace(job, model=model, data=data)


def model_spec_for(
    analyzed: AnalyzedModel, job: Job, mesh: Mesh, strategies: Iterable[Strategy], hardware: str = ""
) -> ModelSpec:
    """Returns the model spec with the parts that this plan needs: they take further trials, so they are not
    in `analyzed`.

    Pipeline stages, and strategies that move or drop them, need the activations between blocks, context
    parallelism the roles of tokens, and the memory model the activations in the job's dtypes, on the device
    `hardware` if it is known, else on that of this host. In float64, which is for comparisons only, an
    estimate stands for the last.
    """
    dtype, compute_dtype = (
        getattr(torch, name) for name in (job.precision.parameters, job.precision.compute)
    )
    model_spec = analyzed.model_spec
    strategies = tuple(strategies)
    if mesh.pp > 1 or any(strategy.needs_stage_boundaries for strategy in strategies):
        # without stages, the strategy says what it lacks
        with suppress(PlanError) if mesh.pp == 1 else nullcontext():
            model_spec = add_stage_boundaries(
                analyzed, dtype, compute_dtype, sequence_sharded=mesh.cp > 1
            ).model_spec
    if any(strategy.needs_sequence_info for strategy in strategies):
        model_spec = replace(model_spec, sequence_info=analyzed.sequence_info)
    if dtype == torch.float64:
        return model_spec
    memory = analyzed.measure_memory(dtype, compute_dtype, target_platform(hardware).type)
    return replace(model_spec, memory=memory)


def plan_for_model(
    analyzed: AnalyzedModel,
    job: Job,
    mesh: Mesh,
    strategies: Iterable[Strategy] = (),
    micro_batch: int = 0,
    run: RunConfig | None = None,
    found: Sequence[Diagnostic] | None = None,
    align_bytes: int = 0,
) -> Plan:
    """Returns the plan of `strategies` for this model, job and mesh, checked against the model's code.

    `found` are the diagnostics of job and run, if they were checked already. With `align_bytes` = 0, buffers
    are aligned as the devices of the plan need it: `run.hardware`, or those of this host. Raises PlanError
    with these and every other.
    """
    job, chosen, run = complete_job(job, analyzed.model_spec), tuple(strategies), run or RunConfig()
    found = job.diagnostics(run) if found is None else found
    if diagnostics_in("precision", found):  # other dtypes stand for those that cannot be tried
        job = replace(job, precision=PrecisionConfig())
    model_spec = model_spec_for(analyzed, job, mesh, chosen, run.hardware)
    align_bytes = align_bytes or target_platform(run.hardware).align_bytes
    plan = Plan.make(job, mesh, model_spec, chosen, micro_batch, run, found=found, align_bytes=align_bytes)
    check_plan_for_model(plan, analyzed)
    return plan


def _ignored_settings(job: Job, model_spec: ModelSpec) -> Iterator[Diagnostic]:
    trained = {name for weight in model_spec.params if weight.trainable for name in weight.names}
    for pattern in job.model.frozen:
        matching = sorted(name for name in trained if fnmatchcase(name, pattern))
        if matching:
            text = f"'{pattern}' is to be frozen, and the model that was read trains {matching[0]}"
            fix = "call requires_grad_(False) on it before analyze(), or in the factory that analyze() calls"
            yield Diagnostic(text, fix, "model.frozen")
    if job.model.weights and model_spec.pretrained_source is None:
        text = f"weights = '{job.model.weights}', and the model that was read has its values from elsewhere"
        yield Diagnostic(text, "pass them to analyze(..., weights=...)", "model.weights")


def check_plan_for_model(plan: Plan, analyzed: AnalyzedModel) -> None:
    """Raises PlanError with everything that the code of the model does and that ranks of `plan` cannot do as
    one device does.
    """
    module = analyzed.deferred_init.instantiate()
    diagnostics = [
        *norm_diagnostics(plan, module),
        *table_diagnostics(plan, analyzed.table_uses),
        *buffer_diagnostics(plan, module, analyzed.written_buffers),
        *user_checkpoint_diagnostics(plan),
        *untracked_write_diagnostics(plan, analyzed.untracked_write_lines),
    ]
    raise_diagnostics(diagnostics)
    if plan.sharding.sequence_sharding is not None and plan.model_spec.sequence_info is not None:
        analyzed.shard_check.check(plan.model_spec.sequence_info, plan.sharding.sequence_sharding, {})
