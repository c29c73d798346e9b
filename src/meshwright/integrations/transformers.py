"""`MeshwrightTrainer`: transformers' Trainer, run by a plan.

    trainer = MeshwrightTrainer(model, args, train_dataset=..., mesh=mw.Mesh(dp_shard=4, tp=2))
    trainer.train()

    transformers                                       here
    arguments, callbacks, logs, epochs, samplers       as they are
    optimizer, parameter groups, lr scheduler          made by transformers; ranks step the groups
    training_step of the last microbatch               one step of the plan: forward to update
    evaluation_loop                                    the plan's forwards; every sample once
    checkpoint-N/model.safetensors, trainer_state      as they are
    checkpoint-N/meshwright/                           optimizer states, in shards: any plan resumes from them

So a script changes in one line, and its numbers do not depend on the number of ranks. Differences: a loss is
always divided by the global count of tokens, also for models that do not take `num_items_in_batch`; dropout
and what collators draw are functions of the seed and the sample (engine/rng, global_batches.py);
`on_pre_optimizer_step` is called after the update, because a step of a plan is one act.
"""

import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers import Trainer as TransformersTrainer
from transformers.trainer_utils import EvalLoopOutput, TrainOutput, denumpify_detensorize, has_length

from meshwright.engine.optim.lr_schedule import LRScheduler
from meshwright.engine.runtime.rank_state import Metrics
from meshwright.integrations.global_batches import (
    DataRank,
    LocalStream,
    Samples,
    collate_rows,
    first_batch,
    make_loader,
)
from meshwright.integrations.model_on_ranks import ModelOnRanks, PlanChoice
from meshwright.integrations.prediction_loop import (
    GlobalBatch,
    PredictionArrays,
    PredictionLoop,
    PredictionOptions,
)
from meshwright.integrations.training_arguments import argument_diagnostics, loss_for
from meshwright.model.loss.as_loss import LossInput
from meshwright.plan.job.errors import PlanError, raise_diagnostics
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.checkpoint.directories import list_step_folders

CHECKPOINT_FOLDER = "meshwright"  # inside transformers' checkpoint-N
SFT_COLUMNS = ("seq_lengths", "completion_mask", "assistant_masks")  # of TRL's datasets, for its collators

logger = logging.getLogger(__name__)


