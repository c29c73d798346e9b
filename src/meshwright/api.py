"""The way in from Python: the user's own loop round a plan.

    reading = read(my_factory, example=batch)                    what the model is made of
    plan    = make_plan(reading, job, mesh)                      what will happen
    verdict = verify(reading, plan, [batch])                     whether it equals one device
    engine  = build(reading, plan)                               one rank of it
    metrics = engine.step(engine.share(batch))

The command line goes through the same functions; `meshwright.prepare` turns a config file into what they need.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.comm.distributed import TorchWorld
from meshwright.comm.group import World
from meshwright.comm.threads import alone
from meshwright.core.errors import PlanError, raise_faults
from meshwright.core.job import Job
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.run import Run
from meshwright.core.strategy import Strategy
from meshwright.engine.evaluation import Evaluation
from meshwright.engine.loss import Batch, Loss, check_loss, judge_of, token_cross_entropy
from meshwright.engine.optimizers import MakeOptimizer
from meshwright.engine.player import Player
from meshwright.engine.state import Metrics, State, Subject
from meshwright.model.blueprint import Blueprint
from meshwright.model.dice import Dice
from meshwright.model.given import completed
from meshwright.model.norms import split_faults
from meshwright.model.reading import Reading
from meshwright.model.reading import read as read_model
from meshwright.model.sources import Model, load_factory, with_weights
from meshwright.model.wide import widened
from meshwright.run.checkpoint import load
from meshwright.run.export import Exported, Trained, export
from meshwright.run.resume import check_model
from meshwright.run.shards import read_manifest
from meshwright.run.train import save_held
from meshwright.strategies.data.batch import Batch as SplitBatch
from meshwright.strategies.data.replicate import Replicate
from meshwright.testing.spawn import on_threads
from meshwright.verifier.parity import alone_job, compare_rank, exact_job, judge
from meshwright.verifier.reference import Case, run_reference
from meshwright.verifier.static import prove
from meshwright.verifier.trace import STEPS, Traced, few_ranks
from meshwright.verifier.trace import trace as trace_ranks
from meshwright.verifier.verdict import Verdict

Given = nn.Module | Model | Reading | Callable[[], nn.Module | Model]


def read(model: Given, example: Batch, *, loss: Loss | None = None, seed: int = 0, weights: str = "") -> Reading:
    """What `model` is made of, learnt from a trial on fake tensors shaped like `example` (a batch with its targets).

    A factory is called without holding its parameters, and initial values come from `seed`; an `nn.Module` is copied
    with the values it has, and left alone. Values stored in `weights`, a folder or a safetensors file, win over both.
    """
    if isinstance(model, Reading):
        return model
    name = type(model).__name__ if isinstance(model, nn.Module) else "model"
    factory = (lambda: copy.deepcopy(model)) if isinstance(model, (nn.Module, Model)) else model
    loss, loaded = loss or token_cross_entropy(), load_factory(factory, seed, name)
    loaded = with_weights(loaded, Path(weights)) if weights else loaded
    return read_model(loaded, example, loss.targets, judge_of(loss))


def make_plan(
    reading: Reading,
    job: Job,
    mesh: Mesh | None = None,
    strategies: Iterable[Strategy] | None = None,
    micro_batch: int = 0,
    run: Run | None = None,
) -> Plan:
    """The plan for this model, job and mesh; without `strategies`, data parallelism on the data axes.

    A `job` need not name a model and data that are handed over. Raises PlanError with every fault.
    """
    mesh, job = mesh or Mesh(), completed(job, reading.anatomy)
    chosen = default_strategies(mesh) if strategies is None else strategies
    plan = Plan.make(job, mesh, reading.anatomy, chosen, micro_batch, run)
    raise_faults(split_faults(plan, reading.blueprint.instance()))
    return plan


def default_strategies(mesh: Mesh) -> tuple[Strategy, ...]:
    """What a mesh gets when nothing is asked for: the batch split and the weights replicated along dp_replicate."""
    return (SplitBatch(), Replicate()) if mesh.dp_replicate > 1 else ()


def build(
    model: Given,
    plan: Plan,
    *,
    optimizer: MakeOptimizer | None = None,
    loss: Loss | None = None,
    world: World | None = None,
    example: Mapping[str, torch.Tensor] | None = None,
) -> "Engine":
    """One rank of `plan`, ready to step.

    Args:
        optimizer: makes a torch optimizer from parameter groups, or several that share them; without it, what the job
            names. The groups carry the job's learning rate and weight decay, which win over arguments of the optimizer.
        loss: a sum and a count (`Loss`); without it, cross-entropy over tokens.
        world: this rank's place; without it, torch.distributed if it is initialised, else one device.
        example: a batch, needed unless `model` is a `Reading`.
    """
    loss = loss or token_cross_entropy()
    if not isinstance(model, Reading) and example is None:
        raise PlanError(
            "build got a model and no example batch", fix="pass example=batch, or the Reading that made the plan", where="build"
        )
    reading = read(model, example or {}, loss=loss, seed=plan.job.train.seed)
    if reading.anatomy != plan.anatomy:
        text = f"the plan is for '{plan.anatomy.name}' and the model is '{reading.anatomy.name}', with other blocks or parameters"
        raise PlanError(text, fix="make the plan again from this model", where="build")
    check_loss(plan, loss)
    world = world or _joined_world(plan.mesh)
    if world.mesh != plan.mesh:
        text = f"the plan is for {plan.mesh} ({plan.mesh.world} ranks) and the world is {world.mesh} ({world.mesh.world})"
        raise PlanError(text, fix=f"start {plan.mesh.world} ranks, or make a plan for this world", where="build")
    subject = make_subject(reading, world.device, getattr(torch, plan.job.precision.parameters))
    return Engine(plan, Player(plan, State(subject, world, loss), optimizer, make_dice(reading, plan)), world, reading.blueprint)


def make_subject(reading: Reading, device: torch.device, dtype: torch.dtype, fake: FakeTensorMode | None = None) -> Subject:
    """The model with initial values on `device`, as the engine holds it; with `fake`, of that mode's tensors instead."""
    module, blocks, parameters = reading.make(device, dtype, fake)
    stand_in = _wide(reading.example) if dtype == torch.float64 else reading.example
    return Subject(module, blocks, parameters, reading.anatomy, stand_in)


