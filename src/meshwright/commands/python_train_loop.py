"""`meshwright.train(trainer, data)`: the loop of `meshwright train` for a Trainer.

    trainer = meshwright.parallelize(analyzed, plan)
    result  = meshwright.train(trainer, data, eval_data=other_data, callbacks=[Callback(on_evaluate=...)])

It does what `meshwright train` does with a config: shuffles, steps, evaluates, saves, logs metrics, and
resumes from the newest checkpoint when it is called again. A rank that runs out of memory names changes of
the plan that need less.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import Dataset as TorchDataset
from transformers import PreTrainedTokenizerBase

from meshwright.api import Trainer
from meshwright.integrations.lm_eval_tasks import TaskRunner, task_diagnostics
from meshwright.model.loss.loss_definition import Batch
from meshwright.parallel.outer.rounds import RoundStrategy
from meshwright.plan.job.errors import PlanError, raise_diagnostics
from meshwright.run.checkpoint.resume import resume
from meshwright.run.data.data_loader import (
    CollatedDataset,
    Dataset,
    ExampleDataset,
    PreparedDataset,
    open_local_batches,
    prefetch,
)
from meshwright.run.data.eval_samples import EvalSamples, split_held_out
from meshwright.run.telemetry.callbacks import Callback
from meshwright.run.training.evaluations import Evaluations
from meshwright.run.training.train_loop import TrainResult
from meshwright.run.training.train_loop import train_loop as play_all
from meshwright.run.training.trainer import batch_tensors

logger = logging.getLogger(__name__)

Samples = Dataset | Mapping[str, torch.Tensor] | TorchDataset | DataLoader


def train(
    trainer: Trainer,
    data: Samples,
    *,
    eval_data: Samples | None = None,
    callbacks: Sequence[Callback] = (),
    should_stop: Callable[[], bool] = lambda: False,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> TrainResult:
    """Runs the remaining steps of the plan, evaluates and saves; returns how the run ended. Every rank calls
    it.

    Args:
        data: all samples, the same on every rank: tensors with one sample per row of dim 0, a `Dataset`, a
            dataset of torch with a length, or the `DataLoader` over one. Of a loader the dataset and the
            collator are used; the plan says the batch, and its seed the order.
        eval_data: samples to evaluate on, likewise.
        callbacks: called on rank 0.
        should_stop: called before each step; True stops all ranks after it.
        tokenizer: that of the model; needed where the plan evaluates tasks.
    """
    plan, world = trainer.plan, trainer.world
    run_tasks = _task_runner(trainer, tokenizer)
    with trainer.oom_advisor:
        everything = _as_data(data, trainer)
        training, kept = split_held_out(everything, plan.job.evaluate)
        if eval_data is not None:
            kept = _as_data(eval_data, trainer)
        elif kept is None and plan.job.evaluate.is_enabled:
            text = "the plan asks for evaluations, and no samples were passed"
            raise PlanError(text, fix="pass eval_data=...", location="eval_data")
        rounds = (each for each in plan.strategies if kept is not None and isinstance(each, RoundStrategy))
        raise_diagnostics([problem for each in rounds for problem in each.check_evaluations(plan.job)])
        resumed = resume(trainer.executor, plan, world, everything.digest)
        evaluating = None if kept is None else EvalSamples(kept, plan, plan.data_index(world.rank))
        with prefetch(
            open_local_batches(training, plan, world.rank), plan.run.num_workers(world.device.type)
        ) as batches:
            return play_all(
                trainer.executor,
                plan,
                batches,
                world,
                should_stop,
                callbacks,
                evaluations=Evaluations(evaluating, run_tasks),
                eval_history=resumed.eval_history,
            )


def _task_runner(trainer: Trainer, tokenizer: PreTrainedTokenizerBase | None) -> TaskRunner | None:
    """Returns what evaluates the tasks of the plan; None if it names none. Raises PlanError for tasks that
    cannot be evaluated.
    """
    job = trainer.plan.job
    if not job.evaluate.tasks:
        return None
    if tokenizer is None:
        text = "the plan evaluates tasks, which are texts, and no tokenizer was passed"
        raise PlanError(text, fix="pass tokenizer=AutoTokenizer.from_pretrained(...)", location="tokenizer")
    raise_diagnostics(task_diagnostics(job, trainer.module, tokenizer))
    return TaskRunner(trainer, tokenizer, job.evaluate)


def _as_data(samples: Samples, trainer: Trainer) -> Dataset:
    def prepare(batch: object) -> Batch:
        return trainer.executor.loss.prepare(batch_tensors(batch, trainer.analyzed))

    if isinstance(samples, Mapping):
        return PreparedDataset(ExampleDataset(batch_tensors(samples, trainer.analyzed)), prepare)
    if isinstance(samples, DataLoader):
        size = trainer.plan.job.train.batch
        if samples.batch_size not in (None, 1, size) and trainer.world.rank == 0:  # 1: torch's default
            logger.warning(
                "the DataLoader makes batches of %d samples, and a step of the plan takes %d over all ranks: "
                "the loader's size is not used; write batch_size=%d, or make the plan with train.batch = %d",
                *(samples.batch_size, size, size, samples.batch_size),
            )
        return PreparedDataset(_of_loader(samples), prepare)
    if isinstance(samples, TorchDataset):
        return PreparedDataset(_of_loader(DataLoader(samples)), prepare)
    if isinstance(samples, (str, Path, list, tuple)):
        text = f"the samples are a {type(samples).__name__}"
        fix = "pass a dict of tensors with one sample per row, a dataset of torch, or a DataLoader over one"
        raise PlanError(text, fix=fix, location="data")
    return PreparedDataset(samples, prepare)


def _of_loader(loader: DataLoader) -> CollatedDataset:
    """Returns the samples of `loader`; raises PlanError where its order cannot be that of the plan."""
    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        text, fix = "an iterable dataset, which has no sample by index", "step in a loop of your own: "
        fix += "for batch in loader: trainer.step(trainer.local_batch(batch))"
        raise PlanError(text, fix=fix, location="data")
    if type(sampler) not in (RandomSampler, SequentialSampler) or type(loader.batch_sampler) not in (
        BatchSampler,
        type(None),
    ):
        text = f"a loader in the order of a {type(sampler).__name__}; train() takes that of the plan's seed"
        fix = "pass its dataset, or step in a loop of your own with the batches of the loader"
        raise PlanError(text, fix=fix, location="data")
    return CollatedDataset(loader.dataset, loader.collate_fn)