class MeshwrightTrainer(TransformersTrainer):
    """transformers' Trainer whose steps are those of a plan.

    Args:
        mesh: the axes of the ranks; by default all ranks share the batch (`Mesh(dp_replicate=N)`).
        strategies: by default those of the mesh (`api.default_strategies`).
        plan: a plan in place of `mesh` and `strategies`; it must say the same as `args`.
        loss: by default the loss that transformers' Trainer computes; see `api.analyze`.

    All other arguments are those of transformers.Trainer. `per_device_train_batch_size` and
    `gradient_accumulation_steps` are per data rank: ranks of tp, pp and cp share samples. Raises PlanError,
    with all reasons at once, for options that a plan cannot honor.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        mesh: Mesh | None = None,
        strategies: Iterable[Strategy] | None = None,
        plan: Plan | None = None,
        loss: LossInput | None = None,
        **options: Any,
    ) -> None:
        args = TrainingArguments("tmp_trainer") if args is None else args
        if plan is not None and (mesh is not None or strategies is not None):
            text = "both a plan, and a mesh or strategies"
            raise PlanError(text, fix="pass plan=, or mesh= and strategies=", location="trainer")
        optimizer = (options.get("optimizers") or (None, None))[0] or options.get("optimizer_cls_and_kwargs")
        raise_diagnostics(argument_diagnostics(args, model, type(self), has_optimizer=optimizer is not None))
        self._request = PlanChoice(
            mesh,
            None if strategies is None else tuple(strategies),
            plan,
            loss,
            activation_checkpointing=bool(args.activation_checkpointing),
        )
        self._step_report = SimpleNamespace(step_was_skipped=False)  # as accelerate's optimizers report it
        self._on_ranks: ModelOnRanks | None = None
        self._microbatches: list[Samples] = []
        self._metrics: Metrics | None = None
        super().__init__(model, args, *positional, **options)

    @property
    def plan(self) -> Plan:
        """The plan; it is made from the first samples of the training dataset if there is none yet."""
        return self._prepare_ranks(self.eval_dataset)[1]

    @contextmanager
    def full_params(self) -> Iterator[nn.Module]:
        """Yields the model with its present parameters, for forwards and `generate`; all ranks enter it."""
        ranks, _ = self._prepare_ranks(self.eval_dataset)
        with ranks.open().full_params() as module:
            yield module

    def train(self, *positional: Any, **options: Any) -> TrainOutput:
        """Trains, as transformers' Trainer does; the model that was passed has the new values afterwards."""
        # the strategy of that name does it, for the blocks of this rank
        self.args.activation_checkpointing = False
        try:
            return super().train(*positional, **options)
        finally:
            self.args.activation_checkpointing = self._request.activation_checkpointing
            if self._on_ranks is not None and self.args.world_size == 1:  # alone also after an error
                self._on_ranks.restore()

    def end(self) -> None:
        """Closes the plan's groups of ranks, and does what transformers does."""
        if self._on_ranks is not None:
            self._on_ranks.close()
            self._on_ranks = None
        super().end()

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Returns the samples of a step over all ranks."""
        return self.plan.job.train.batch

    def training_step(
        self, model: nn.Module, inputs: Samples, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Takes a microbatch; with the last one of a step, trains the step and returns its loss."""
        self._microbatches.append(inputs)
        loss = torch.zeros((), dtype=torch.float64, device=self.args.device)
        if len(self._microbatches) < self.current_gradient_accumulation_steps:
            return loss
        batches, self._microbatches = [batch for batch in self._microbatches if batch], []
        self._metrics = self._ranks().step(batches)
        self._step_report.step_was_skipped = self._metrics.is_skipped
        self._tr_loss = self._tr_loss.double()
        return loss + self._metrics.loss

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Returns the batches to evaluate on; raises PlanError if there is no dataset for them."""
        if eval_dataset is None and self.eval_dataset is None:
            text = "evaluate() without samples: the trainer has no eval_dataset"
            fix = "pass eval_dataset=... to MeshwrightTrainer, or to evaluate()"
            raise PlanError(text, fix=fix, location="trainer")
        return super().get_eval_dataloader(eval_dataset)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Returns predictions and metrics of all samples, each once; see prediction_loop.py."""
        args = self.args
        loss_only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        ranks, _ = self._prepare_ranks(self.eval_dataset)
        loop = PredictionLoop(ranks.open(), self._prediction_options(ignore_keys, loss_only=loss_only))
        self.callback_handler.eval_dataloader = dataloader
        batch_wise = args.batch_eval_metrics and self.compute_metrics is not None and not loss_only
        found = PredictionArrays(args.eval_do_concat_batches)
        metrics: dict[str, Any] = {}
        for number, (row, is_last) in enumerate(_mark_last(loop.run(dataloader)), start=1):
            for index, batch in enumerate(row, start=1):
                found.add(batch, keep_values=not batch_wise or description == "Prediction")
                if batch_wise:
                    last = is_last and index == len(row)
                    part = PredictionArrays(args.eval_do_concat_batches)
                    part.add(batch)
                    metrics = self._compute_metrics(part, compute_result=last) or metrics
            self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)
            if args.eval_accumulation_steps and number % args.eval_accumulation_steps == 0:
                found.to_cpu()
        if not batch_wise and not loss_only:
            metrics = self._compute_metrics(found)
        metrics = denumpify_detensorize(metrics)
        if found.losses:
            metrics["loss"] = found.mean_loss(finite_only=args.logging_nan_inf_filter)
        prefix = f"{metric_key_prefix}_"
        metrics = {key if key.startswith(prefix) else prefix + key: each for key, each in metrics.items()}
        return EvalLoopOutput(found.arrays("logits"), found.arrays("labels"), metrics, found.num_samples)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model as transformers does; while it is trained, with the values of the ranks."""
        if self._on_ranks is None or self._on_ranks.released is None:
            super().save_model(output_dir, _internal_call)
            return
        state = self._on_ranks.full_state(keep_result=self.args.should_save)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    # what transformers' loop calls

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        pass  # ranks put their parts on the device

    def _ranks(self) -> ModelOnRanks:
        """Returns the model under its plan; another one if the model was replaced (model_init)."""
        before, model = self._on_ranks, self.model
        if model is None:
            raise ValueError("the trainer has no model; pass model or model_init")
        if before is None or before.module is not model:
            loss = self._request.loss
            if loss is None:
                smooth = self.label_smoother is not None
                loss = loss_for(
                    model,
                    self.compute_loss_func,
                    self.args.label_smoothing_factor if smooth else 0.0,
                    shifts=self._loss_shifts_labels,
                )
            request = replace(self._request, loss=loss)
            world = None if before is None else before.world
            before = self._on_ranks = ModelOnRanks(model, self.args, request, world=world)
        return before

    def _prepare_ranks(self, dataset: Any) -> tuple[ModelOnRanks, Plan]:
        """Returns the model under its plan, made from the training dataset, or if there is none `dataset`."""
        ranks = self._ranks()
        if ranks.plan is not None:
            return ranks, ranks.plan
        if self.train_dataset is not None:
            dataset = self.train_dataset
            self.create_optimizer()
        return ranks, ranks.prepare(partial(self._example, dataset), self.optimizer, self._num_steps())

    def _num_steps(self) -> int:
        """Returns the number of steps, as far as it is known before the data is read."""
        args = self.args
        if args.max_steps > 0 or not has_length(self.train_dataset):
            return max(1, args.max_steps)
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return max(1, math.ceil(args.num_train_epochs * math.ceil(len(self.train_dataset) / per_step)))

    def _example(self, dataset: Any) -> Samples:
        if dataset is None:
            fix = "pass train_dataset or eval_dataset"
            raise PlanError("no dataset, from which a plan takes an example", fix=fix, location="trainer")
        if isinstance(dataset, dict):
            dataset = next(iter(dataset.values()))
        dataset, collate = self._columns(dataset, "example")
        size = self.args.per_device_train_batch_size
        example = first_batch(dataset, collate, size, self.args.seed)
        rows = len(next(iter(example.values()), ()))
        wanted = min(size, len(dataset)) if has_length(dataset) else size
        if rows == 1 < wanted:
            text = f"the collator makes 1 row of {wanted} samples; a plan shares rows among ranks"
            fix = f"per_device_train_batch_size=1 with {size} times the gradient_accumulation_steps, or "
            raise PlanError(text, fix=f"{fix}a collator that pads (padding_free=False)", location="collator")
        return example

    def _columns(self, dataset: Any, description: str) -> tuple[Any, Callable[[list[Any]], Samples]]:
        """Returns `dataset` and the collator, without columns that the model does not take."""
        if type(dataset).__module__.startswith("datasets.arrow_dataset"):
            dataset, collate = self._remove_unused_columns(dataset, description), self.data_collator
        else:
            collate = self._get_collator_with_removed_columns(self.data_collator, description)
        return dataset, partial(collate_rows, collate=collate)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if type(self.data_collator).__module__.startswith("trl."):
            self._signature_columns = list(dict.fromkeys([*(self._signature_columns or ()), *SFT_COLUMNS]))

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader:
        _, plan = self._prepare_ranks(dataset)
        samples, collate = self._columns(dataset, description)
        has_order = sampler_fn is not None and not isinstance(samples, IterableDataset)
        sampler = sampler_fn(samples) if has_order and sampler_fn is not None else None
        rank = DataRank.of(plan, self.args.process_index)
        loader = make_loader(samples, collate, batch_size, sampler, rank, self.args)
        if dataloader_key is not None and self.args.dataloader_persistent_workers:
            vars(self).setdefault("_eval_dataloaders", {})[dataloader_key] = loader
        return loader

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        if self._created_lr_scheduler:
            vars(self).update(lr_scheduler=None, _created_lr_scheduler=False)
        ranks = self._ranks()
        self._microbatches = []
        ranks.open(self.create_optimizer(), self._scheduler)
        self.create_scheduler(max_steps)
        self.model_wrapped = ranks.module
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        ranks.release()
        self.accelerator._optimizers.append(self._step_report)
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader = train_dataloader
        return ranks.module, train_dataloader

    def _scheduler(self) -> LRScheduler:
        if self.lr_scheduler is None:
            raise ValueError("no scheduler yet; create_scheduler makes it before the first step")
        return self.lr_scheduler

    def _run_epoch(self, *positional: Any, **options: Any) -> None:
        loader = options["train_dataloader"]
        order = loader.dataset if isinstance(loader.dataset, LocalStream) else loader.batch_sampler
        order.set_epoch(options["epoch"])
        super()._run_epoch(*positional, **options)

    def _finalize_training(self, *positional: Any, **options: Any) -> TrainOutput:
        self._ranks().restore()
        return super()._finalize_training(*positional, **options)

    def _clip_grad_norm(self, model: nn.Module) -> float | None:
        return None if self._metrics is None else self._metrics.grad_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float | None:
        return self._clip_grad_norm(model)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> None:
        return None  # the plan counts

    def floating_point_ops(self, inputs: Samples) -> int:
        """Returns the operations of a microbatch, on one of the ranks that share it."""
        return super().floating_point_ops(dict(inputs)) if inputs and self._counts_samples() else 0

    def _track_num_input_tokens(self, inputs: Samples) -> None:
        if self.args.include_num_input_tokens_seen == "no":
            return
        num_tokens = self._num_input_tokens(inputs) if inputs and self._counts_samples() else 0
        total = self.accelerator.gather(torch.tensor(num_tokens, device=self.args.device)).sum()
        self.state.num_input_tokens_seen += total.item()

    def _num_input_tokens(self, inputs: Samples) -> int:
        tokens = inputs[self._main_input_name()]
        if self.args.include_num_input_tokens_seen == "non_padding":
            if "attention_mask" in inputs:
                return int(inputs["attention_mask"].sum())
            if isinstance(self.processing_class, PreTrainedTokenizerBase):
                return int((tokens != self.processing_class.pad_token_id).sum())
        return tokens.numel()

    def _main_input_name(self) -> str:
        model = self.model
        return model.main_input_name if isinstance(model, PreTrainedModel) else "input_ids"

    def _counts_samples(self) -> bool:
        """Returns whether this rank is the first of those that have the same samples."""
        plan = self.plan
        coordinate = plan.mesh.coordinate(self.args.process_index)
        return not any(coordinate[axis] for axis in AXES if axis not in plan.sharding.data_axes)

    def _prediction_options(self, ignore_keys: list[str] | None, *, loss_only: bool) -> PredictionOptions:
        config: Any = self.model.config if isinstance(self.model, PreTrainedModel) else None
        names_ignored = "keys_to_ignore_at_inference" in dir(config)
        ignored = config.keys_to_ignore_at_inference if names_ignored else ["past_key_values"]
        keeps_inputs = "inputs" in self.args.include_for_metrics
        return PredictionOptions(
            tuple(self.label_names),
            tuple(ignored if ignore_keys is None else ignore_keys),
            loss_only,
            self._main_input_name() if keeps_inputs else None,
            self.preprocess_logits_for_metrics,
        )

    def _compute_metrics(self, found: PredictionArrays, **options: Any) -> dict[str, Any]:
        prediction = found.prediction(self.args.include_for_metrics)
        if self.compute_metrics is None or prediction.predictions is None or prediction.label_ids is None:
            return {}
        return self.compute_metrics(prediction, **options)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir) / CHECKPOINT_FOLDER
        if self.is_world_process_zero() and folder.exists():  # transformers replaces a checkpoint, too
            shutil.rmtree(folder)
        self._ranks().save(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        ranks, folder = self._ranks(), Path(checkpoint) / CHECKPOINT_FOLDER
        saved = list_step_folders(folder) if folder.is_dir() else []
        if saved:
            ranks.load(saved[0][1])
            return
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.optimizer is None or not self.optimizer.state:
            logger.warning("%s holds no optimizer state: it begins anew", checkpoint)
        ranks.load_optimizer_state(self.state.global_step)


def _mark_last(rows: Iterable[list[GlobalBatch]]) -> Iterator[tuple[list[GlobalBatch], bool]]:
    """Yields each of `rows`, and whether it is the last one."""
    before: list[GlobalBatch] | None = None
    for row in rows:
        if before is not None:
            yield before, False
        before = row
    if before is not None:
        yield before, True
