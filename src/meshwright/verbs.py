"""What each verb of the command line does, without its words: on this rank, or on all local ones."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter

import torch
import transformers
from pydantic import TypeAdapter
from rich.console import Console, RenderableType

import meshwright
from meshwright.api import alone, parity_case
from meshwright.comm.distributed import rendezvous
from meshwright.comm.group import World
from meshwright.core.errors import PlanError, raise_faults
from meshwright.core.mesh import AXES, Mesh
from meshwright.core.plan import Plan
from meshwright.model.shrink import shrunk
from meshwright.prepare import Prepared, prepared
from meshwright.report.terminal import duration, figures, plan_view, training_view, verdict_view
from meshwright.run.config import Request, read_request, write_request
from meshwright.run.folders import step_folder
from meshwright.run.guard import Progress, guard
from meshwright.run.launch import Outcome
from meshwright.run.sample import sample_text
from meshwright.run.text import TextData
from meshwright.run.train import CHECKPOINTS, Ended, Line, names_in, refuse_unusable, resume
from meshwright.run.train import train as train_loop
from meshwright.strategies import STRATEGIES
from meshwright.testing.spawn import on_threads
from meshwright.verifier.parity import RankReport, compare_rank, judge
from meshwright.verifier.reference import Case, run_reference
from meshwright.verifier.static import prove
from meshwright.verifier.verdict import Verdict

Launcher = Callable[[list[str], int, Path], Outcome]


class RanksFailed(Exception):
    """Local ranks did not end as they should; `outcome` says how."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(f"the ranks ended with code {outcome.code}")


@dataclass(frozen=True)
class Ranked:
    """This process as one rank of a job, as its environment says. `store` is None under torchrun, which has its own."""

    rank: int
    world: int
    local_rank: int
    store: str | None = None
    lifeline_fd: int | None = None


def resolve(config: Path, overrides: Sequence[str], world: int | None) -> tuple[Request, Prepared]:
    """The request in `config`, resolved, and what it resolves to; refused when its program cannot be proved."""
    request = read_request(config, overrides, STRATEGIES)
    ready = prepared(request, world)
    plan = ready.plan
    raise_faults(prove(plan))
    if request.extra.get("plan_hash") not in (None, plan.hash) and not overrides:
        text = (
            f"plan_hash is {request.extra['plan_hash']}, the contents make {plan.hash}: the file was edited, or the model changed"
        )
        raise PlanError(text, fix="remove the line plan_hash, or make the plan again with `meshwright plan`", where=str(config))
    mesh = {axis: plan.mesh.size(axis) for axis in AXES}
    extra = {"plan_hash": plan.hash, "version": meshwright.__version__}
    return replace(request, mesh=mesh, micro_batch=plan.micro_batch, strategies=plan.strategies, extra=extra), ready


def view(resolved: tuple[Request, Prepared], *, every: bool) -> RenderableType:
    """The plan as a table."""
    return plan_view(resolved[1].plan, every=every)


def view_verdict(verdict: Verdict) -> RenderableType:
    """The verdict as a table."""
    return verdict_view(verdict)


def write_plan(resolved: tuple[Request, Prepared], path: Path) -> None:
    """Write the resolved request as a plan file."""
    write_request(resolved[0], path)


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
        with _world(ranked, plan.mesh) as world, ready.engine(world) as engine:
            feed = ready.feed(plan, ranked.rank)
            progress.phase = "resuming"
            resumed = resume(engine.player, plan, world, ready.data.digest, from_step)
            if show:
                console.print("\n".join(resumed.notes), markup=False, soft_wrap=True)
            started = perf_counter()
            with _shown(plan, feed.num_steps, resumed.step, console if show else None) as watch:
                ended = train_loop(engine.player, plan, feed, world, stopping, watch, progress)
            if show:
                _conclude(ready, feed.num_steps, resumed.step, ended, perf_counter() - started, console)
                _farewell(ready, engine.module, ended, console)
    return ended


