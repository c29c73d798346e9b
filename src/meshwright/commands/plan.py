"""`plan`: resolves a request, predicts its step time, and writes the results."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

import meshwright
from meshwright.commands.predict import (
    NOT_PREDICTED,
    device_of,
    predict_plan,
    predict_rollout,
    with_forward_times,
)
from meshwright.device.local_device import own_device, target_platform
from meshwright.device.platforms import CPU
from meshwright.engine.generation.decode_context_parallel import division_diagnostics
from meshwright.integrations.lm_eval_tasks import task_diagnostics
from meshwright.parallel import STRATEGIES
from meshwright.plan.generation_program import Rollout
from meshwright.plan.job.errors import PlanError, raise_diagnostics, refuse_write_errors
from meshwright.plan.plan import Plan
from meshwright.planner.program_cost.generation_cost import (
    rollout_program,
    sent_per_token,
    sent_weights_nbytes,
)
from meshwright.planner.program_cost.prediction import StepPrediction
from meshwright.report.terminal.action_table import plan_details, program_view
from meshwright.report.terminal.data_line import data_view
from meshwright.report.terminal.explain_model import compiled_graphs_view, graphs_ahead_view
from meshwright.report.terminal.memory_and_sent_bytes import kv_cache_text
from meshwright.report.terminal.plan_overview import PlanOverview
from meshwright.report.terminal.prediction import generation_text, prediction_dict, prediction_view
from meshwright.resolve_config import ResolvedRun, resolve_request
from meshwright.run.config.config_and_plan_files import PlanRequest, read_request
from meshwright.run.config.plan_file import write_request
from meshwright.run.measure.compile_ahead import compile_ahead
from meshwright.run.measure.count_graphs import count_graphs
from meshwright.run.measure.hardware_file import is_hardware_file
from meshwright.verifier.static_checks import static_checks

ResolvedRequest = tuple[PlanRequest, ResolvedRun]


def resolve_config(
    config: Path, overrides: Sequence[str], world: int | None, *, needs_data: bool = True
) -> ResolvedRequest:
    """Returns the resolved request of the file `config`, and its run; see `resolve`."""
    return resolve(read_request(config, overrides, STRATEGIES), world, needs_data=needs_data)


def resolve(request: PlanRequest, world: int | None, *, needs_data: bool = True) -> ResolvedRequest:
    """Returns `request` with everything resolved, and its run; without `needs_data` it may name no data yet.

    Raises PlanError if the static checks of the program fail, and for tasks that cannot be evaluated.
    """
    ready = resolve_request(request, world, needs_data=needs_data)
    job, deferred_init = ready.plan.job, ready.analyzed.deferred_init
    raise_diagnostics(deferred_init.read(lambda module: list(task_diagnostics(job, module))))
    return checked_request(request, ready)


def checked_request(request: PlanRequest, ready: ResolvedRun) -> ResolvedRequest:
    """Returns `request` with the choices of its run `ready`, as a plan file holds them, and the run.

    Raises PlanError if the static checks of the program fail.
    """
    ready = with_forward_times(ready)
    plan = ready.plan
    raise_diagnostics(static_checks(plan))
    # a branch of the hub has become a commit, the model's own tokenizer has a name, and what `cluster` was
    # asked for stands in the strategies
    resolved = replace(
        request,
        job=replace(request.job, model=plan.job.model, data=plan.job.data),
        mesh=plan.mesh.as_dict(),
        micro_batch=plan.micro_batch,
        align_bytes=plan.align_bytes,
        strategies=plan.strategies,
        cluster="",
        extra={"plan_hash": plan.hash, "meshwright": meshwright.__version__},
    )
    return resolved, ready


def read_config(config: Path, overrides: Sequence[str], hardware: str, cluster: str) -> PlanRequest:
    """Returns the request of the file `config` for this hardware and cluster (paths relative to the current
    folder); "" keeps the config's.

    The links of a known kind of device are known, so the links that the config names, of another machine,
    are dropped.
    """
    request = read_request(config, overrides, STRATEGIES)
    known = request.run.cluster if not hardware or is_hardware_file(hardware) else ""
    run = replace(
        request.run,
        hardware=_make_absolute(hardware) or request.run.hardware,
        cluster=_make_absolute(cluster) or known,
    )
    return replace(request, run=run)


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
    plan = resolved[1].plan
    notes = (*resolved[1].notes, *_dtype_notes(plan))
    summary = resolved[1].data_summary()
    if not actions:
        device = device_of(plan.run.hardware, plan.mesh.world_size)
        return PlanOverview(plan, summary, prediction, NOT_PREDICTED, device, notes)
    taken = Text(NOT_PREDICTED) if prediction is None else prediction_view(plan, prediction)
    notes_view = (Text(note, style="green") for note in notes)
    return Group(plan_details(plan), "", data_view(summary), taken, *notes_view)


def explanation_view(resolved: ResolvedRequest) -> RenderableType:
    """Returns the graphs that torch.compile makes of the blocks of the plan, and why they end or grow."""
    run = resolved[1]
    return compiled_graphs_view(count_graphs(run.analyzed, run.plan, run.loss))


def compile_ahead_view(resolved: ResolvedRequest) -> RenderableType:
    """Compiles the graphs of the blocks of the plan for the device of this process, and returns how many."""
    run = resolved[1]
    return graphs_ahead_view(compile_ahead(run.analyzed, run.plan, run.loss, own_device()))


def generation_view(
    resolved: ResolvedRequest,
    max_num_seqs: int | None,
    *,
    decode_context_parallel: bool = False,
    actions: bool = False,
) -> RenderableType:
    """Returns what `generate` keeps and sends for `max_num_seqs` sequences on a rank, each as long as a
    sample, the seconds that it takes if there is hardware, and with `actions` its program for two tokens;
    with `decode_context_parallel`, keys and values are divided over the ranks along cp.

    Raises PlanError for a number that is none, and for a cache that cannot be divided.
    """
    run = resolved[1]
    if max_num_seqs is None:
        text = "--decode-context-parallel divides keys and values, and --max-num-seqs is missing"
        raise PlanError(text, fix="pass --max-num-seqs 8 too, or leave it out")
    if decode_context_parallel:
        module = run.analyzed.deferred_init.instantiate()
        raise_diagnostics(division_diagnostics(module, run.plan.sharding))
    if max_num_seqs < 1:
        text = f"--max-num-seqs {max_num_seqs}; needed is a whole number of at least 1"
        raise PlanError(text, fix="pass the number of sequences that a rank continues at once")
    device = device_of(run.plan.run.hardware, run.plan.mesh.world_size)
    memory, num_tokens = inf if device is None else device.memory, run.plan.job.data.sequence
    layers, how = run.analyzed.cached_layers, {"decode_context_parallel": decode_context_parallel}
    memory_text = Text(kv_cache_text(run.plan, layers, max_num_seqs, num_tokens, memory, **how))
    if decode_context_parallel:
        return memory_text
    rollout = Rollout(max_num_seqs, num_tokens, 2)
    try:
        program = rollout_program(run.plan, rollout, layers)
    except PlanError as error:
        return Group(memory_text, Text(error.diagnostics[0].problem))
    prediction = predict_rollout(run.plan, rollout, layers or ())
    sent = sent_weights_nbytes(run.plan, program), sent_per_token(run.plan, program)
    text = Text(generation_text(rollout, *sent, prediction))
    return Group(memory_text, text, *([program_view(program)] if actions else []))


def _dtype_notes(plan: Plan) -> Iterator[str]:
    """Yields that the dtype is slow on the GPU of the plan; when it trains, its ranks warn of that."""
    precision = plan.job.precision
    if target_platform(plan.run.hardware) != CPU and precision.leaves_tensor_cores_idle:
        yield (
            f"matrix products are in {precision.compute}, without tensor cores: about a tenth of the speed "
            'of a GPU in bfloat16; set precision.compute = "bfloat16", or precision.tf32 = true'
        )


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
