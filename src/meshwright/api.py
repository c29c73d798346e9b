"""The composition root: the only module that sees every organ, and the way in from Python.

    reading = read(my_factory, example=batch)                    what the model is made of
    plan    = make_plan(reading, job, mesh)                      what will happen
    engine  = build(reading, plan)                               one rank of it
    metrics = engine.step(engine.share(batch))

The command line goes through the same functions: `prepare` turns a config file into a plan, a model and data.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import nn

from meshwright.comm.distributed import TorchWorld
from meshwright.comm.group import World
from meshwright.comm.threads import ThreadHub, ThreadWorld
from meshwright.core.errors import Fault, PlanError, raise_faults
from meshwright.core.job import Job, Run
from meshwright.core.mesh import AXES, Mesh
from meshwright.core.plan import Plan
from meshwright.core.strategy import Strategy
from meshwright.engine.loss import Batch, Loss, token_cross_entropy
from meshwright.engine.optimizers import MakeOptimizer
from meshwright.engine.player import Player
from meshwright.engine.state import Metrics, State, Subject
from meshwright.model.dice import Dice
from meshwright.model.reading import Reading
from meshwright.model.reading import read as read_model
from meshwright.model.sources import Model, load_factory, load_model
from meshwright.run.checkpoint import load, save
from meshwright.run.config import Request, read_request
from meshwright.run.feed import Data, Feed, open_data, open_feed
from meshwright.strategies import STRATEGIES
from meshwright.strategies.data.batch import Batch as SplitBatch
from meshwright.strategies.data.replicate import Replicate

Given = nn.Module | Model | Reading | Callable[[], nn.Module | Model]


@dataclass(frozen=True)
class Prepared:
    """A request made ready: its plan, the model behind it, its data and its loss."""

    plan: Plan
    reading: Reading
    data: Data
    loss: Loss

    def feed(self, plan: Plan, rank: int) -> Feed:
        """The rows of `rank` under `plan` (this one, or the same job on another mesh)."""
        return open_feed(self.data, plan, rank)

    def engine(self, world: World) -> "Engine":
        """One rank of the plan."""
        return build(self.reading, self.plan, loss=self.loss, world=world)


def prepare(path: Path, overrides: Iterable[str] = (), world: int | None = None) -> Prepared:
    """The plan that the file at `path` asks for, with its model and data; `world` is the number of ranks if known.

    Raises PlanError with every fault that can be found before a process starts.
    """
    return prepared(read_request(path, tuple(overrides), STRATEGIES), world)


def prepared(request: Request, world: int | None = None) -> Prepared:
    """`request` made ready. Faults of the job, the mesh and the data are reported together."""
    faults = [*request.job.faults(), *request.run.faults()]
    mesh, loaded, data = Mesh(), None, None
    try:
        mesh = Mesh.infer(request.mesh, world if world is not None or -1 in request.mesh.values() else None)
    except PlanError as error:
        faults += error.faults
    try:
        loaded = load_model(request.job.model, request.job.train.seed) if request.job.model.source else None
    except PlanError as error:
        faults += error.faults
    try:
        if loaded is not None and request.job.data.source and request.job.data.sequence > 0:
            data = open_data(request.job.data, loaded.example)
    except PlanError as error:
        faults += error.faults
    raise_faults(dict.fromkeys(faults))
    if loaded is None or data is None:
        raise RuntimeError("a model and data were neither found nor refused; this is a bug: report the config file")
    loss = loss_of(loaded.loss)
    reading = read_model(loaded, loaded.example or data.batch([0]), loss.targets)
    strategies = default_strategies(mesh) if request.strategies is None else request.strategies
    plan = make_plan(reading, request.job, mesh, strategies, request.micro_batch, request.run)
    return Prepared(plan, reading, data, loss)


def read(model: Given, example: Mapping[str, torch.Tensor], *, loss: Loss | None = None, seed: int = 0) -> Reading:
    """What `model` is made of, learnt from a trial on fake tensors shaped like `example` (a batch with its targets).

    A factory is called without holding its parameters, and initial values come from `seed`; an `nn.Module` is copied
    with the values it has, and left alone.
    """
    if isinstance(model, Reading):
        return model
    name = type(model).__name__ if isinstance(model, nn.Module) else "model"
    factory = (lambda: copy.deepcopy(model)) if isinstance(model, (nn.Module, Model)) else model
    return read_model(load_factory(factory, seed, name), example, (loss or token_cross_entropy()).targets)


def make_plan(
    reading: Reading,
    job: Job,
    mesh: Mesh | None = None,
    strategies: Iterable[Strategy] | None = None,
    micro_batch: int = 0,
    run: Run | None = None,
) -> Plan:
    """The plan for this model, job and mesh; without `strategies`, data parallelism on the data axes.

    Raises PlanError with every fault.
    """
    mesh = mesh or Mesh()
    chosen = default_strategies(mesh) if strategies is None else tuple(strategies)
    plan = Plan.make(job, mesh, reading.anatomy, chosen, micro_batch, run)
    raise_faults(_split_faults(plan, reading))
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
        optimizer: makes a torch optimizer from parameter groups; without it, the one that the job names.
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
    world = world or _joined_world(plan.mesh)
    if world.mesh != plan.mesh:
        text = f"the plan is for {plan.mesh} ({plan.mesh.world} ranks) and the world is {world.mesh} ({world.mesh.world})"
        raise PlanError(text, fix=f"start {plan.mesh.world} ranks, or make a plan for this world", where="build")
    subject = make_subject(reading, world.device, getattr(torch, plan.job.precision.parameters))
    return Engine(plan, Player(plan, State(subject, world, loss), optimizer, make_dice(reading, plan)), world)


def make_subject(reading: Reading, device: torch.device, dtype: torch.dtype) -> Subject:
    """The model with initial values on `device`, as the engine holds it."""
    module, blocks, parameters = reading.make(device, dtype)
    return Subject(module, blocks, parameters, reading.anatomy, reading.example)


def make_dice(reading: Reading, plan: Plan) -> Dice | None:
    """The stateless dropout of this model; None when its training draws nothing."""
    return Dice(plan.job.train.seed, reading.sites) if reading.anatomy.random else None


class Engine:
    """One rank of a plan with the user's own loop around it."""

    def __init__(self, plan: Plan, player: Player, world: World) -> None:
        self.plan, self.player, self.world = plan, player, world

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
        return self.player.step(batch, stop=stop)

    def share(self, batch: Batch) -> dict[str, torch.Tensor]:
        """This rank's rows of a global batch, micro-batch after micro-batch; fewer when the batch is short."""
        plan, num_rows = self.plan, len(next(iter(batch.values())))
        index, size = plan.data_index(self.world.rank), plan.micro_batch
        starts = [(micro * plan.num_data + index) * size for micro in range(plan.num_micro)]
        rows = [row for start in starts for row in range(start, min(start + size, num_rows))]
        return {key: value[rows] for key, value in batch.items()}

    def save(self, folder: Path | str) -> Path:
        """Save a checkpoint of this step into `folder` (all ranks call it); returns its own folder."""
        meta = {"plan_hash": self.plan.hash, "torch": torch.__version__}
        return save(
            Path(folder),
            self.steps_done,
            self.player.tensors(),
            meta,
            self.world.group(AXES),
            self.plan.run.keep,
            self.world.device,
        )

    def load(self, checkpoint: Path | str) -> int:
        """Take up the checkpoint in the folder that `save` returned, saved under this or another plan; returns its step."""
        tensors, _ = load(Path(checkpoint))
        wanted = {name: tuple(t.shape) for name, t in self.player.tensors().items() if not name.startswith("optimizer/")}
        wrong = sorted(name for name, shape in wanted.items() if name not in tensors or tuple(tensors[name].shape) != shape)
        if wrong:
            text = f"{len(wrong)} tensors are missing or have another shape in the checkpoint: {', '.join(wrong[:5])}"
            raise PlanError(text, fix="load it into the model that saved it", where=str(checkpoint))
        self.player.restore(tensors, int(Path(checkpoint).name.removeprefix("step-")))
        return self.steps_done

    def close(self) -> None:
        """Give the module its own forwards back."""
        self.player.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def at_mesh(plan: Plan, mesh: Mesh, reading: Reading) -> Plan:
    """The same job on another mesh, with the strategies that its axes still need."""
    kept = tuple(s for s in plan.strategies if mesh.size(vars(s).get("axis", "tp")) > 1)
    return make_plan(reading, plan.job, mesh, kept, 0, plan.run)


