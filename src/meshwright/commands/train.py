"""`train` and `evaluate`: start the local ranks, or train or evaluate as one of them."""

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console

from meshwright.api import Trainer, parallelize
from meshwright.commands.plan import (
    ResolvedRequest,
    predict_step,
    resolve,
    resolve_config,
)
from meshwright.commands.predict import predict_plan
from meshwright.device.local_device import device_diagnostics, local_platform, own_device_diagnostics
from meshwright.integrations.lm_eval_tasks import TaskRunner, task_tokenizer
from meshwright.parallel import STRATEGIES
from meshwright.plan.job.errors import PlanError, raise_diagnostics
from meshwright.plan.job.job import EvalConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Program
from meshwright.planner.program_cost.prediction import StepPrediction
from meshwright.report.terminal.action_table import plan_summary
from meshwright.report.terminal.data_line import data_view
from meshwright.report.terminal.memory_and_sent_bytes import state_nbytes_by_role
from meshwright.report.terminal.prediction import format_seconds, prediction_dict
from meshwright.report.terminal.progress import ProgressMetrics, ShowStep, format_duration, training_view
from meshwright.resolve_config import ResolvedRun, resolve_request
from meshwright.run.checkpoint.directories import list_step_folders, step_folder
from meshwright.run.checkpoint.resume import (
    CHECKPOINTS_FOLDER,
    checkpoint_steps_fix,
    newest_usable_step,
    resume,
)
from meshwright.run.config.config_and_plan_files import read_request
from meshwright.run.config.plan_file import PLAN_FILE, request_as_dict, write_request
from meshwright.run.data.data_loader import prefetch
from meshwright.run.data.token_dataset import TokenDataset
from meshwright.run.launch.cluster_env import RankEnv
from meshwright.run.launch.failure_record import RankProgress, record_failure
from meshwright.run.launch.join_world import check_same_plan, claim_on_rank_0, join_world
from meshwright.run.launch.local_launcher import LaunchResult, LocalLauncher
from meshwright.run.launch.run_folder import ATTEMPTS, UNCLAIMED, claim_run_folder
from meshwright.run.telemetry.callbacks import Callback, CallbackEvent
from meshwright.run.telemetry.logs import log_sizes, rank_log, unshown_warnings
from meshwright.run.telemetry.run_info import write_run_info
from meshwright.run.telemetry.trackers import TRACKERS, TrackerRun, open_trackers
from meshwright.run.training.deterministic_kernels import deterministic_kernels
from meshwright.run.training.evaluations import Evaluations
from meshwright.run.training.sample_text import sample_text
from meshwright.run.training.train_loop import TrainResult
from meshwright.run.training.train_loop import train_loop as train_loop
from meshwright.verifier.nccl_deadlocks import check_launch_blocking


@contextmanager
def rank0_callbacks(
    resolved: ResolvedRequest,
    num_available_steps: int | None,
    first_step: int,
    device: torch.device,
    console: Console,
) -> Iterator[tuple[Callback, ...]]:
    """Yields the callbacks of rank 0 for a run that resumes after step `first_step`; None available steps:
    endless data.
    """
    request, ready = resolved
    plan = ready.plan
    folder = Path(plan.run.folder)
    try:
        write_run_info(
            plan,
            plan_summary(plan),
            state_nbytes_by_role(plan),
            device,
            prediction_dict(plan, _predict_step(plan)),
        )
    except OSError as error:
        logger.warning("run_info.json cannot be written; the report will lack that information: %s", error)
    text = TrackerRun(
        folder, folder.resolve().name, plan.run.tracker_project, request_as_dict(request), first_step
    )
    steps = min(plan.job.train.steps, num_available_steps or plan.job.train.steps)
    with (
        open_trackers(plan.run.trackers, text, TRACKERS) as trackers,
        training_view(console, steps, first_step) as show,
    ):
        yield (Callback(on_step_end=partial(_show, show)), *trackers)


def _predict_step(plan: Plan) -> StepPrediction | None:
    try:
        return predict_plan(plan, plan.run.hardware, plan.run.cluster)
    except PlanError as error:
        logger.warning("the step time cannot be predicted: %s", error)
        return None


def warning_printer(rank_env: RankEnv, console: Console) -> Callable[[str], None] | None:
    """Returns a function that prints a warning of this rank; None for a rank whose output
    goes into its log.
    """
    if rank_env.rank and rank_env.launcher_env is None:
        return None
    return partial(console.print, style="yellow", markup=False, soft_wrap=True)


