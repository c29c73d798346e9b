"""From transformers' TrainingArguments to a job, and what no plan can honor.

    per_device_train_batch_size          samples of a microbatch on each data rank: micro_batch
    gradient_accumulation_steps          microbatches of a step
    x data ranks                         train.batch
    max_grad_norm, seed                  train.clip, train.seed
    bf16, fp16                           precision.compute: autocast, as in transformers
    optim, weight_decay, lr_scheduler_type ...     transformers makes optimizer and scheduler itself

An option that would be ignored or would do something else is refused by name, all of them at once, before
anything is built.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.training_args import OptimizerNames

from meshwright.engine.optim.abstract_optimizer import required_shard_alignment
from meshwright.model.loss.as_loss import LossInput
from meshwright.model.loss.loss_definition import IGNORE_INDEX, Batch, Loss
from meshwright.model.loss.token_cross_entropy import LABELS_KEY, token_cross_entropy
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.plan import Plan

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
# methods of transformers.Trainer that a plan takes over: what a subclass writes there would not be called
REPLACED_METHODS = {
    "compute_loss": "pass loss=meshwright.Loss(...), or compute_loss_func",
    "training_step": "use a callback, or a training loop of your own: docs/tutorial/python_loop.md",
    "prediction_step": "pass compute_metrics or preprocess_logits_for_metrics",
    "evaluation_loop": "pass compute_metrics, or override evaluate",
    "_prepare_inputs": "prepare batches in the collator",
    "get_batch_samples": "prepare batches in the collator",
    "create_accelerator_and_postprocess": "pass mesh= and strategies=, or plan=",
}
NO_OPTION = "remove the option; "


@dataclass(frozen=True)
class RefusedOption:
    """An option of TrainingArguments that is refused unless it has its `neutral` value."""

    name: str
    neutral: tuple[Any, ...]
    fix: str

    def check(self, args: TrainingArguments) -> Iterator[Diagnostic]:
        """Yields a diagnostic if `args` use the option."""
        value = vars(args)[self.name]
        if value not in self.neutral:
            yield Diagnostic(f"{self.name} = {value!r}, which a plan does not run", self.fix, "args")


REFUSED_OPTIONS = (
    RefusedOption(
        "fsdp",
        (None, "", []),
        f"{NO_OPTION}mesh=mw.Mesh(dp_shard=N) shards parameters, gradients and optimizer states",
    ),
    RefusedOption("deepspeed", (None, ""), f"{NO_OPTION}mesh=mw.Mesh(dp_shard=N) is ZeRO-3"),
    RefusedOption(
        "parallelism_config", (None,), f"{NO_OPTION}mesh=mw.Mesh(tp=..., cp=..., pp=..., dp_shard=...)"
    ),
    RefusedOption("torch_compile", (False,), f"{NO_OPTION}blocks run uncompiled"),
    RefusedOption("use_liger_kernel", (False,), f"{NO_OPTION}strategies=[mw.ChunkedLoss()] saves the logits"),
    RefusedOption("neftune_noise_alpha", (None,), f"{NO_OPTION}its noise depends on the number of ranks"),
    RefusedOption(
        "auto_find_batch_size", (False,), f"{NO_OPTION}print(trainer.plan) says what a batch size needs"
    ),
    RefusedOption("bf16_full_eval", (False,), f"{NO_OPTION}evaluation computes as training does"),
    RefusedOption("fp16_full_eval", (False,), f"{NO_OPTION}evaluation computes as training does"),
    RefusedOption("optim_target_modules", (None,), f"{NO_OPTION}use optim='adamw_torch'"),
    RefusedOption("eval_use_gather_object", (False,), f"{NO_OPTION}return tensors"),
    RefusedOption("average_tokens_across_devices", (True,), "set it to True: a loss has one global count"),
    RefusedOption(
        "train_sampling_strategy",
        ("random", "sequential", "group_by_length"),
        "use 'random', 'sequential' or 'group_by_length'",
    ),
    RefusedOption("debug", ("", []), f"{NO_OPTION}LossGuard in mw.Job names the block of a bad step"),
)


def argument_diagnostics(
    args: TrainingArguments, model: object, trainer_type: type, *, has_optimizer: bool
) -> Iterator[Diagnostic]:
    """Yields everything in `args`, and in a subclass `trainer_type`, that no plan can honor."""
    for option in REFUSED_OPTIONS:
        yield from option.check(args)
    optimizer = OptimizerNames(args.optim).value
    if not has_optimizer and optimizer not in OPTIMIZERS:
        fix = f"use {', '.join(OPTIMIZERS)}, or pass optimizers=(optimizer, None)"
        yield Diagnostic(f"optim = '{optimizer}', which needs full parameters and gradients", fix, "args")
    if args.enable_jit_checkpoint and args.world_size > 1:
        fix = f"{NO_OPTION}a signal reaches ranks in different steps; meshwright train handles it"
        yield Diagnostic("enable_jit_checkpoint with several ranks", fix, "args")
    if args.n_gpu > 1:
        text = f"one process for {args.n_gpu} GPUs (nn.DataParallel)"
        yield Diagnostic(text, "start one process per GPU: torchrun --nproc-per-node N script.py", "args")
    config = args.accelerator_config
    for name in ("split_batches", "dispatch_batches"):
        if vars(config)[name]:
            fix = f"{NO_OPTION}each rank loads its own batches of per_device_train_batch_size samples"
            yield Diagnostic(f"accelerator_config.{name} = True", fix, "args")
    yield from _method_diagnostics(trainer_type)
    if isinstance(model, nn.Module) and vars(model).get("hf_device_map"):
        fix = "load it without device_map: the plan says which rank has which parameter"
        yield Diagnostic("the model was placed by device_map", fix, "model")


def _method_diagnostics(trainer_type: type) -> Iterator[Diagnostic]:
    for name, fix in REPLACED_METHODS.items():
        owner = next(each for each in trainer_type.__mro__ if name in vars(each))
        if not owner.__module__.startswith(("transformers.", "meshwright.")):
            yield Diagnostic(f"{owner.__name__} overrides {name}, which a plan does not call", fix, "trainer")


def job_for(
    args: TrainingArguments, model: nn.Module, optimizer: torch.optim.Optimizer | None, steps: int, batch: int
) -> Job:
    """Returns the job of `args` for `model`: of `steps` steps of `batch` samples over all ranks."""
    return Job(
        train=TrainConfig(steps=steps, batch=batch, clip=args.max_grad_norm or 0.0, seed=args.seed),
        optimizer=_optimizer_config(optimizer),
        precision=_precision(args, model),
    )


def _optimizer_config(optimizer: torch.optim.Optimizer | None) -> OptimizerConfig:
    """Returns the optimizer of the job whose states and shards are like those of `optimizer`.

    What steps is `optimizer` itself, with its own groups.
    """
    if optimizer is None or isinstance(optimizer, torch.optim.AdamW):
        return OptimizerConfig()
    # an optimizer that is not known to step each element by itself gets whole weights, as adafactor does
    return OptimizerConfig(name="sgd" if required_shard_alignment(optimizer) == "element" else "adafactor")


def _precision(args: TrainingArguments, model: nn.Module) -> PrecisionConfig:
    dtypes = {
        str(parameter.dtype).removeprefix("torch.")
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.is_floating_point()
    }
    if len(dtypes) != 1:
        text = f"trained parameters of several dtypes: {', '.join(sorted(dtypes)) or 'none are trained'}"
        raise PlanError(text, fix="cast the model to one: model.float()", location="model")
    (dtype,) = dtypes
    compute = "bfloat16" if args.bf16 else "float16" if args.fp16 else dtype
    options: dict[str, Any] = {"parameters": dtype, "compute": compute}
    return PrecisionConfig(**options, reduce="float64" if dtype == "float64" else "float32")


def loss_for(
    model: nn.Module,
    compute_loss_func: Callable[..., Any] | None,
    label_smoothing: float,
    *,
    shifts: bool,
) -> LossInput | None:
    """Returns the loss that transformers' Trainer would compute; None: the one of the model.

    `shifts`: the model's own loss takes labels that are a copy of the inputs.
    """
    if compute_loss_func is not None:
        return _loss_of_function(compute_loss_func, shifts=shifts)
    if label_smoothing:
        is_causal = type(model).__name__ in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        return token_cross_entropy(label_smoothing, shift_labels=is_causal)
    return None


def _loss_of_function(function: Callable[..., Any], *, shifts: bool) -> Loss:
    """Returns the loss of a `compute_loss_func`, which divides a sum by `num_items_in_batch`."""

    def total(outputs: Any, batch: Batch) -> torch.Tensor:
        return function(outputs, batch[LABELS_KEY], num_items_in_batch=1)

    def count(batch: Batch) -> torch.Tensor:
        labels = batch[LABELS_KEY][..., 1:] if shifts else batch[LABELS_KEY]
        return (labels != IGNORE_INDEX).sum()

    return Loss(total, count)


def model_diagnostics(plan: Plan, model_spec: ModelSpec) -> Iterator[Diagnostic]:
    """Yields a diagnostic if `plan`, which the user made, is for another model than that of `model_spec`."""
    planned = replace(plan.model_spec, stage_boundaries=None, sequence_info=None, memory=None)
    if planned != model_spec:
        fix = (
            "set model.config.use_cache = False before meshwright.analyze(model, ...), as transformers' "
            "Trainer does; or pass mesh= and strategies= in place of plan="
        )
        yield Diagnostic("the plan was made from another model, or from one with other settings", fix, "plan")


def plan_diagnostics(plan: Plan, args: TrainingArguments, job: Job) -> Iterator[Diagnostic]:
    """Yields what `plan`, which the user made, says otherwise than `args`."""
    pairs: Mapping[str, tuple[object, object]] = {
        "per_device_train_batch_size": (args.per_device_train_batch_size, plan.micro_batch),
        "gradient_accumulation_steps": (args.gradient_accumulation_steps, plan.num_microbatches),
        "max_grad_norm": (job.train.clip, plan.job.train.clip),
        "seed": (args.seed, plan.job.train.seed),
        "bf16, fp16 and the dtype of the model": (job.precision, plan.job.precision),
    }
    for name, (given, planned) in pairs.items():
        if given != planned:
            text = f"{name}: {given} in the arguments, {planned} in the plan"
            fix = "let both say the same, or pass mesh= and strategies= in place of plan="
            yield Diagnostic(text, fix, "args")
    if plan.sharding.num_servers:
        text = "a plan in which some ranks only serve, and have no samples"
        fix = "write dedicated = false in parameter_server; leave embedding_host and observer out"
        yield Diagnostic(text, fix, "strategies")
    if plan.sharding.primary_rank_axes:
        text = "a plan in which one rank reads the samples of others"
        yield Diagnostic(text, "use ddp or zero in place of data_parallel_master", "strategies")
