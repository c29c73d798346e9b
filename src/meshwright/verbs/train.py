"""`train`: the local ranks started, and one rank's part."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.prepare import Prepared
from meshwright.report.terminal import duration, figures, training_view
from meshwright.run.callbacks import Callback, Moment
from meshwright.run.config import read_request
from meshwright.run.folders import step_folder
from meshwright.run.guard import Progress, guard
from meshwright.run.launch import Outcome
from meshwright.run.sample import sample_text
from meshwright.run.text import TextData
from meshwright.run.train import CHECKPOINTS, Ended, names_in, refuse_unusable, resume
from meshwright.run.train import train as train_loop
from meshwright.strategies import STRATEGIES
from meshwright.verbs.plan import Resolved, resolve, write_plan
from meshwright.verbs.ranks import Launcher, Ranked, joined


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
    path = _write_run_plan(resolved)
    steps = f"{plan.job.train.steps} steps of {plan.job.train.batch} samples"
    console.print(f"plan {plan.hash}: {steps} on {plan.mesh}, into {folder}", soft_wrap=True)
    argv = ["train", str(path), *([] if from_step is None else ["--from-step", str(from_step)])]
    return launcher(argv, plan.mesh.world, folder)


def train_rank(
    ranked: Ranked, config: Path, overrides: Sequence[str], from_step: int | None, stopping: Callable[[], bool], console: Console
) -> Ended:
    """Train as one rank; rank 0 shows what happens."""
    with _guarded(ranked, config, overrides) as (progress, resolved):
        ready, show = resolved[1], ranked.rank == 0
        plan = ready.plan
        if ranked.store is None and show:  # else the launching process has written it
            _write_run_plan(resolved)
        with joined(ranked, plan.mesh) as world, ready.engine(world) as engine:
            feed = ready.feed(plan, ranked.rank)
            progress.phase = "resuming"
            resumed = resume(engine.player, plan, world, ready.data.digest, from_step)
            if show:
                console.print("\n".join(resumed.notes), markup=False, soft_wrap=True)
            started = perf_counter()
            with _shown(plan, feed.num_steps, resumed.step, console if show else None) as shown:
                ended = train_loop(engine.player, plan, feed, world, stopping, shown, progress)
            if show:
                _conclude(ready, feed.num_steps, resumed.step, ended, perf_counter() - started, console)
                _farewell(ready, engine.module, ended, console)
    return ended


@contextmanager
def _guarded(ranked: Ranked, config: Path, overrides: Sequence[str]) -> Iterator[tuple[Progress, Resolved]]:
    """The resolved request; a failure is recorded for the launching process, or raised as it is under torchrun."""
    request = read_request(config, overrides, STRATEGIES)
    here = nullcontext(Progress())
    with here if ranked.store is None else guard(ranked.rank, Path(request.run.folder), ranked.lifeline_fd) as progress:
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


@contextmanager
def _shown(plan: Plan, available: int | None, first: int, console: Console | None) -> Iterator[tuple[Callback, ...]]:
    """What shows each step on the console; nothing without one."""
    if console is None:
        yield ()
        return
    with training_view(console, min(plan.job.train.steps, available or plan.job.train.steps), first) as show:

        def on_step_end(moment: Moment) -> None:
            line = moment.line
            if line is not None:
                show(line.step, figures(line.loss, line.grad_norm, line.tokens_per_s, line.memory))

        yield (Callback(on_step_end=on_step_end),)


def _conclude(ready: Prepared, available: int | None, first: int, ended: Ended, seconds: float, console: Console) -> None:
    """Say how the run ended, and whether steps that were played again came out the same."""
    if str(ended.replay):
        console.print(str(ended.replay), style="green" if ended.replay.differs is None else "red", soft_wrap=True)
    steps = ready.plan.job.train.steps
    if ended.loss is None:
        console.print(f"nothing to do: step {ended.step} is reached already (train.steps = {steps})", soft_wrap=True)
        return
    word = "stopped at" if ended.stopped else "done:"
    console.print(
        f"{word} step {ended.step}, loss {ended.loss:.4f}; {ended.step - first} steps took {duration(seconds)}", soft_wrap=True
    )
    if ended.stopped:
        console.print("the same command goes on from here")
    elif available is not None and available < steps:
        epochs = ready.plan.job.data.epochs
        text = f"the data ended before step {steps}: {epochs} x {len(ready.data)} samples last {available} steps"
        console.print(text, soft_wrap=True)


def _farewell(ready: Prepared, module: torch.nn.Module, ended: Ended, console: Console) -> None:
    run, job = ready.plan.run, ready.plan.job
    if run.sample_tokens and isinstance(ready.data, TextData) and not ended.stopped:
        text = sample_text(module, run.sample_prompt, run.sample_tokens, job.data.sequence, job.train.seed)
        console.rule("a sample")
        console.print(text, markup=False)
        console.rule()
    folder = Path(run.folder)
    places = {"plan": folder / "plan.toml", "metrics": folder / "metrics.jsonl", "checkpoint": ended.checkpoint}
    for name, path in places.items():
        console.print(f"{name:<12}{path}", markup=False, soft_wrap=True)
