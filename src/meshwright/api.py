"""The Python API: analyze a model, make a plan, verify it, and train with a loop of your own.

    analyzed = analyze(my_factory, example_batch)                what the model is made of
    plan     = make_plan(analyzed, job, mesh)                    what every rank does in a step
    verdict  = verify(analyzed, plan, [batch])                   whether it computes what one device computes
    trainer  = parallelize(analyzed, plan)                       one rank of the plan
    metrics  = trainer.step(trainer.local_batch(batch))

The command line calls the same functions; `meshwright.resolve_config` turns a config file into their
arguments.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from meshwright.comm.collectives.group import World
from meshwright.comm.current_world import current_world
from meshwright.engine.optim.lr_schedule import LRSchedulerFactory, LRSchedulerInput, as_lr_scheduler_factory
from meshwright.engine.optim.make_optimizers import OptimizerMaker
from meshwright.engine.optim.optimizer_template import optimizer_template
from meshwright.engine.runtime.build_module import make_stateless_rng, make_trained_module
from meshwright.engine.runtime.cpu_allocator import retain_heap
from meshwright.engine.runtime.mixed_precision import check_dtype_support, set_float32_products
from meshwright.engine.runtime.rank_state import RankState
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.analysis.analyze import analyze as analyze_model
from meshwright.model.analysis.find_model_loss import LabelledForward, run_with_labels
from meshwright.model.analysis.plan_for_model import plan_for_model
from meshwright.model.loading.loader import LoadedModel, Model, load_factory, load_module, with_weights
from meshwright.model.loss.as_batch import parse_batch
from meshwright.model.loss.as_loss import LossInput, as_loss
from meshwright.model.loss.loss_definition import check_loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.oom_advice import OOMAdvisor
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.sync_batch_norm import SyncBatchNorm
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.expert.expert_parallel import ExpertParallel
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel, can_shard_vocab
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, LRScheduleConfig
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.training.trainer import Trainer, batch_tensors, select_local_batch
from meshwright.testing.parity_on_threads import compare_on_threads
from meshwright.verifier.float64_parity_setup import make_parity_case
from meshwright.verifier.message_trace import DEFAULT_NUM_STEPS, TraceVerdict, sample_ranks
from meshwright.verifier.message_trace import trace as trace_ranks
from meshwright.verifier.model_own_loss import with_model_loss
from meshwright.verifier.parity import make_verdict
from meshwright.verifier.verdict_and_cause import Verdict

ModelInput = nn.Module | Model | AnalyzedModel | Callable[[], nn.Module | Model]
OptimizerInput = OptimizerMaker | torch.optim.Optimizer


def analyze(
    model: ModelInput,
    example_batch: object,
    *,
    loss: LossInput | None = None,
    seed: int = 0,
    weights: str = "",
) -> AnalyzedModel:
    """Returns the analysis of `model`: blocks, parameters and operations, found on fake tensors shaped like
    `example_batch`.

    `example_batch` is a batch as a data loader yields it (model/loss/as_batch.py): a dict, a `BatchEncoding`,
    a dataclass, or a tuple of tensors. It contains the targets of `loss`: a sum and a count (`Loss`), or
    `nn.CrossEntropyLoss()`, `F.cross_entropy`, or `model.loss_function` of a transformers model. By default
    the loss is the one that the model computes itself of a batch with labels, or cross-entropy over labels
    that are aligned with the logits if it computes none.

    A factory is called without allocating its parameters, and initial values come from `seed`. An `nn.Module`
    is copied with its values and not changed. Values stored in `weights`, a folder or a safetensors file,
    take precedence over both.
    """
    if isinstance(model, AnalyzedModel):
        return model
    if isinstance(model, str):
        fix = f"pass a module, or what makes it: lambda: AutoModelForCausalLM.from_pretrained({model!r})"
        raise PlanError(f"the model is the text {model!r}", fix=fix, location="model")
    if isinstance(model, (nn.Module, Model)):
        loaded = load_module(model, seed)
    else:
        loaded = load_factory(model, seed, "model")
    loaded = with_weights(loaded, Path(weights)) if weights else loaded
    return analyze_loaded(loaded, example_batch, loss)


def analyze_loaded(
    loaded: LoadedModel, example_batch: object, loss: LossInput | None = None
) -> AnalyzedModel:
    """Returns the analysis of a model that is loaded already; see `analyze`."""
    stated = as_loss(loss)
    targets = (stated or token_cross_entropy()).targets
    example = parse_batch(example_batch, loaded.deferred_init.forward_parameters, targets)
    if example.constants:
        loaded = replace(loaded, deferred_init=loaded.deferred_init.with_constants(example.constants))
    labelled = LabelledForward() if stated else run_with_labels(loaded, example.tensors)
    stated = stated or labelled.loss or token_cross_entropy()
    analyzed = analyze_model(loaded, stated.prepare(example.tensors), stated, labelled.resized)
    return replace(analyzed, constants=example.constants)


def make_plan(
    analyzed: AnalyzedModel,
    job: Job,
    mesh: Mesh | None = None,
    strategies: Iterable[Strategy] | None = None,
    micro_batch: int = 0,
    run: RunConfig | None = None,
    align_bytes: int = 0,
) -> Plan:
    """Returns the plan for this model, job and mesh; without `strategies`, with `default_strategies`.

    `job` need not name the model and the data. Buffers begin parameters and shards at multiples of
    `align_bytes`; 0: what the device needs, 128 on accelerators (`run.hardware`, or that of this host) and
    none on CPUs. Raises PlanError with every diagnostic.
    """
    _check_type("analyzed", analyzed, AnalyzedModel, "analyzed = mw.analyze(model, batch)")
    _check_type("job", job, Job, "mw.Job(train=mw.TrainConfig(steps=100, batch=8))")
    mesh = Mesh() if mesh is None else mesh
    _check_type("mesh", mesh, Mesh, "mw.Mesh(dp_shard=2)")
    listed = "a list: [mw.BatchSplit(axis='dp_shard'), mw.ZeRO()]"
    if strategies is not None:
        _check_type("strategies", strategies, Iterable, listed)
        strategies = tuple(strategies)
    for strategy in strategies or ():
        _check_type("strategies", strategy, Strategy, listed)
    chosen = default_strategies(mesh, analyzed.model_spec) if strategies is None else strategies
    return plan_for_model(analyzed, job, mesh, chosen, micro_batch, run, align_bytes=align_bytes)


def _check_type(name: str, value: object, needed: type, example: str) -> None:
    if not isinstance(value, needed):
        raise PlanError(f"{name} is a {type(value).__name__}", fix=f"pass {example}", location=name)


def default_strategies(mesh: Mesh, model_spec: ModelSpec) -> tuple[Strategy, ...]:
    """Returns the strategies of a mesh for which none are given.

    dp_replicate and dp_shard split the batch; dp_replicate is DDP, dp_shard is ZeRO. tp is Megatron tensor
    parallelism, with vocabulary parallelism if the model allows it; pp is a 1F1B pipeline; cp is ring
    attention; ep splits the batch too, and distributes experts. A model whose own activation checkpointing
    was on gets that of the plan, and batch norms take the statistics of all ranks.
    """
    strategies: tuple[Strategy, ...] = (Pipeline(),) if mesh.pp > 1 else ()
    if model_spec.requests_checkpointing and len(model_spec.block_calls) > 1:
        strategies += (ActivationCheckpointing(),)
    strategies += (TensorParallel(),) if mesh.tp > 1 else ()
    strategies += (VocabParallel(),) if mesh.tp > 1 and can_shard_vocab(model_spec, mesh.tp) else ()
    strategies += (RingAttention(),) if mesh.cp > 1 else ()
    strategies += (ExpertParallel(), BatchSplit(axis="ep")) if mesh.ep > 1 else ()
    if mesh.dp_shard == mesh.dp_replicate == mesh.ep == 1:
        return (*strategies, DDP(axis="cp")) if mesh.cp > 1 else strategies
    strategies += (SyncBatchNorm(),) if model_spec.batch_norm_calls else ()
    if mesh.dp_shard == 1 and mesh.dp_replicate > 1:
        return (*strategies, BatchSplit(), DDP())
    split = BatchSplit(axis="dp_shard")
    return (
        (*strategies, BatchSplit(), split, ZeRO(replicate_axis="dp_replicate"))
        if mesh.dp_replicate > 1
        else (*strategies, split, ZeRO())
    )


def parallelize(
    model: ModelInput,
    plan: Plan,
    *,
    optimizer: OptimizerInput | None = None,
    lr_scheduler: LRSchedulerInput | None = None,
    loss: LossInput | None = None,
    world: World | None = None,
    example: object = None,
) -> "Trainer":
    """Returns one rank of `plan`, ready to step.

    Args:
        optimizer: makes a torch optimizer from parameter groups, or several that share them (a class does);
            by default the optimizer of the job. The groups carry the job's learning rate and weight decay,
            which take precedence over the optimizer's arguments. An optimizer over the parameters of the
            module `model` is made again, with its own groups and options, over what this rank steps.
        lr_scheduler: makes a scheduler of torch from an optimizer, or maps a step to a factor of the learning
            rate (LambdaLR); by default the schedule of the job.
        loss: see `analyze`; by default the one of the analysis.
        world: this rank in its mesh; by default torch.distributed if it is initialized, else one device.
        example: a batch, needed unless `model` is an `AnalyzedModel`.

    Raises PlanError if the plan was made for another model, mesh or loss, or if the rank keeps more in the
    memory or on the disk of this host than is free.
    """
    _check_type("plan", plan, Plan, "mw.make_plan(analyzed, job, mesh)")
    if not isinstance(model, AnalyzedModel) and example is None:
        raise PlanError(
            "parallelize got a model and no example batch",
            fix="pass example=batch, or the AnalyzedModel that made the plan",
            location="parallelize",
        )
    analyzed = analyze(model, example, loss=loss, seed=plan.job.train.seed)
    if analyzed.model_spec != replace(
        plan.model_spec, stage_boundaries=None, sequence_info=None, memory=None
    ):
        text = f"the plan is for '{plan.model_spec.name}' and the model is '{analyzed.model_spec.name}', "
        text += "with other blocks or parameters"
        raise PlanError(text, fix="make the plan again from this model", location="parallelize")
    make_scheduler = _lr_scheduler_factory(lr_scheduler, plan)
    loss = as_loss(loss) or analyzed.loss
    check_loss(plan, loss)
    world = world or current_world(plan.mesh)
    if world.mesh != plan.mesh:
        text = f"the plan is for {plan.mesh} ({plan.mesh.world_size} ranks) "
        text += f"and the world is {world.mesh} ({world.mesh.world_size})"
        raise PlanError(
            text,
            fix=f"start {plan.mesh.world_size} ranks (torchrun --nproc-per-node {plan.mesh.world_size}), or "
            "make a plan for this world",
            location="parallelize",
        )
    check_dtype_support(plan.job.precision, world.device)
    set_float32_products(plan.job.precision, world.device)
    if world.device.type == "cpu":
        retain_heap()
    with OOMAdvisor(analyzed, plan, world.rank, world.device) as oom_advisor:
        oom_advisor.check_rank_fits_here()
        rng = make_stateless_rng(analyzed, plan)
        module = make_trained_module(
            analyzed, world.device, getattr(torch, plan.job.precision.parameters), plan=plan
        )
        oom_advisor.executor = StepExecutor(
            plan.for_rank(world.rank),
            RankState(module, world, loss),
            _as_optimizer_maker(optimizer, model),
            rng,
            lr_scheduler=make_scheduler,
        )
    return Trainer(plan, oom_advisor.executor, world, analyzed, oom_advisor)


def _as_optimizer_maker(optimizer: OptimizerInput | None, model: ModelInput) -> OptimizerMaker | None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if isinstance(model, nn.Module):
        return optimizer_template(optimizer, model)
    kind = type(optimizer).__name__
    text = f"the {kind} is over parameters of a module, and the model passed is no module"
    fix = f"pass the module in place of its analysis, or optimizer=lambda groups: {kind}(groups, ...)"
    raise PlanError(text, fix=fix, location="optimizer")


def _lr_scheduler_factory(given: LRSchedulerInput | None, plan: Plan) -> LRSchedulerFactory | None:
    if given is None:
        return None
    if plan.job.lr_schedule != LRScheduleConfig():
        text = f"an lr_scheduler, and the plan has the schedule '{plan.job.lr_schedule.name}'"
        fix = "remove one of them: lr_schedule of the job, or lr_scheduler"
        raise PlanError(text, fix=fix, location="lr_scheduler")
    return as_lr_scheduler_factory(given)


def verify(
    analyzed: AnalyzedModel, plan: Plan, batches: Sequence[object], *, loss: LossInput | None = None
) -> Verdict:
    """Compares `plan` with one device on `batches`, one global batch per step, and returns the verdict.

    All ranks are threads of this process. Both compute in float64 with plain SGD, whatever the plan's
    optimizer.
    """
    _check_type("analyzed", analyzed, AnalyzedModel, "analyzed = mw.analyze(model, batch)")
    _check_type("plan", plan, Plan, "mw.make_plan(analyzed, job, mesh)")
    _check_type("batches", batches, Sequence, "a list of batches, one for each step: [batch]")
    loss = as_loss(loss) or analyzed.loss
    prepared = [loss.prepare(batch_tensors(batch, analyzed)) for batch in batches]
    case = make_parity_case(
        analyzed,
        plan,
        loss,
        lambda plan, rank: lambda step: select_local_batch(prepared[step], plan, rank),
    )
    reports = compare_on_threads(case, len(batches), timeout_s=600)
    verdict = make_verdict(case, reports, "threads", {"torch": torch.__version__})
    verdict = replace(verdict, plan=plan.hash)
    return with_model_loss(verdict, analyzed, loss, prepared[0]) if prepared else verdict


def trace(
    analyzed: AnalyzedModel,
    plan: Plan,
    ranks: Iterable[int] | None = None,
    *,
    loss: LossInput | None = None,
    steps: int = DEFAULT_NUM_STEPS,
    fake: bool = True,
) -> TraceVerdict:
    """Compares the collectives that `ranks` of `plan` issue with its program; the mesh may be larger than
    any machine.

    By default the first, the last and one rank between are traced. They run on `fake` tensors, or on real
    ones with the full model on the CPU. Raises NeedsValues (a PlanError) when the model cannot run on fake
    tensors.
    """
    dtype, loss = getattr(torch, plan.job.precision.parameters), as_loss(loss) or analyzed.loss
    traced, cpu = sample_ranks(plan) if ranks is None else ranks, torch.device("cpu")
    verdict = trace_ranks(
        plan, traced, loss, partial(make_trained_module, analyzed, cpu, dtype), steps, fake=fake
    )
    return replace(verdict, versions={"torch": torch.__version__})