def loss_of(given: object) -> Loss:
    """The loss that a factory gave; cross-entropy over tokens when it gave none. Raises PlanError for anything else."""
    if given is None:
        return token_cross_entropy()
    if not isinstance(given, Loss):
        fix = "return meshwright.Loss(total=..., count=...): a sum over what counts, and how much counts"
        raise PlanError(f"the loss of the model is a {type(given).__name__}", fix=fix, where="model.loss")
    return given


def _joined_world(mesh: Mesh) -> World:
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        device = torch.device("cuda", rank % torch.cuda.device_count()) if dist.get_backend() == "nccl" else torch.device("cpu")
        return TorchWorld(mesh, rank, device)
    return alone(torch.device("cpu"))


def alone(device: torch.device) -> World:
    """The world of one rank that has no peers, on `device`."""
    return ThreadWorld(ThreadHub(Mesh()), 0, device)


def _split_faults(plan: Plan, reading: Reading) -> Iterable[Fault]:
    if plan.num_data == 1 and plan.num_micro == 1:
        return
    module = reading.blueprint.instance()
    norms = [name for name, inner in module.named_modules() if isinstance(inner, nn.modules.batchnorm._BatchNorm)]
    if norms:
        text = f"{len(norms)} batch norms ({norms[0]}...) would take their statistics from a part of the global batch"
        yield Fault(text, "use group or layer norm, or train on one device with micro_batch = 0", "model")