def _show(show: ShowStep, event: CallbackEvent) -> None:
    line = event.step_record
    if line is not None:
        speeds = (line.tokens_per_s, line.flops_per_s, line.mfu)
        show(
            ProgressMetrics(
                line.step, line.loss, line.grad_norm, line.lr, line.memory, *speeds, line.loss_scale
            )
        )


logger = logging.getLogger(__name__)

EVALUATED_PLAN_FILE = "evaluate.toml"  # in the run's folder: the plan of an evaluation, for its ranks
StopFlagContext = Callable[[], AbstractContextManager[Callable[[], bool]]]


def train(
    config: Path,
    overrides: Sequence[str],
    world: int | None,
    from_step: int | None,
    launcher: LocalLauncher,
    console: Console,
    *,
    only_evaluate: bool = False,
) -> LaunchResult:
    """Checks everything in this process, then starts the local ranks and waits for them. With `only_evaluate`
    they evaluate a checkpoint of the run.
    """
    resolved = resolve_config(config, overrides, world)
    plan = resolved[1].plan
    folder = Path(plan.run.folder)
    if from_step is not None and not step_folder(folder / CHECKPOINTS_FOLDER, from_step).is_dir():
        fix = checkpoint_steps_fix(folder / CHECKPOINTS_FOLDER)
        raise PlanError(f"there is no checkpoint of step {from_step}", fix=fix, location="--from-step")
    if only_evaluate:
        _check_evaluates(plan.job.evaluate, folder)
    dtypes = plan.job.precision.roles.values()
    raise_diagnostics(
        [
            *device_diagnostics(local_platform(), plan.mesh.world_size, dtypes),
            *own_device_diagnostics(plan.mesh.world_size),
        ]
    )
    resolved[1].check_host_memory(range(plan.mesh.world_size))
    resolved[1].check_last_round()
    prediction = predict_step(resolved)
    with claim_run_folder(folder) as attempt:
        start = newest_usable_step(plan) if from_step is None else from_step
        if not only_evaluate:
            plan.check_start(start)
        path = folder / (EVALUATED_PLAN_FILE if only_evaluate else PLAN_FILE)
        write_request(resolved[0], path)
        _announce(resolved[1], console)
        if prediction is not None and not only_evaluate:
            console.print(
                f"predicted: {format_seconds(prediction.step_s)} a step on {prediction.target_name}",
                markup=False,
                soft_wrap=True,
            )
        word = "evaluate" if only_evaluate else "train"
        argv = [word, str(path), *([] if from_step is None else ["--from-step", str(from_step)])]
        before = log_sizes(folder)
        result = launcher(argv, plan.mesh.world_size, attempt)
    for text in unshown_warnings(folder, before):
        console.print(text, style="yellow", markup=False, soft_wrap=True)
    return result


def _check_evaluates(spec: EvalConfig, folder: Path) -> None:
    """Raises PlanError if there is nothing to evaluate, or no checkpoint in `folder`, that of a run."""
    if not (spec.is_enabled or spec.tasks):
        fix = 'name samples, evaluate.source or evaluate.hold_out, or tasks: evaluate.tasks = ["hellaswag"]'
        raise PlanError("nothing to evaluate", fix=fix, location="evaluate")
    if not list_step_folders(folder / CHECKPOINTS_FOLDER):
        text = f"there is no checkpoint in {folder}"
        fix = "name the config or the plan.toml of a run that has saved one"
        raise PlanError(text, fix=fix, location="evaluate")


def _announce(ready: ResolvedRun, console: Console) -> None:
    plan = ready.plan
    steps = f"{plan.job.train.steps} steps of {plan.job.train.batch} samples"
    precision = plan.job.precision  # the mfu of the lines is a share of the peak in its dtype
    dtype = f" in {precision.compute_text}" if precision.compute_text != "float32" else ""
    console.print(
        f"plan {plan.hash}: {steps} on {plan.mesh}{dtype}, into {plan.run.folder}",
        markup=False,
        soft_wrap=True,
    )
    console.print(data_view(ready.data_summary()), soft_wrap=True)
    for note in (*ready.notes, *ready.dataset.notes):
        console.print(note, markup=False, soft_wrap=True)