def make_dice(reading: Reading, plan: Plan) -> Dice | None:
    """The stateless dropout of this model; None when its training draws nothing."""
    return Dice(plan.job.train.seed, reading.sites) if reading.anatomy.random else None


class Engine:
    """One rank of a plan with the user's own loop around it."""

    def __init__(self, plan: Plan, player: Player, world: World, blueprint: Blueprint) -> None:
        self.plan, self.player, self.world, self._blueprint = plan, player, world, blueprint

    @property
    def module(self) -> nn.Module:
        """The model that is trained, on this rank."""
        return self.player.state.subject.module

    @property
    def steps_done(self) -> int:
        """Global steps taken so far, those before a resume included."""
        return self.player.steps_done

    def step(self, batch: Batch | None, *, stop: bool = False) -> Metrics:
        """Train one global step on this rank's rows (see `share`); every rank gets the same metrics back."""
        ledger = self.world.ledger
        ledger.phase, ledger.step = "first_step" if ledger.step is None else "step", self.steps_done + 1
        return self.player.step(batch, stop=stop)

    def evaluate(self, batches: Iterable[Batch | None]) -> Evaluation:
        """The loss over `batches`, exact over all ranks, each of which calls this with its own rows (see `share`).

        In eval mode and without gradients; parameters, buffers, modes and random streams are untouched.
        """
        return self.player.evaluate(batches)

    def share(self, batch: Batch) -> dict[str, torch.Tensor]:
        """This rank's rows of a global batch, micro-batch after micro-batch; fewer when the batch is short."""
        return share(batch, self.plan, self.world.rank)

    def save(self, folder: Path | str) -> Path:
        """Save a checkpoint of this step into `folder` (all ranks call it); returns its own folder."""
        meta = {"plan_hash": self.plan.hash, "torch": torch.__version__}
        return save_held(Path(folder), self.player, meta, self.world)

    def export(self, folder: Path | str, dtype: torch.dtype | None = None) -> Exported | None:
        """Write the model as a folder that transformers loads and compare it; nothing stays unless `round_trip.passed`.

        Rank 0 does; others return None. Floating weights are stored in `dtype`, or as they are.
        """
        return None if self.world.rank else export(Trained.saved(self._blueprint, self.player.tensors()), Path(folder), dtype)

    def load(self, checkpoint: Path | str) -> int:
        """Take up the checkpoint in the folder that `save` returned, saved under this or another plan; returns its step.

        Raises CheckpointError for one that is damaged or of another model.
        """
        path = Path(checkpoint)
        manifest = read_manifest(path)
        check_model(manifest, self.player, path)
        self.player.restore(load(path)[0], manifest.step)
        return self.steps_done

    def close(self) -> None:
        """Give the module its own forwards back."""
        self.player.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def share(batch: Batch, plan: Plan, rank: int) -> dict[str, torch.Tensor]:
    """The rows of a global batch that `rank` plays under `plan`, micro-batch after micro-batch.

    Raises PlanError when the batch has more rows than the plan's global batch: they would be left out.
    """
    num_rows = len(next(iter(batch.values())))
    if num_rows > plan.job.train.batch:
        text = f"a batch of {num_rows} rows; the plan's global batch is {plan.job.train.batch}"
        raise PlanError(text, fix="pass at most that many rows, or make a plan with this train.batch", where="batch")
    rows = [row for row in plan.rows_read(rank) if row < num_rows]
    if len(rows) == num_rows:
        return dict(batch)
    first = rows[0] if rows else 0
    if not rows or rows[-1] - first + 1 == len(rows):  # one stretch: views, no copy
        return {key: value[first : first + len(rows)] for key, value in batch.items()}
    return {key: value[rows] for key, value in batch.items()}


