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
from meshwright.engine.optim.optimizers import OptimizerFactory
from meshwright.engine.runtime.cpu_allocator import retain_heap
from meshwright.engine.runtime.loss import Batch, Loss, check_loss, make_loss_spec, token_cross_entropy
from meshwright.engine.runtime.mixed_precision import check_dtype_support
from meshwright.engine.runtime.state import RankState, TrainedModule
from meshwright.engine.step.executor import Executor
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.analysis.analyze import analyze as read_model
from meshwright.model.analysis.pipeline_trial import add_stage_boundaries, get_forward_graphs
from meshwright.model.analysis.plan_checks import check_plan_for_model, complete_job
from meshwright.model.loading.loader import Model, load_factory, with_weights
from meshwright.model.rng.sites import StatelessRNG
from meshwright.model.tensors.float64_mode import in_float64
from meshwright.model.tensors.lazy_tensors import LazyTensors
from meshwright.oom_advice import OOMAdvisor
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.batch_split import BatchSplit as SplitBatch
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel, can_shard_vocab
from meshwright.plan.job.errors import PlanError, raise_diagnostics
from meshwright.plan.job.job import Job
from meshwright.plan.job.run_options import RunConfig
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy import Strategy
from meshwright.run.training.engine import Trainer, select_local_batch
from meshwright.testing.ranks import on_threads
from meshwright.verifier.parity import compare_rank, make_verdict, parity_job, single_device_job
from meshwright.verifier.reference import ParityCase, run_reference
from meshwright.verifier.static_checks import static_checks
from meshwright.verifier.trace import DEFAULT_NUM_STEPS, TraceVerdict, sample_ranks
from meshwright.verifier.trace import trace as trace_ranks
from meshwright.verifier.verdict import Verdict

ModelInput = nn.Module | Model | AnalyzedModel | Callable[[], nn.Module | Model]


def analyze(
    model: ModelInput, example_batch: Batch, *, loss: Loss | None = None, seed: int = 0, weights: str = ""
) -> AnalyzedModel:
    """What `model` is made of, learnt from a trial on fake tensors shaped like `example` (a batch with its targets).

    A factory is called without holding its parameters, and initial values come from `seed`; an `nn.Module` is copied
    with the values it has, and left alone. Values stored in `weights`, a folder or a safetensors file, win over both.
    """
    if isinstance(model, AnalyzedModel):
        return model
    name = type(model).__name__ if isinstance(model, nn.Module) else "model"
    factory = (lambda: copy.deepcopy(model)) if isinstance(model, (nn.Module, Model)) else model
    loss, loaded = loss or token_cross_entropy(), load_factory(factory, seed, name)
    loaded = with_weights(loaded, Path(weights)) if weights else loaded
    return read_model(loaded, example_batch, loss.targets, make_loss_spec(loss))


def make_plan(
    analyzed: AnalyzedModel,
    job: Job,
    mesh: Mesh | None = None,
    strategies: Iterable[Strategy] | None = None,
    micro_batch: int = 0,
    run: RunConfig | None = None,
) -> Plan:
    """The plan for this model, job and mesh; without `strategies`, data parallelism on the data axes.

    A `job` need not name a model and data that are handed over. Raises PlanError with every fault.
    """
    mesh, job = mesh or Mesh(), complete_job(job, analyzed.model_spec)
    chosen = default_strategies(mesh, analyzed.model_spec) if strategies is None else tuple(strategies)
    anatomy = model_spec_for(analyzed, job, mesh, chosen)
    plan = Plan.make(job, mesh, anatomy, chosen, micro_batch, run)
    check_plan_for_model(plan, analyzed)
    return plan


def model_spec_for(
    analyzed: AnalyzedModel, job: Job, mesh: Mesh, strategies: Iterable[Strategy]
) -> ModelSpec:
    """The anatomy of the model, with what is learnt only where somebody needs it.

    That is what crosses the borders of parts that the mesh puts on ranks of their own, for strategies that ask, what the model
    does with tokens, and what it holds in the job's dtypes; in float64, in which nobody trains, an estimate stands for that.
    """
    dtype, compute = (getattr(torch, each) for each in (job.precision.parameters, job.precision.compute))
    anatomy = (
        add_stage_boundaries(analyzed, dtype, compute, sequence_sharded=mesh.cp > 1).model_spec
        if mesh.pp > 1
        else analyzed.model_spec
    )
    anatomy = (
        replace(anatomy, sequence_info=analyzed.sequence_info)
        if any(each.needs_sequence_info for each in strategies)
        else anatomy
    )
    return (
        anatomy
        if dtype == torch.float64
        else replace(anatomy, memory=analyzed.measure_memory(dtype, compute))
    )


