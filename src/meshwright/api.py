"""The way in from Python: the user's own loop round a plan.

    reading = read(my_factory, example=batch)                    what the model is made of
    plan    = make_plan(reading, job, mesh)                      what will happen
    verdict = verify(reading, plan, [batch])                     whether it equals one device
    engine  = build(reading, plan)                               one rank of it
    metrics = engine.step(engine.share(batch))

The command line goes through the same functions; `meshwright.resolve` turns a config file into what they need.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.comm.backends.threads import alone
from meshwright.comm.collectives.group import World
from meshwright.comm.world import TorchWorld
from meshwright.engine.optim.optimizers import MakeOptimizer
from meshwright.engine.runtime.cpu_allocator import keep_heap
from meshwright.engine.runtime.loss import Batch, Loss, check_loss, judge_of, token_cross_entropy
from meshwright.engine.runtime.mixed_precision import refuse_unable
from meshwright.engine.runtime.state import State, Subject
from meshwright.engine.step.executor import Player
from meshwright.model.analysis.analyze import Reading
from meshwright.model.analysis.analyze import read as read_model
from meshwright.model.analysis.pipeline_trial import bordered, courses_of
from meshwright.model.analysis.plan_checks import completed, refuse_model
from meshwright.model.loading.loader import Model, load_factory, with_weights
from meshwright.model.rng.sites import Dice
from meshwright.model.tensors.float64_mode import widened
from meshwright.model.tensors.lazy_tensors import OnDemand
from meshwright.oom_advice import Telling
from meshwright.parallel.context.ring import Ring
from meshwright.parallel.data.batch_split import Batch as SplitBatch
from meshwright.parallel.data.ddp import Replicate
from meshwright.parallel.data.zero import Zero
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.tensor.megatron_1d import Line
from meshwright.parallel.tensor.vocab_parallel import Vocabulary, divisible
from meshwright.plan.job.errors import PlanError, raise_faults
from meshwright.plan.job.job import Job
from meshwright.plan.job.run_options import Run
from meshwright.plan.model_spec.model_spec import Anatomy
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy import Strategy
from meshwright.run.training.engine import Engine, share
from meshwright.testing.ranks import on_threads
from meshwright.verifier.parity import alone_job, compare_rank, exact_job, judge
from meshwright.verifier.reference import Case, run_reference
from meshwright.verifier.static_checks import prove
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
    chosen = default_strategies(mesh, reading.anatomy) if strategies is None else tuple(strategies)
    anatomy = seen_by(reading, job, mesh, chosen)
    plan = Plan.make(job, mesh, anatomy, chosen, micro_batch, run)
    refuse_model(plan, reading)
    return plan


def seen_by(reading: Reading, job: Job, mesh: Mesh, strategies: Iterable[Strategy]) -> Anatomy:
    """The anatomy of the model, with what is learnt only where somebody needs it.

    That is what crosses the borders of parts that the mesh puts on ranks of their own, for strategies that ask, what the model
    does with tokens, and what it holds in the job's dtypes; in float64, in which nobody trains, an estimate stands for that.
    """
    dtype, compute = (getattr(torch, each) for each in (job.precision.parameters, job.precision.compute))
    anatomy = bordered(reading, dtype, compute, dealt=mesh.cp > 1).anatomy if mesh.pp > 1 else reading.anatomy
    anatomy = replace(anatomy, tokens=reading.tokens) if any(each.by_token for each in strategies) else anatomy
    return anatomy if dtype == torch.float64 else replace(anatomy, weighed=reading.weighed(dtype, compute))


def default_strategies(mesh: Mesh, anatomy: Anatomy) -> tuple[Strategy, ...]:
    """What a mesh gets when nothing is asked for: the batch split along the data axes, whole copies of the weights along
    dp_replicate, and shards of all that is kept along dp_shard; matrices divided along tp, and, where the model of `anatomy`
    allows it, the vocabulary; runs of layers along pp; the tokens of each sample in a ring along cp.
    """
    pairs: tuple[Strategy, ...] = (Pipeline(),) if mesh.pp > 1 else ()
    pairs += (Line(),) if mesh.tp > 1 else ()
    pairs += (Vocabulary(),) if mesh.tp > 1 and divisible(anatomy, mesh.tp) else ()
    pairs += (Ring(),) if mesh.cp > 1 else ()
    if mesh.dp_shard == mesh.dp_replicate == 1:
        return (*pairs, Replicate(axis="cp")) if mesh.cp > 1 else pairs
    if mesh.dp_shard == 1:
        return (*pairs, SplitBatch(), Replicate())
    split = SplitBatch(axis="dp_shard")
    return (*pairs, SplitBatch(), split, Zero(across="dp_replicate")) if mesh.dp_replicate > 1 else (*pairs, split, Zero())


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
    if reading.anatomy != replace(plan.anatomy, borders=None, tokens=None, weighed=None):
        text = f"the plan is for '{plan.anatomy.name}' and the model is '{reading.anatomy.name}', with other blocks or parameters"
        raise PlanError(text, fix="make the plan again from this model", where="build")
    check_loss(plan, loss)
    world = world or _joined_world(plan.mesh)
    if world.mesh != plan.mesh:
        text = f"the plan is for {plan.mesh} ({plan.mesh.world} ranks) and the world is {world.mesh} ({world.mesh.world})"
        raise PlanError(text, fix=f"start {plan.mesh.world} ranks, or make a plan for this world", where="build")
    refuse_unable(plan.job.precision, world.device)
    if world.device.type == "cpu":
        keep_heap()
    with Telling(reading, plan, world.rank, world.device) as telling:
        subject = make_subject(reading, world.device, getattr(torch, plan.job.precision.parameters), plan=plan)
        telling.player = Player(plan, State(subject, world, loss), optimizer, make_dice(reading, plan))
    return Engine(plan, telling.player, world, reading, telling)


def make_subject(
    reading: Reading, device: torch.device, dtype: torch.dtype, fake: FakeTensorMode | None = None, plan: Plan | None = None
) -> Subject:
    """The model with initial values on `device`, as the engine holds it; with `fake`, of that mode's tensors instead.

    With `plan`, what that keeps in arenas or cuts has no memory yet and no values: who keeps a part never holds the whole.
    What has a master begins from its value before rounding.
    """
    blank: set[str] = set()
    masters, master = set(), dtype
    if plan is not None and fake is None:
        blank = {name for arena in plan.space.arenas().values() for name, _, _ in arena.weights}
        blank |= {home.weight.name for home in plan.space.homes if home.cut}
        master = getattr(torch, plan.job.precision.resolved.master)
        masters = {weight.name for weight in plan.anatomy.trainable} if master != dtype else set()
    module, blocks, parameters = reading.make(device, dtype, fake, blank)
    stand_in = _wide(reading.example) if dtype == torch.float64 else reading.example

    def value(name: str, rows: range | None = None) -> torch.Tensor:
        return reading.blueprint.value(name, master, device, rows)

    values = OnDemand(blank | masters, value, value)
    return Subject(module, blocks, parameters, reading.anatomy, stand_in, values, courses_of(reading, dtype), reading.alike)


def make_dice(reading: Reading, plan: Plan) -> Dice | None:
    """The stateless dropout of this model; None when its training draws nothing."""
    return Dice(plan.job.train.seed, reading.sites) if reading.anatomy.random else None


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
    job = exact_job(plan.job)
    made = job, plan.mesh, seen_by(reading, job, plan.mesh, plan.strategies), plan.strategies, plan.micro_batch, plan.run
    exact = Plan.make(*made, cut_for=plan.job.optimizer)  # SGD, in shards as the plan's own optimizer has them
    one_device = make_plan(reading, alone_job(exact.job), Mesh(), (), 0, plan.run)
    raise_faults(prove(exact))

    def wide_rows(plan: Plan, rank: int) -> Callable[[int], Batch | None]:
        mine = rows(plan, rank)
        return lambda step: None if (batch := mine(step)) is None else _wide(batch)

    def wide_subject() -> Subject:
        return make_subject(reading, torch.device("cpu"), torch.float64)

    def on(batch: Batch) -> Plan:
        narrow = {key: batch[key].to(value.dtype) for key, value in reading.example.items() if key in batch}
        there = reading.on(narrow)
        same = (there.anatomy.visits, there.anatomy.weights) == (reading.anatomy.visits, reading.anatomy.weights)
        return exact.of_anatomy(seen_by(there, job, plan.mesh, plan.strategies)) if same else exact

    loss = loss.within(widened)
    return Case(exact, one_device, loss, wide_subject, lambda: make_dice(reading, exact), wide_rows, on)


def _wide(batch: Batch) -> dict[str, torch.Tensor]:
    """`batch` with its floating inputs in float64, as the parameters are in a comparison."""
    return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


def _joined_world(mesh: Mesh) -> World:
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        device = torch.device("cuda", rank % torch.cuda.device_count()) if dist.get_backend() == "nccl" else torch.device("cpu")
        return TorchWorld(mesh, rank, device)
    return alone(torch.device("cpu"))
