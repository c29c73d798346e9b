"""What each verb of the command line does, without its words: on this rank, or on all local ones."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers
from pydantic import TypeAdapter
from rich.console import Console, RenderableType

import meshwright
from meshwright.api import Prepared, alone, make_dice, make_plan, make_subject, prepared
from meshwright.comm.distributed import rendezvous
from meshwright.comm.group import World
from meshwright.core.errors import PlanError, raise_faults
from meshwright.core.mesh import AXES, Mesh
from meshwright.core.plan import Plan
from meshwright.model.shrink import shrunk
from meshwright.report.terminal import figures, plan_view, training_bar
from meshwright.run.config import Request, read_request, write_request
from meshwright.run.folders import step_folder
from meshwright.run.guard import guard
from meshwright.run.launch import Outcome
from meshwright.run.sample import sample_text
from meshwright.run.text import TextData
from meshwright.run.train import CHECKPOINTS, Ended, Line, resume
from meshwright.run.train import train as train_loop
from meshwright.strategies import STRATEGIES
from meshwright.testing.spawn import on_threads
from meshwright.verifier.parity import RankReport, compare_rank, exact_job, judge
from meshwright.verifier.reference import Case, run_reference
from meshwright.verifier.static import prove
from meshwright.verifier.verdict import Verdict

Launcher = Callable[[list[str], int, Path], Outcome]


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
        there = ", ".join(sorted(path.name for path in (folder / CHECKPOINTS).glob("step-*"))) or "none"
        raise PlanError(f"there is no checkpoint of step {from_step}", fix=f"choose one of: {there}", where="--from-step")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(
            f"the folder cannot be made: {error.strerror}", fix="name a folder that can be written to", where="run.folder"
        ) from error
    path = folder / "plan.toml"
    write_plan(resolved, path)
    console.print(f"plan {plan.hash}: {plan.mesh}, {plan.job.train.steps} steps of {plan.job.train.batch} samples -> {folder}")
    return launcher(
        ["train", str(path), *([] if from_step is None else ["--from-step", str(from_step)])], plan.mesh.world, folder
    )


def train_rank(
    ranked: Ranked, config: Path, overrides: Sequence[str], from_step: int | None, stopping: Callable[[], bool], console: Console
) -> Ended:
    """Train as one rank; rank 0 shows what happens."""
    with _guarded(ranked, config, overrides) as ready:
        plan, show = ready.plan, ranked.rank == 0
        with _world(ranked, plan.mesh) as world, ready.engine(world) as engine:
            feed = ready.feed(plan, ranked.rank)
            resumed = resume(engine.player, plan, world, ready.data.digest, from_step)
            if show:
                console.print("\n".join(resumed.notes) if resumed.notes else "starting from step 0", markup=False)
            with _shown(plan, resumed.step, console if show else None) as watch:
                ended = train_loop(engine.player, plan, feed, world, stopping, watch)
            if show:
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
    """Compare the plan with one device, on threads or (with a launcher) on processes; write the verdict."""
    ready = _exact(read_request(config, overrides, STRATEGIES), world, shrink=shrink)
    raise_faults(prove(ready.plan))
    case = _case(ready)
    folder = Path(ready.plan.run.folder) / "verify"
    if launcher is None:
        reference = run_reference(case, steps)
        reports = on_threads(lambda world: compare_rank(case, world, reference), ready.plan.mesh, timeout_s=600)
    else:
        size = ["--shrink"] if shrink else []
        argv = ["verify", str(config), "--steps", str(steps), "--world", str(ready.plan.mesh.world), *size, *overrides]
        outcome = launcher(argv, ready.plan.mesh.world, folder)
        if outcome.code:
            text = outcome.failure.text if outcome.failure else f"the ranks ended with code {outcome.code}"
            raise RuntimeError(f"verification on processes did not end: {text}")
        reports = [_read_report(folder, rank) for rank in range(ready.plan.mesh.world)]
    verdict = judge(case, reports, "threads" if launcher is None else "processes", _versions())
    path = out or folder / "verdict.json"
    verdict.write(path)
    return verdict, path


def verify_rank(ranked: Ranked, config: Path, overrides: Sequence[str], steps: int, *, shrink: bool) -> None:
    """Compare as one rank, and leave the report for the process that asked."""
    request = read_request(config, overrides, STRATEGIES)
    folder = Path(request.run.folder) / "verify"
    with guard(ranked.rank, folder, ranked.lifeline_fd):
        ready = _exact(request, ranked.world, shrink=shrink)
        case = _case(ready)
        with _world(ranked, ready.plan.mesh) as world:
            report = compare_rank(case, world, run_reference(case, steps))
        path = _report_path(folder, ranked.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(report)))


@contextmanager
def _guarded(ranked: Ranked, config: Path, overrides: Sequence[str]) -> Iterator[Prepared]:
    """The prepared request; a failure is recorded for the launching process, or raised as it is under torchrun."""
    request = read_request(config, overrides, STRATEGIES)
    watched = guard(ranked.rank, Path(request.run.folder), ranked.lifeline_fd) if ranked.store is not None else nullcontext()
    with watched:
        yield prepared(request, ranked.world)


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


@contextmanager
def _shown(plan: Plan, first: int, console: Console | None) -> Iterator[Callable[[Line], None]]:
    """What to call after each step: moves a bar on a terminal, prints some lines elsewhere, does nothing without a console."""
    steps = plan.job.train.steps
    if console is None:
        yield lambda line: None
    elif console.is_terminal:
        with training_bar(console) as bar:
            task = bar.add_task("train", total=steps, completed=first, figures="")
            yield lambda line: bar.update(task, completed=line.step, figures=_figures(line))
    else:
        often = max(1, steps // 20)
        due = lambda line: line.step % often == 0 or line.step in (first + 1, steps)  # noqa: E731
        yield lambda line: console.print(f"step {line.step}/{steps}  {_figures(line)}") if due(line) else None


def _figures(line: Line) -> str:
    return figures(line.loss, line.grad_norm, line.tokens_per_s, line.memory)


def _farewell(ready: Prepared, module: torch.nn.Module, ended: Ended, console: Console) -> None:
    run, job = ready.plan.run, ready.plan.job
    if str(ended.replay):
        console.print(f"[{'green' if ended.replay.differs is None else 'red'}]{ended.replay}[/]")
    loss = "" if ended.loss is None else f", loss {ended.loss:.4f}"
    console.print(f"{'stopped' if ended.stopped else 'done'} at step {ended.step}{loss}")
    if run.sample_tokens and isinstance(ready.data, TextData) and not ended.stopped:
        text = sample_text(module, run.sample_prompt, run.sample_tokens, job.data.sequence, job.train.seed)
        console.rule("a sample")
        console.print(text, markup=False)
        console.rule()
    folder = Path(run.folder)
    console.print(
        f"plan        {folder / 'plan.toml'}\nmetrics     {folder / 'metrics.jsonl'}\ncheckpoint  {ended.checkpoint}",
        soft_wrap=True,
    )


def _exact(request: Request, world: int | None, *, shrink: bool) -> Prepared:
    job = shrunk(request.job) if shrink else request.job
    return prepared(replace(request, job=exact_job(job), extra={}), world)


def _case(ready: Prepared) -> Case:
    """The prepared plan, and the same job on one device, on the CPU."""
    one_device = make_plan(ready.reading, ready.plan.job, Mesh(), (), 0, ready.plan.run)
    return Case(
        plan=ready.plan,
        alone=one_device,
        loss=ready.loss,
        make_subject=lambda: make_subject(ready.reading, torch.device("cpu"), torch.float64),
        make_dice=lambda: make_dice(ready.reading, ready.plan),
        rows=lambda plan, rank: ready.feed(plan, rank).batch,
    )


def _report_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _read_report(folder: Path, rank: int) -> RankReport:
    return TypeAdapter(RankReport).validate_json(_report_path(folder, rank).read_bytes())


def _versions() -> dict[str, str]:
    return {"meshwright": meshwright.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