def default_strategies(mesh: Mesh, model_spec: ModelSpec) -> tuple[Strategy, ...]:
    """What a mesh gets when nothing is asked for: the batch split along the data axes, whole copies of the weights along
    dp_replicate, and shards of all that is kept along dp_shard; matrices divided along tp, and, where the model of `anatomy`
    allows it, the vocabulary; runs of layers along pp; the tokens of each sample in a ring along cp.
    """
    pairs: tuple[Strategy, ...] = (Pipeline(),) if mesh.pp > 1 else ()
    pairs += (TensorParallel(),) if mesh.tp > 1 else ()
    pairs += (VocabParallel(),) if mesh.tp > 1 and can_shard_vocab(model_spec, mesh.tp) else ()
    pairs += (RingAttention(),) if mesh.cp > 1 else ()
    if mesh.dp_shard == mesh.dp_replicate == 1:
        return (*pairs, DDP(axis="cp")) if mesh.cp > 1 else pairs
    if mesh.dp_shard == 1:
        return (*pairs, SplitBatch(), DDP())
    split = SplitBatch(axis="dp_shard")
    return (
        (*pairs, SplitBatch(), split, ZeRO(replicate_axis="dp_replicate"))
        if mesh.dp_replicate > 1
        else (*pairs, split, ZeRO())
    )


def parallelize(
    model: ModelInput,
    plan: Plan,
    *,
    optimizer: OptimizerFactory | None = None,
    loss: Loss | None = None,
    world: World | None = None,
    example: Mapping[str, torch.Tensor] | None = None,
) -> "Trainer":
    """One rank of `plan`, ready to step.

    Args:
        optimizer: makes a torch optimizer from parameter groups, or several that share them; without it, what the job
            names. The groups carry the job's learning rate and weight decay, which win over arguments of the optimizer.
        loss: a sum and a count (`Loss`); without it, cross-entropy over tokens.
        world: this rank's place; without it, torch.distributed if it is initialised, else one device.
        example: a batch, needed unless `model` is a `Reading`.
    """
    loss = loss or token_cross_entropy()
    if not isinstance(model, AnalyzedModel) and example is None:
        raise PlanError(
            "build got a model and no example batch",
            fix="pass example=batch, or the Reading that made the plan",
            location="build",
        )
    reading = analyze(model, example or {}, loss=loss, seed=plan.job.train.seed)
    if reading.model_spec != replace(plan.model_spec, stage_boundaries=None, sequence_info=None, memory=None):
        text = f"the plan is for '{plan.model_spec.name}' and the model is '{reading.model_spec.name}', with other blocks or parameters"
        raise PlanError(text, fix="make the plan again from this model", location="build")
    check_loss(plan, loss)
    world = world or _joined_world(plan.mesh)
    if world.mesh != plan.mesh:
        text = f"the plan is for {plan.mesh} ({plan.mesh.world_size} ranks) and the world is {world.mesh} ({world.mesh.world_size})"
        raise PlanError(
            text, fix=f"start {plan.mesh.world_size} ranks, or make a plan for this world", location="build"
        )
    check_dtype_support(plan.job.precision, world.device)
    if world.device.type == "cpu":
        retain_heap()
    with OOMAdvisor(reading, plan, world.rank, world.device) as telling:
        subject = make_trained_module(
            reading, world.device, getattr(torch, plan.job.precision.parameters), plan=plan
        )
        telling.executor = Executor(
            plan, RankState(subject, world, loss), optimizer, make_stateless_rng(reading, plan)
        )
    return Trainer(plan, telling.executor, world, reading, telling)


def make_trained_module(
    analyzed: AnalyzedModel,
    device: torch.device,
    dtype: torch.dtype,
    fake: FakeTensorMode | None = None,
    plan: Plan | None = None,
) -> TrainedModule:
    """The model with initial values on `device`, as the engine holds it; with `fake`, of that mode's tensors instead.

    With `plan`, what that keeps in arenas or cuts has no memory yet and no values: who keeps a part never holds the whole.
    What has a master begins from its value before rounding.
    """
    blank: set[str] = set()
    masters, master = set(), dtype
    if plan is not None and fake is None:
        blank = {name for arena in plan.sharding.flat_param_specs().values() for name, _, _ in arena.params}
        blank |= {home.param.name for home in plan.sharding.param_shardings if home.sliced_dims}
        master = getattr(torch, plan.job.precision.effective.master)
        masters = {weight.name for weight in plan.model_spec.trainable} if master != dtype else set()
    module, blocks, parameters = analyzed.make_module(device, dtype, fake, blank)
    stand_in = _wide(analyzed.example) if dtype == torch.float64 else analyzed.example

    def value(name: str, rows: range | None = None) -> torch.Tensor:
        return analyzed.deferred_init.initial_value(name, master, device, rows)

    values = LazyTensors(blank | masters, value, value)
    return TrainedModule(
        module,
        blocks,
        parameters,
        analyzed.model_spec,
        stand_in,
        values,
        get_forward_graphs(analyzed, dtype),
        analyzed.shard_check,
    )