def verify(reading: Reading, plan: Plan, batches: Sequence[Batch], *, loss: Loss | None = None) -> Verdict:
    """Whether `plan` computes what one device computes on `batches`, global ones, one per step.

    All ranks are threads of this process; the comparison runs in float64 with plain SGD, whatever the plan's own optimizer.
    """
    case = parity_case(
        reading, plan, loss or token_cross_entropy(), lambda plan, rank: lambda step: share(batches[step], plan, rank)
    )
    reference = run_reference(case, len(batches))
    reports = on_threads(lambda world: compare_rank(case, world, reference), plan.mesh, timeout_s=600)
    return replace(judge(case, reports, "threads", {"torch": torch.__version__}), plan=plan.hash)


def trace(
    reading: Reading,
    plan: Plan,
    ranks: Iterable[int] | None = None,
    *,
    loss: Loss | None = None,
    steps: int = STEPS,
    fake: bool = True,
) -> Traced:
    """Whether `ranks` of `plan` issue the collectives that its program states; the mesh may be larger than any machine.

    Without `ranks`: the first, the last and one between. They are played on `fake` tensors, or on real ones, the model
    whole on the CPU. Raises NeedsValues (a PlanError) when fake tensors cannot play the model.
    """
    dtype, loss = getattr(torch, plan.job.precision.parameters), loss or token_cross_entropy()
    played, cpu = few_ranks(plan) if ranks is None else ranks, torch.device("cpu")
    found = trace_ranks(plan, played, loss, lambda mode: make_subject(reading, cpu, dtype, mode), steps, fake=fake)
    return replace(found, versions={"torch": torch.__version__})


def parity_case(reading: Reading, plan: Plan, loss: Loss, rows: Callable[[Plan, int], Callable[[int], Batch | None]]) -> Case:
    """`plan` as parity runs it, and the same job on one device, both on the CPU; `rows` gives each rank its data."""
    check_loss(plan, loss)
    exact = make_plan(reading, exact_job(plan.job), plan.mesh, plan.strategies, plan.micro_batch, plan.run)
    one_device = make_plan(reading, alone_job(exact.job), Mesh(), (), 0, plan.run)
    raise_faults(prove(exact))

    def wide_rows(plan: Plan, rank: int) -> Callable[[int], Batch | None]:
        mine = rows(plan, rank)
        return lambda step: None if (batch := mine(step)) is None else _wide(batch)

    def wide_subject() -> Subject:
        return make_subject(reading, torch.device("cpu"), torch.float64)

    loss = replace(loss, total=widened(loss.total))
    return Case(exact, one_device, loss, wide_subject, lambda: make_dice(reading, exact), wide_rows)


def _wide(batch: Batch) -> dict[str, torch.Tensor]:
    """`batch` with its floating inputs in float64, as the parameters are in a comparison."""
    return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


def _joined_world(mesh: Mesh) -> World:
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        device = torch.device("cuda", rank % torch.cuda.device_count()) if dist.get_backend() == "nccl" else torch.device("cpu")
        return TorchWorld(mesh, rank, device)
    return alone(torch.device("cpu"))
