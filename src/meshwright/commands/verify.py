"""`verify`: compares a plan with one device, on threads or processes; the collectives of single ranks with
the program; or how a lossy plan learns with how its exact counterpart does.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import transformers
from pydantic import TypeAdapter
from rich.console import RenderableType

import meshwright
from meshwright.api import parallelize
from meshwright.api import trace as trace_plan
from meshwright.comm.collectives.group import World
from meshwright.commands.plan import ResolvedRequest, resolve_config, write_plan
from meshwright.device.device_memory import free_and_total_host_nbytes
from meshwright.model.loading.scaled_down import scale_down
from meshwright.model.loss.loss_definition import Batch
from meshwright.parallel import STRATEGIES
from meshwright.plan.job.errors import PlanError, format_nbytes, raise_diagnostics, refuse_write_errors
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.program_cost.rank_memory import nbytes_of_ranks
from meshwright.report.terminal.progress import format_duration
from meshwright.report.terminal.verdict_table import curve_view, trace_view, verdict_view
from meshwright.resolve_config import (
    ResolvedRun,
    open_valid_request,
    plan_request,
    resolve_request,
)
from meshwright.run.config.config_and_plan_files import PlanRequest, read_request
from meshwright.run.config.plan_file import PLAN_FILE
from meshwright.run.launch.cluster_env import RankEnv
from meshwright.run.launch.failure_record import record_failure
from meshwright.run.launch.host_memory_check import SAME_MEMORY
from meshwright.run.launch.join_world import join_world
from meshwright.run.launch.local_launcher import LocalLauncher, RanksFailed
from meshwright.run.launch.run_folder import Attempt, claim_run_folder
from meshwright.testing.parity_on_threads import compare_on_threads
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.float64_parity_setup import make_parity_case
from meshwright.verifier.loss_curves import (
    NUM_SEEDS,
    CurveVerdict,
    LossCurve,
    Trained,
    curve_diagnostics,
    default_steps,
    exact_counterparts,
    mean_over_sites,
    one_site,
    train_curve,
)
from meshwright.verifier.message_trace import NeedsRealTensorsError, TraceVerdict
from meshwright.verifier.model_own_loss import with_model_loss
from meshwright.verifier.one_device.parity_case import ParityCase
from meshwright.verifier.one_device.recorded_run import record_run
from meshwright.verifier.parity import RankReport, compare_rank, make_verdict
from meshwright.verifier.reference import run_reference
from meshwright.verifier.static_checks import static_checks
from meshwright.verifier.verdict_and_cause import Verdict

MAX_RANKS = 64  # as threads or processes of one machine: each holds the whole model in float64
DEFAULT_PARITY_STEPS = 3
CURVES_FILE = "curves.json"  # of rank 0
WAIT_S = 600.0  # that one rank waits for another at most


def verdict_table(verdict: Verdict | TraceVerdict | CurveVerdict) -> RenderableType:
    """Returns the verdict as a table."""
    if isinstance(verdict, CurveVerdict):
        return curve_view(verdict)
    return trace_view(verdict) if isinstance(verdict, TraceVerdict) else verdict_view(verdict)


def verify(
    config: Path,
    overrides: Sequence[str],
    steps: int | None,
    world: int | None,
    out: Path | None,
    launcher: LocalLauncher | None,
    *,
    shrink: bool,
) -> tuple[Verdict, Path]:
    """Compares the plan with one device, on threads or (with a launcher) on processes; writes the verdict.

    The verdict names the hash of the plan as it would be trained.
    """
    steps = steps or DEFAULT_PARITY_STEPS
    request, ready = resolve_config(config, overrides, world)
    plan = ready.plan
    if plan.mesh.world_size > MAX_RANKS:
        text = f"{plan.mesh.world_size} ranks on this machine, each with the whole model in float64"
        fix = (
            "--on trace runs single ranks of any mesh; for the numbers, compare a smaller "
            "mesh: --mesh.dp_replicate 4"
        )
        raise PlanError(text, fix=fix, location="verify")
    subject = _scaled_down(request, world) if shrink else ready
    case = _case(subject)
    _check_host_memory(case.plan, shrink=shrink)
    folder = _verify_folder(plan)
    if launcher is None:
        reports = compare_on_threads(case, steps, timeout_s=WAIT_S)
    else:
        with claim_run_folder(folder) as attempt:
            _run_ranks(launcher, (request, ready), folder, attempt, ("--steps", str(steps)), shrink=shrink)
            reports = [_read_report(folder, rank) for rank in range(plan.mesh.world_size)]
    verdict = make_verdict(case, reports, "threads" if launcher is None else "processes", _versions())
    model = (
        f"{plan.model_spec.name} scaled down to {case.plan.model_spec.numel:,} parameters"
        if shrink
        else plan.model_spec.name
    )
    verdict = replace(verdict, plan=plan.hash, model=model)
    samples = subject.dataset.batch([0])
    verdict = with_model_loss(verdict, subject.analyzed, subject.loss, samples)
    path = out or folder / "verdict.json"
    _write(verdict, path)
    return verdict, path


def _run_ranks(
    launcher: LocalLauncher,
    resolved: ResolvedRequest,
    folder: Path,
    attempt: Attempt,
    words: Sequence[str],
    *,
    shrink: bool,
) -> None:
    """Starts the ranks of a plan, told `words`, and waits for them. Raises RanksFailed if one fails."""
    plan_file = folder / PLAN_FILE
    write_plan(resolved, plan_file)
    argv = ["verify", str(plan_file), *words, "--result-folder", str(folder)]
    result = launcher([*argv, *(["--shrink"] if shrink else [])], resolved[1].plan.mesh.world_size, attempt)
    if result.exit_code:
        raise RanksFailed(result)


def _check_host_memory(exact: Plan, *, shrink: bool) -> None:
    """Raises PlanError if the ranks of the plan in float64, and one device alone for each site, need more
    than is free.
    """
    alone = exact.num_sites * exact.model_spec.numel * torch.float64.itemsize
    needed = nbytes_of_ranks(exact, range(exact.mesh.world_size), SAME_MEMORY) + alone
    free = free_and_total_host_nbytes()[0]
    if needed > free:
        text = f"{exact.mesh.world_size} ranks in float64, and the model on one device, need "
        text += f"{format_nbytes(needed)} of host memory, and {format_nbytes(free)} are free"
        smaller = "a host with more memory" if shrink else "--shrink compares a scaled-down model"
        fix = f"{smaller}; or --on trace runs single ranks without memory for tensors"
        raise PlanError(text, fix=fix, location="verify")


def trace(
    config: Path,
    overrides: Sequence[str],
    steps: int | None,
    world: int | None,
    out: Path | None,
    rank: int | None,
    *,
    shrink: bool,
) -> tuple[TraceVerdict, Path]:
    """Runs `rank` (None: the first, the last and one between) and compares its collectives with the plan;
    writes the verdict.

    A model that cannot run on fake tensors runs on real ones.
    """
    steps = steps or DEFAULT_PARITY_STEPS
    request, ready = resolve_config(config, overrides, world)
    traced = _scaled_down(request, world) if shrink else ready
    ranks = None if rank is None else [rank]
    try:
        found = trace_plan(traced.analyzed, traced.plan, ranks, loss=traced.loss, steps=steps)
    except NeedsRealTensorsError:
        traced = _small_if_possible(request, world, traced)
        found = trace_plan(traced.analyzed, traced.plan, ranks, loss=traced.loss, steps=steps, fake=False)
    model = (
        found.model
        if traced is ready
        else f"{found.model} scaled down to {traced.plan.model_spec.numel:,} parameters"
    )
    found = replace(found, plan=ready.plan.hash, model=model, versions=_versions())
    path = out or _verify_folder(ready.plan) / "trace.json"
    _write(found, path)
    return found, path


def _small_if_possible(request: PlanRequest, world: int | None, whole: ResolvedRun) -> ResolvedRun:
    try:
        return _scaled_down(request, world)
    except PlanError:  # a model from a factory, say: only its author knows its sizes
        return whole


def compare_curves(
    config: Path,
    overrides: Sequence[str],
    steps: int | None,
    world: int | None,
    out: Path | None,
    launcher: LocalLauncher | None,
    *,
    shrink: bool,
    show: Callable[[str], None],
) -> tuple[CurveVerdict, Path]:
    """Trains the plan and its exact counterpart with several seeds, on threads or (with a launcher) on
    processes; writes the verdict. `show` is called with a line per run.
    """
    request, ready = resolve_config(config, overrides, world)
    plan = ready.plan
    if plan.mesh.world_size > MAX_RANKS:
        text = f"{plan.mesh.world_size} ranks on this machine, which train the model {2 * NUM_SEEDS} times"
        fix = "compare the techniques on a smaller mesh: --mesh.dp_replicate 4"
        raise PlanError(text, fix=fix, location="verify")
    subject = _scaled_down(request, world) if shrink else ready
    steps = steps or default_steps(plan)
    available = subject.local_batches(subject.plan, 0).num_steps
    raise_diagnostics(curve_diagnostics(subject.plan, steps, available))
    if launcher is not None and plan.num_sites > 1:
        text = (
            f"the exact plan of {plan.num_sites} sites has the ranks of one, and processes are those of all"
        )
        raise PlanError(text, fix="compare on threads: --on threads", location="--on")
    subject.check_host_memory(range(plan.mesh.world_size))
    folder = _verify_folder(plan)
    if launcher is None:
        curves = _train_curves(request, steps, _on_threads, show, shrink=shrink)
    else:
        with claim_run_folder(folder) as attempt:
            words = "--curve", "--steps", str(steps)
            _run_ranks(launcher, (request, ready), folder, attempt, words, shrink=shrink)
            curves = TypeAdapter(list[LossCurve]).validate_json((folder / CURVES_FILE).read_bytes())
    exact = replace(
        request, strategies=exact_counterparts(plan.strategies), mesh=one_site(plan.mesh).as_dict(), extra={}
    )
    verdict = CurveVerdict(
        plan.hash,
        resolve_request(exact).plan.hash,
        str(plan.mesh),
        subject.plan.model_spec.name,
        "threads" if launcher is None else "processes",
        tuple(str(each) for each in plan.strategies if not each.exact),
        steps,
        tuple(curves),
        _versions(),
    )
    path = out or folder / "curve.json"
    _write(verdict, path)
    return verdict, path


def curve_rank(
    rank_env: RankEnv,
    plan_file: Path,
    steps: int,
    folder: Path | None,
    *,
    shrink: bool,
    show: Callable[[str], None],
) -> None:
    """Trains as one rank of the plan that the launching process has checked, and of its exact counterpart;
    rank 0 writes the curves into `folder`.
    """
    folder = _own_folder(rank_env, folder)
    with record_failure(rank_env.rank, rank_env.attempt_folder or folder, rank_env.lifeline_fd):
        request = read_request(plan_file, (), STRATEGIES)
        run = resolve_request(request).plan.run
        mesh = Mesh.infer(request.mesh, rank_env.world)
        with join_world(rank_env, mesh, run.limits, shared_memory=run.shared_memory) as world:
            tell = show if rank_env.rank == 0 else lambda text: None
            curves = _train_curves(request, steps, lambda _, train: train(world), tell, shrink=shrink)
        if rank_env.rank == 0:
            (folder / CURVES_FILE).write_text(json.dumps([asdict(each) for each in curves]))


def _on_threads(plan: Plan, train: Callable[[World], Trained]) -> Trained:
    return mean_over_sites(plan, run_on_threads(train, plan.mesh, timeout_s=WAIT_S))


def _train_curves(
    request: PlanRequest,
    steps: int,
    on_ranks: Callable[[Plan, Callable[[World], Trained]], Trained],
    show: Callable[[str], None],
    *,
    shrink: bool,
) -> list[LossCurve]:
    """Returns the exact and the lossy curve of each seed; `on_ranks` runs a function on ranks of a plan."""
    curves, started = list[LossCurve](), perf_counter()
    job = scale_down(request.job) if shrink else request.job
    for number in range(NUM_SEEDS):
        seeded = replace(job, train=replace(job.train, seed=job.train.seed + number))
        for run in _exact_and_lossy(replace(request, job=seeded, extra={})):
            plan = run.plan
            losses, held_out = on_ranks(plan, partial(train_on_rank, run, steps))
            curves.append(LossCurve(plan.job.train.seed, plan.exact, losses, held_out))
            seconds, left = perf_counter() - started, 2 * NUM_SEEDS - len(curves)
            rest = f"; about {format_duration(seconds * left / len(curves))} left" if left else ""
            show(f"{curves[-1]} in {steps} steps ({format_duration(seconds)}{rest})")
    return curves


def _exact_and_lossy(request: PlanRequest) -> Iterator[ResolvedRun]:
    """Yields the run of the exact counterpart of a resolved `request`, and that of the request; the model is
    analyzed once.
    """
    given = tuple(each.without_files() for each in request.strategies or ())
    opened, mesh = open_valid_request(request), Mesh(**request.mesh)
    for strategies, ranks in ((exact_counterparts(given), one_site(mesh)), (given, mesh)):
        ready = plan_request(replace(request, strategies=strategies), ranks, opened)
        raise_diagnostics(static_checks(ready.plan))
        yield ready


def train_on_rank(run: ResolvedRun, steps: int, world: World) -> Trained:
    """Trains one rank of a run, without checkpoints and logs; returns the losses of its steps, and of the
    held-out samples before and after.
    """
    plan = run.plan
    batches, held_out = run.local_batches(plan, world.rank), run.eval_samples(world.rank)

    def read_batch(step: int) -> Batch | None:
        if batches.has_ended(step):  # a stream, which cannot be counted
            text = f"the data end after {step} of {steps} steps"
            raise PlanError(text, fix=f"write --steps {step}, or add data", location="--steps")
        return batches.batch(step)

    with parallelize(run.analyzed, plan, loss=run.loss, world=world) as trainer, trainer.oom_advisor:
        read_held_out = None if held_out is None else held_out.batches
        return train_curve(trainer.executor, world, read_batch, read_held_out, steps)


def _write(verdict: Verdict | TraceVerdict | CurveVerdict, path: Path) -> None:
    with refuse_write_errors("the verdict", path, "name another file: --json"):
        verdict.write(path)


def verify_rank(
    rank_env: RankEnv,
    plan_file: Path,
    steps: int,
    folder: Path | None,
    *,
    shrink: bool,
) -> None:
    """Compares as one rank of the plan that the launching process has resolved and checked, and writes the
    report into `folder` for it.
    """
    folder = _own_folder(rank_env, folder)
    with record_failure(rank_env.rank, rank_env.attempt_folder or folder, rank_env.lifeline_fd):
        request = read_request(plan_file, (), STRATEGIES)
        case = _case(_scaled_down(request, rank_env.world) if shrink else resolve_request(request))
        with join_world(
            rank_env, case.plan.mesh, case.plan.run.limits, shared_memory=case.plan.run.shared_memory
        ) as world:
            reference = run_reference(case, steps, record_run(case, world, steps))
            report = compare_rank(case, world, reference)
        path = _report_path(folder, rank_env.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(report)))


def _own_folder(rank_env: RankEnv, folder: Path | None) -> Path:
    """Returns the folder for results of a rank. Raises PlanError if another launcher started it."""
    if rank_env.store_path is None or folder is None:
        text = "verify was started as one rank by torchrun; it starts its own ranks"
        raise PlanError(text, fix="without torchrun: meshwright verify ... --on processes", location="verify")
    return folder


def _scaled_down(request: PlanRequest, world: int | None) -> ResolvedRun:
    given = request.strategies
    strategies = None if given is None else tuple(each.without_files() for each in given)
    small = replace(request, job=scale_down(request.job), strategies=strategies, extra={})
    return resolve_request(small, world)


def _case(ready: ResolvedRun) -> ParityCase:
    return make_parity_case(
        ready.analyzed, ready.plan, ready.loss, lambda plan, rank: ready.local_batches(plan, rank).batch
    )


def _verify_folder(plan: Plan) -> Path:
    """Returns the folder for what is found about `plan`: run.folder may hold a run of another plan, and the
    verdict on that one stays what it is.
    """
    return Path(plan.run.folder) / "verify" / plan.hash


def _report_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _read_report(folder: Path, rank: int) -> RankReport:
    return TypeAdapter(RankReport).validate_json(_report_path(folder, rank).read_bytes())


def _versions() -> dict[str, str]:
    return {
        "meshwright": meshwright.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