def train_rank(
    rank_env: RankEnv,
    config: Path,
    overrides: Sequence[str],
    from_step: int | None,
    stop_flag: StopFlagContext,
    console: Console,
    variables: MutableMapping[str, str],
    *,
    only_evaluate: bool = False,
) -> TrainResult:
    """Trains as one rank, or evaluates a checkpoint; rank 0 prints. `stop_flag` is entered for the steps: it
    yields a function that says whether to stop. `variables` is the environment of this process.
    """
    with _record_failures(rank_env, config, overrides, console) as (progress, resolved):
        ready, show = resolved[1], rank_env.rank == 0
        plan, run = ready.plan, ready.plan.run
        if rank_env.launcher_env is not None and show:
            console.print(str(rank_env.launcher_env), markup=False, soft_wrap=True)
        if only_evaluate:
            _check_evaluates(plan.job.evaluate, Path(run.folder))
        if rank_env.launcher_env is not None:  # else the launching process has checked it
            ready.check_host_memory(rank_env.launcher_env.ranks_of_host)
            ready.check_last_round()
        _check_variables(plan.program, plan.mesh, variables)
        kernels = deterministic_kernels(variables) if run.deterministic else nullcontext()
        joining = join_world(
            rank_env,
            plan.mesh,
            run.limits,
            check_collectives=run.check_collectives,
            shared_memory=run.shared_memory,
        )
        with kernels, joining as world, ExitStack() as stack:
            check_same_plan(world, plan, ready.dataset.digest)
            if rank_env.launcher_env is not None:  # else the launching process has claimed the folder
                claim = stack.enter_context(claim_on_rank_0(world, Path(run.folder)))
                progress.attempt_folder = claim.folder
                if show and not only_evaluate:
                    write_request(resolved[0], Path(run.folder) / PLAN_FILE)
            engine = stack.enter_context(parallelize(ready.analyzed, plan, loss=ready.loss, world=world))
            stack.enter_context(engine.oom_advisor)
            workers = run.num_workers(world.device.type)
            batches = stack.enter_context(prefetch(ready.local_batches(plan, rank_env.rank), workers))
            progress.phase = "resuming"
            digest = ready.dataset.digest
            resumed = resume(engine.executor, plan, world, digest, from_step, only_read=only_evaluate)
            if show:
                if rank_env.launcher_env is not None:
                    _announce(ready, console)
                console.print("\n".join(resumed.notes), markup=False, soft_wrap=True)
            logger.info("plan %s on %s; %s", plan.hash, world.device, "; ".join(resumed.notes))
            started = perf_counter()
            callbacks_context = (
                rank0_callbacks(resolved, batches.num_steps, resumed.step, world.device, console)
                if show and not only_evaluate
                else nullcontext(())
            )
            with stop_flag() as should_stop, callbacks_context as run_callbacks:
                mine = (_event_printer(console), *ready.callbacks) if show else ()
                writer = None if only_evaluate else _text_sampler(ready, engine)
                evaluations = Evaluations(ready.eval_samples(rank_env.rank), _task_runner(engine), writer)
                heard = (*run_callbacks, *mine)
                given = engine.executor, plan, batches, world, should_stop, heard, progress
                ended = train_loop(*given, evaluations, resumed.eval_history, only_evaluate=only_evaluate)
            if only_evaluate:
                return ended
            logger.info("ended at step %d, %s", ended.step, "stopped" if ended.stopped else "done")
            if show:
                _conclude(ready, batches.num_steps, resumed.step, ended, perf_counter() - started, console)
            if show:
                _print_paths(ready, ended, console)
    return ended


def _check_variables(program: Program, mesh: Mesh, variables: Mapping[str, str]) -> None:
    """Raises PlanError for variables of the environment that would let the ranks wait for each other."""
    for name in local_platform().blocking_variables:
        raise_diagnostics(check_launch_blocking(program, mesh, name, variables.get(name, "")))


def _task_runner(trainer: Trainer) -> TaskRunner | None:
    job = trainer.plan.job
    return TaskRunner(trainer, task_tokenizer(job), job.evaluate) if job.evaluate.tasks else None


@contextmanager
def _record_failures(
    rank_env: RankEnv, config: Path, overrides: Sequence[str], console: Console
) -> Iterator[tuple[RankProgress, ResolvedRequest]]:
    """Yields the resolved request; a failure is recorded for the launching process, or printed under another
    launcher.
    """
    request = read_request(config, overrides, STRATEGIES)
    show = (
        None
        if rank_env.launcher_env is None
        else partial(Console(stderr=True).print, markup=False, highlight=False, soft_wrap=True)
    )
    folder = Path(request.run.folder)
    attempt_folder = rank_env.attempt_folder or folder / ATTEMPTS / UNCLAIMED
    # ranks of our own launcher read the plan file that it wrote, of what it has checked, and warned of
    is_checked, printer = rank_env.launcher_env is None, warning_printer(rank_env, console)
    with record_failure(rank_env.rank, attempt_folder, rank_env.lifeline_fd, show) as progress:
        with rank_log(folder, rank_env.rank, None if is_checked else printer):
            resolved = (request, resolve_request(request)) if is_checked else resolve(request, rank_env.world)
        with rank_log(folder, rank_env.rank, printer):
            yield progress, resolved