def make_stateless_rng(analyzed: AnalyzedModel, plan: Plan) -> StatelessRNG | None:
    """The stateless dropout of this model; None when its training draws nothing."""
    return StatelessRNG(plan.job.train.seed, analyzed.draw_sites) if analyzed.model_spec.has_dropout else None


def verify(
    analyzed: AnalyzedModel, plan: Plan, batches: Sequence[Batch], *, loss: Loss | None = None
) -> Verdict:
    """Whether `plan` computes what one device computes on `batches`, global ones, one per step.

    All ranks are threads of this process; the comparison runs in float64 with plain SGD, whatever the plan's own optimizer.
    """
    case = parity_case(
        analyzed,
        plan,
        loss or token_cross_entropy(),
        lambda plan, rank: lambda step: select_local_batch(batches[step], plan, rank),
    )
    reference = run_reference(case, len(batches))
    reports = on_threads(lambda world: compare_rank(case, world, reference), plan.mesh, timeout_s=600)
    return replace(make_verdict(case, reports, "threads", {"torch": torch.__version__}), plan=plan.hash)


def trace(
    analyzed: AnalyzedModel,
    plan: Plan,
    ranks: Iterable[int] | None = None,
    *,
    loss: Loss | None = None,
    steps: int = DEFAULT_NUM_STEPS,
    fake: bool = True,
) -> TraceVerdict:
    """Whether `ranks` of `plan` issue the collectives that its program states; the mesh may be larger than any machine.

    Without `ranks`: the first, the last and one between. They are played on `fake` tensors, or on real ones, the model
    whole on the CPU. Raises NeedsValues (a PlanError) when fake tensors cannot play the model.
    """
    dtype, loss = getattr(torch, plan.job.precision.parameters), loss or token_cross_entropy()
    played, cpu = sample_ranks(plan) if ranks is None else ranks, torch.device("cpu")
    found = trace_ranks(
        plan, played, loss, lambda mode: make_trained_module(analyzed, cpu, dtype, mode), steps, fake=fake
    )
    return replace(found, versions={"torch": torch.__version__})


def parity_case(
    analyzed: AnalyzedModel,
    plan: Plan,
    loss: Loss,
    read_batch: Callable[[Plan, int], Callable[[int], Batch | None]],
) -> ParityCase:
    """`plan` as parity runs it, and the same job on one device, both on the CPU; `rows` gives each rank its data."""
    check_loss(plan, loss)
    job = parity_job(plan.job)
    made = (
        job,
        plan.mesh,
        model_spec_for(analyzed, job, plan.mesh, plan.strategies),
        plan.strategies,
        plan.micro_batch,
        plan.run,
    )
    exact = Plan.make(
        *made, alignment_optimizer=plan.job.optimizer
    )  # SGD, in shards as the plan's own optimizer has them
    one_device = make_plan(analyzed, single_device_job(exact.job), Mesh(), (), 0, plan.run)
    raise_diagnostics(static_checks(exact))

    def wide_rows(plan: Plan, rank: int) -> Callable[[int], Batch | None]:
        mine = read_batch(plan, rank)
        return lambda step: None if (batch := mine(step)) is None else _wide(batch)

    def wide_subject() -> TrainedModule:
        return make_trained_module(analyzed, torch.device("cpu"), torch.float64)

    def on(batch: Batch) -> Plan:
        narrow = {key: batch[key].to(value.dtype) for key, value in analyzed.example.items() if key in batch}
        there = analyzed.for_example(narrow)
        same = (there.model_spec.block_calls, there.model_spec.params) == (
            analyzed.model_spec.block_calls,
            analyzed.model_spec.params,
        )
        return (
            exact.with_model_spec(model_spec_for(there, job, plan.mesh, plan.strategies)) if same else exact
        )

    loss = loss.wrap_total(in_float64)
    return ParityCase(
        exact, one_device, loss, wide_subject, lambda: make_stateless_rng(analyzed, exact), wide_rows, on
    )


def _wide(batch: Batch) -> dict[str, torch.Tensor]:
    """`batch` with its floating inputs in float64, as the parameters are in a comparison."""
    return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


def _joined_world(mesh: Mesh) -> World:
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        device = (
            torch.device("cuda", rank % torch.cuda.device_count())
            if dist.get_backend() == "nccl"
            else torch.device("cpu")
        )
        return TorchWorld(mesh, rank, device)
    return alone(torch.device("cpu"))