def verify(
    config: Path,
    overrides: Sequence[str],
    steps: int,
    world: int | None,
    out: Path | None,
    launcher: Launcher | None,
    *,
    shrink: bool,
) -> tuple[Verdict, Path]:
    """Compare the plan with one device, on threads or (with a launcher) on processes; write the verdict.

    The verdict names the hash of the plan as it would be trained. Raises RanksFailed when a process did not end well.
    """
    request, ready = resolve(config, overrides, world)
    plan = ready.plan
    case = _case(_scaled_down(request, world) if shrink else ready)
    folder = Path(plan.run.folder) / "verify"
    if launcher is None:
        reference = run_reference(case, steps)
        reports = on_threads(lambda world: compare_rank(case, world, reference), plan.mesh, timeout_s=600)
    else:
        size = ["--shrink"] if shrink else []
        argv = ["verify", str(config), "--steps", str(steps), "--world", str(plan.mesh.world), *size, *overrides]
        outcome = launcher(argv, plan.mesh.world, folder)
        if outcome.code:
            raise RanksFailed(outcome)
        reports = [_read_report(folder, rank) for rank in range(plan.mesh.world)]
    verdict = judge(case, reports, "threads" if launcher is None else "processes", _versions())
    model = f"{plan.anatomy.name} scaled down to {case.plan.anatomy.numel:,} parameters" if shrink else plan.anatomy.name
    verdict = replace(verdict, plan=plan.hash, model=model)
    path = out or folder / "verdict.json"
    try:
        verdict.write(path)
    except OSError as error:
        raise PlanError(
            f"the verdict cannot be written: {error.strerror}", fix="name another file: --json", where=str(path)
        ) from error
    return verdict, path


def verify_rank(ranked: Ranked, config: Path, overrides: Sequence[str], steps: int, *, shrink: bool) -> None:
    """Compare as one rank, and leave the report for the process that asked."""
    if ranked.store is None:
        text = "verify was started as one rank by torchrun; it starts its own ranks"
        raise PlanError(text, fix="without torchrun: meshwright verify ... --on processes", where="verify")
    request = read_request(config, overrides, STRATEGIES)
    folder = Path(request.run.folder) / "verify"
    with guard(ranked.rank, folder, ranked.lifeline_fd):
        case = _case(_scaled_down(request, ranked.world) if shrink else prepared(request, ranked.world))
        with _world(ranked, case.plan.mesh) as world:
            report = compare_rank(case, world, run_reference(case, steps))
        path = _report_path(folder, ranked.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(report)))


@contextmanager
def _guarded(ranked: Ranked, config: Path, overrides: Sequence[str]) -> Iterator[tuple[Progress, tuple[Request, Prepared]]]:
    """The resolved request; a failure is recorded for the launching process, or raised as it is under torchrun."""
    request = read_request(config, overrides, STRATEGIES)
    here = nullcontext(Progress())
    with here if ranked.store is None else guard(ranked.rank, Path(request.run.folder), ranked.lifeline_fd) as progress:
        yield progress, resolve(config, overrides, ranked.world)


@contextmanager
def _world(ranked: Ranked, mesh: Mesh) -> Iterator[World]:
    cuda = torch.cuda.is_available()
    if mesh.world == 1:
        yield alone(torch.device("cuda" if cuda else "cpu"))
        return
    device = torch.device("cuda", ranked.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    init = "env://" if ranked.store is None else None
    backend = "nccl" if cuda else "gloo"
    with rendezvous(mesh, ranked.rank, store_path=ranked.store, init_method=init, backend=backend, device=device) as world:
        yield world


def _write_run_plan(resolved: tuple[Request, Prepared]) -> Path:
    folder = Path(resolved[0].run.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"the folder '{folder}' cannot be made: {error.strerror}"
        raise PlanError(text, fix="name a folder that can be written to", where="run.folder") from error
    write_plan(resolved, folder / "plan.toml")
    return folder / "plan.toml"


@contextmanager
def _shown(plan: Plan, available: int | None, first: int, console: Console | None) -> Iterator[Callable[[Line], None]]:
    """What to call after each step; it does nothing without a console."""
    if console is None:
        yield lambda line: None
        return
    with training_view(console, min(plan.job.train.steps, available or plan.job.train.steps), first) as show:
        yield lambda line: show(line.step, figures(line.loss, line.grad_norm, line.tokens_per_s, line.memory))


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


def _scaled_down(request: Request, world: int | None) -> Prepared:
    """What `request` becomes with a small copy of its model."""
    return prepared(replace(request, job=shrunk(request.job)), world)


def _case(ready: Prepared) -> Case:
    return parity_case(ready.reading, ready.plan, ready.loss, lambda plan, rank: ready.feed(plan, rank).batch)


def _report_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _read_report(folder: Path, rank: int) -> RankReport:
    return TypeAdapter(RankReport).validate_json(_report_path(folder, rank).read_bytes())


def _versions() -> dict[str, str]:
    return {"meshwright": meshwright.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