def _event_printer(console: Console) -> Callback:
    def on_evaluate(moment: CallbackEvent) -> None:
        numbers = "".join(
            f", {name} {value:.4f}" for name, value in moment.evaluation.items() if name == "perplexity"
        )
        best = "  best so far" if moment.is_best else ""
        lines = [f"evaluation {line}" for line in _task_lines(moment.evaluation)]
        if "loss" in moment.evaluation:
            lines.insert(0, f"evaluation loss {moment.evaluation['loss']:.4f}{numbers}{best}")
        for line in lines:
            console.print(f"step {moment.step}: {line}", style="cyan", markup=False, soft_wrap=True)

    def on_step_end(moment: CallbackEvent) -> None:
        if moment.step_record is not None and moment.step_record.skipped:
            line = moment.step_record
            lost = (
                f"its gradients overflowed float16; the loss scale is now {line.loss_scale:g}"
                if line.overflow
                else ""
            )
            why = moment.spike or lost or "no token of it counts"
            console.print(
                f"step {moment.step} was skipped: {why}", style="yellow", markup=False, soft_wrap=True
            )

    return Callback(on_step_end=on_step_end, on_evaluate=on_evaluate)


def _task_lines(evaluation: Mapping[str, float]) -> Iterator[str]:
    """Yields a line for each task: its name and its metrics."""
    tasks = dict[str, list[str]]()
    for name, value in evaluation.items():
        task, slash, metric = name.partition("/")
        if slash:
            tasks.setdefault(task, []).append(f"{metric} {value:.4f}")
    yield from (f"{task}: {', '.join(metrics)}" for task, metrics in tasks.items())


def _conclude(
    ready: ResolvedRun,
    available: int | None,
    first: int,
    ended: TrainResult,
    seconds: float,
    console: Console,
) -> None:
    if str(ended.replay):
        console.print(
            str(ended.replay),
            style="green" if ended.replay.first_difference is None else "red",
            soft_wrap=True,
        )
    steps = ready.plan.job.train.steps
    if ended.stop_reason:
        console.print(
            f"stopped early at step {ended.step}: {ended.stop_reason}", markup=False, soft_wrap=True
        )
    if ended.loss is None and ended.stop_reason:
        return
    if ended.loss is None:
        console.print(
            f"nothing to do: step {ended.step} is already reached (train.steps = {steps})", soft_wrap=True
        )
        return
    word = "stopped at" if ended.stopped else "done:"
    console.print(
        (
            f"{word} step {ended.step}, loss {ended.loss:.4f}; {ended.step - first} steps took "
            f"{format_duration(seconds)}"
        ),
        soft_wrap=True,
    )
    if ended.num_skipped:
        console.print(
            f"{ended.num_skipped} of these steps were skipped (guard.action = skip)", style="yellow"
        )
    if ended.num_overflows:
        text = f"{ended.num_overflows} of these steps were skipped because gradients overflowed float16"
        console.print(text, style="yellow", soft_wrap=True)
    if ended.stopped:
        console.print("the same command resumes from here")
    elif available is not None and available < steps and not ended.stop_reason:
        epochs, num = ready.plan.job.data.epochs, len(ready.dataset) - ready.plan.job.evaluate.hold_out
        text = f"the data ended before step {steps}: {epochs} x {num} samples last {available} steps"
        console.print(text, soft_wrap=True)


def _text_sampler(ready: ResolvedRun, trainer: Trainer) -> Callable[[], str] | None:
    """Returns what lets the model write a text; None if the run asks for none, or trains on no text."""
    run, job = ready.plan.run, ready.plan.job
    if not run.sample_tokens or not isinstance(ready.dataset, TokenDataset):
        return None
    length, tokenizer = job.data.sequence, ready.dataset.tokenizer
    prompt, number = run.sample_prompt, run.sample_tokens
    return partial(sample_text, trainer, prompt, number, length, job.train.seed, tokenizer=tokenizer)


def _print_paths(ready: ResolvedRun, ended: TrainResult, console: Console) -> None:
    run = ready.plan.run
    if ended.sample:
        console.rule("a sample")
        console.print(ended.sample, markup=False)
        console.rule()
    folder = Path(run.folder)
    places: dict[str, Path | str | None] = {"plan": folder / PLAN_FILE, "metrics": folder / "metrics.jsonl"}
    places["checkpoint"] = ended.checkpoint
    best = step_folder(folder / CHECKPOINTS_FOLDER, ended.eval_history.best_step)
    if best.is_dir():
        places["best"] = f"{best} (evaluation loss {ended.eval_history.best_loss:.4f})"
    for name, path in places.items():
        console.print(f"{name:<12}{path}", markup=False, soft_wrap=True)
