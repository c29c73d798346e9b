"""`train`: the local ranks started, and one rank's part.

What watches a run from its rank 0: the terminal, the trackers; and what the run says of itself for its report.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console

from meshwright.api import Engine
from meshwright.commands.local_ranks import Launcher
from meshwright.commands.plan import Resolved, priced, resolve, write_plan
from meshwright.commands.predict import predicted
from meshwright.parallel import STRATEGIES
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.planner.program_cost.prediction import Prediction
from meshwright.report.terminal.memory_table import held_nbytes
from meshwright.report.terminal.plan_table import plan_words
from meshwright.report.terminal.prediction import prediction_dict, seconds
from meshwright.report.terminal.progress import Figures, Show, duration, training_view
from meshwright.resolve import Prepared
from meshwright.run.checkpoint.directories import step_folder
from meshwright.run.checkpoint.resume import CHECKPOINTS, names_in, refuse_unusable, resume
from meshwright.run.config.config_file import as_dict, read_request
from meshwright.run.data.prefetch import ahead
from meshwright.run.data.tokenizer import TokenData
from meshwright.run.launch.cluster_env import Ranked
from meshwright.run.launch.failure_record import Progress, guard
from meshwright.run.launch.join import joined, same_plan
from meshwright.run.launch.local_launcher import Outcome
from meshwright.run.telemetry.callbacks import Callback, Moment
from meshwright.run.telemetry.logs import marks, rank_log, unheard
from meshwright.run.telemetry.run_info import write_about
from meshwright.run.telemetry.trackers import ADAPTERS, Told, tracked
from meshwright.run.training.sample_text import sample_text
from meshwright.run.training.train_loop import Ended
from meshwright.run.training.train_loop import train as train_loop


@contextmanager
def watching(
    resolved: Resolved, available: int | None, first: int, device: torch.device, console: Console
) -> Iterator[tuple[Callback, ...]]:
    """Callbacks of rank 0 for a run that goes on after step `first` and has data for `available` steps (None: endless)."""
    request, ready = resolved
    plan = ready.plan
    folder = Path(plan.run.folder)
    try:
        write_about(plan, plan_words(plan), held_nbytes(plan), device, prediction_dict(plan, _priced(plan)))
    except OSError as error:
        logger.warning("what the run is cannot be written, and its report will know less: %s", error)
    told = Told(folder, folder.resolve().name, plan.run.tracker_project, as_dict(request), first)
    steps = min(plan.job.train.steps, available or plan.job.train.steps)
    with tracked(plan.run.trackers, told, ADAPTERS) as trackers, training_view(console, steps, first) as show:
        yield (Callback(on_step_end=partial(_show, show)), *trackers)


def _priced(plan: Plan) -> Prediction | None:
    """What a step is predicted to take; where that cannot be said any more, the run goes on without it."""
    try:
        return predicted(plan, plan.run.hardware, plan.run.cluster)
    except PlanError as error:
        logger.warning("what a step takes cannot be predicted: %s", error)
        return None


def terminal_of(ranked: Ranked, console: Console) -> Callable[[str], None] | None:
    """Where `ranked` shows a warning; None for a rank whose output goes into its log."""
    if ranked.rank and ranked.place is None:
        return None
    return partial(console.print, style="yellow", markup=False, soft_wrap=True)


def _show(show: Show, moment: Moment) -> None:
    line = moment.line
    if line is not None:
        speeds = (line.tokens_per_s, line.flops_per_s, line.mfu)
        show(Figures(line.step, line.loss, line.grad_norm, line.lr, line.memory, *speeds, line.loss_scale))


logger = logging.getLogger(__name__)

Hearing = Callable[[], AbstractContextManager[Callable[[], bool]]]


def train(
    config: Path, overrides: Sequence[str], world: int | None, from_step: int | None, launcher: Launcher, console: Console
) -> Outcome:
    """Check everything here, then start the local ranks and wait for them."""
    resolved = resolve(config, overrides, world)
    plan = resolved[1].plan
    folder = Path(plan.run.folder)
    if from_step is not None and not step_folder(folder / CHECKPOINTS, from_step).is_dir():
        fix = f"choose one of: {names_in(folder / CHECKPOINTS)}"
        raise PlanError(f"there is no checkpoint of step {from_step}", fix=fix, where="--from-step")
    if from_step is None:
        refuse_unusable(plan)
    prediction = priced(resolved)
    path = _write_run_plan(resolved)
    _announce(resolved[1], console)
    if prediction is not None:
        console.print(f"predicted: {seconds(prediction.step_s)} a step on {prediction.on}", markup=False, soft_wrap=True)
    argv = ["train", str(path), *([] if from_step is None else ["--from-step", str(from_step)])]
    before = marks(folder)
    outcome = launcher(argv, plan.mesh.world, folder)
    for text in unheard(folder, before):
        console.print(text, style="yellow", markup=False, soft_wrap=True)
    return outcome


def _announce(ready: Prepared, console: Console) -> None:
    plan = ready.plan
    steps = f"{plan.job.train.steps} steps of {plan.job.train.batch} samples"
    console.print(f"plan {plan.hash}: {steps} on {plan.mesh}, into {plan.run.folder}", markup=False, soft_wrap=True)
    for note in (*ready.notes, *ready.data.notes):
        console.print(note, markup=False, soft_wrap=True)


def train_rank(
    ranked: Ranked, config: Path, overrides: Sequence[str], from_step: int | None, hearing: Hearing, console: Console
) -> Ended:
    """Train as one rank; rank 0 shows what happens. `hearing` is entered for the steps: it yields whether to stop."""
    with _guarded(ranked, config, overrides, console) as (progress, resolved):
        ready, show = resolved[1], ranked.rank == 0
        plan = ready.plan
        if ranked.place is not None and show:  # else the launching process has written it
            console.print(str(ranked.place), markup=False, soft_wrap=True)
            _write_run_plan(resolved)
        run = plan.run
        joining = joined(ranked, plan.mesh, run.limits, check_collectives=run.check_collectives, shared=run.shared_memory)
        with joining as world, ExitStack() as stack:
            engine = stack.enter_context(ready.engine(world))
            stack.enter_context(engine.telling)
            same_plan(world, plan)
            feed = stack.enter_context(ahead(ready.feed(plan, ranked.rank), plan.run.workers))
            progress.phase = "resuming"
            resumed = resume(engine.player, plan, world, ready.data.digest, from_step)
            if show:
                if ranked.place is not None:
                    _announce(ready, console)
                console.print("\n".join(resumed.notes), markup=False, soft_wrap=True)
            logger.info("plan %s on %s; %s", plan.hash, world.device, "; ".join(resumed.notes))
            started = perf_counter()
            watch = watching(resolved, feed.num_steps, resumed.step, world.device, console) if show else nullcontext(())
            with hearing() as stopping, watch as watchers:
                mine = (_telling(console), *ready.callbacks) if show else ()
                evaluating = ready.evaluating(ranked.rank)
                heard = (*watchers, *mine)
                ended = train_loop(engine.player, plan, feed, world, stopping, heard, progress, evaluating, resumed.so_far)
            logger.info("ended at step %d, %s", ended.step, "stopped" if ended.stopped else "done")
            if show:
                _conclude(ready, feed.num_steps, resumed.step, ended, perf_counter() - started, console)
            text = _sample(ready, engine, ended, show=show)
            if show:
                _farewell(ready, text, ended, console)
    return ended


@contextmanager
def _guarded(ranked: Ranked, config: Path, overrides: Sequence[str], console: Console) -> Iterator[tuple[Progress, Resolved]]:
    """The resolved request; a failure is recorded for the launching process, or shown by this one under another launcher."""
    request = read_request(config, overrides, STRATEGIES)
    show = None if ranked.place is None else partial(Console(stderr=True).print, markup=False, highlight=False, soft_wrap=True)
    folder = Path(request.run.folder)
    with (
        guard(ranked.rank, folder, ranked.lifeline_fd, show) as progress,
        rank_log(folder, ranked.rank, terminal_of(ranked, console)),
    ):
        yield progress, resolve(config, overrides, ranked.world)


def _write_run_plan(resolved: Resolved) -> Path:
    folder = Path(resolved[0].run.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"the folder '{folder}' cannot be made: {error.strerror}"
        raise PlanError(text, fix="name a folder that can be written to", where="run.folder") from error
    write_plan(resolved, folder / "plan.toml")
    return folder / "plan.toml"


def _telling(console: Console) -> Callback:
    """Shows evaluations, and steps that were left out."""

    def on_evaluate(moment: Moment) -> None:
        numbers = "".join(f", {name} {value:.4f}" for name, value in moment.evaluation.items() if name == "perplexity")
        best = "  best so far" if moment.best else ""
        text = f"step {moment.step}: evaluation loss {moment.evaluation['loss']:.4f}{numbers}{best}"
        console.print(text, style="cyan", markup=False, soft_wrap=True)

    def on_step_end(moment: Moment) -> None:
        if moment.line is not None and moment.line.skipped:
            line = moment.line
            lost = f"its gradients left the range of float16; the loss scale is now {line.loss_scale:g}" if line.overflow else ""
            why = moment.spike or lost or "no token of it counts"
            console.print(f"step {moment.step} was left out: {why}", style="yellow", markup=False, soft_wrap=True)

    return Callback(on_step_end=on_step_end, on_evaluate=on_evaluate)


def _conclude(ready: Prepared, available: int | None, first: int, ended: Ended, seconds: float, console: Console) -> None:
    """Say how the run ended, and whether steps that were played again came out the same."""
    if str(ended.replay):
        console.print(str(ended.replay), style="green" if ended.replay.differs is None else "red", soft_wrap=True)
    steps = ready.plan.job.train.steps
    if ended.reason:
        console.print(f"ended early at step {ended.step}: {ended.reason}", markup=False, soft_wrap=True)
    if ended.loss is None and ended.reason:
        return
    if ended.loss is None:
        console.print(f"nothing to do: step {ended.step} is reached already (train.steps = {steps})", soft_wrap=True)
        return
    word = "stopped at" if ended.stopped else "done:"
    console.print(
        f"{word} step {ended.step}, loss {ended.loss:.4f}; {ended.step - first} steps took {duration(seconds)}", soft_wrap=True
    )
    if ended.skipped:
        console.print(f"{ended.skipped} of these steps were left out (guard.action = skip)", style="yellow")
    if ended.overflows:
        text = f"{ended.overflows} of these steps were left out because gradients left the range of float16"
        console.print(text, style="yellow", soft_wrap=True)
    if ended.stopped:
        console.print("the same command goes on from here")
    elif available is not None and available < steps and not ended.reason:
        epochs, num = ready.plan.job.data.epochs, len(ready.data) - ready.plan.job.evaluate.hold_out
        text = f"the data ended before step {steps}: {epochs} x {num} samples last {available} steps"
        console.print(text, soft_wrap=True)


def _sample(ready: Prepared, engine: Engine, ended: Ended, *, show: bool) -> str:
    """A text by the trained model, where one is wanted: drawn by the rank that shows it, and by all where a forward needs all."""
    run, job = ready.plan.run, ready.plan.job
    if not run.sample_tokens or not isinstance(ready.data, TokenData) or ended.stopped:
        return ""
    with engine.whole() as module:
        if not show and not (engine.player.store.together or ready.plan.space.stages):
            return ""
        length, codec = job.data.sequence, ready.data.codec
        return sample_text(module, run.sample_prompt, run.sample_tokens, length, job.train.seed, codec=codec)


def _farewell(ready: Prepared, text: str, ended: Ended, console: Console) -> None:
    run = ready.plan.run
    if text:
        console.rule("a sample")
        console.print(text, markup=False)
        console.rule()
    folder = Path(run.folder)
    places: dict[str, Path | str | None] = {"plan": folder / "plan.toml", "metrics": folder / "metrics.jsonl"}
    places["checkpoint"] = ended.checkpoint
    best = step_folder(folder / CHECKPOINTS, ended.so_far.best_step)
    if best.is_dir():
        places["best"] = f"{best} (evaluation loss {ended.so_far.best:.4f})"
    for name, path in places.items():
        console.print(f"{name:<12}{path}", markup=False, soft_wrap=True)
