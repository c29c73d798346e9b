"""The loop of the command, for people who have an engine: `meshwright.train(engine, data)` in place of a loop of one's own.

    engine = meshwright.parallelize(reading, plan)
    ended  = meshwright.train(engine, rows, held_out=other_rows, callbacks=[Callback(on_evaluate=...)])

It does what `meshwright train` does with a config: shuffles, steps, evaluates, saves, writes metrics, and when it is
called again, goes on from the newest checkpoint. A rank that runs out of memory says what takes less.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from meshwright.api import Trainer
from meshwright.plan.job.errors import PlanError
from meshwright.run.checkpoint.resume import resume
from meshwright.run.data.eval_split import EvalSamples, split_held_out
from meshwright.run.data.feed import Dataset, ExampleDataset, open_feed
from meshwright.run.data.prefetch import prefetch
from meshwright.run.telemetry.callbacks import Callback
from meshwright.run.training.train_loop import TrainResult
from meshwright.run.training.train_loop import train_loop as play_all

Samples = Dataset | Mapping[str, torch.Tensor]


def train(
    trainer: Trainer,
    data: Samples,
    *,
    eval_data: Samples | None = None,
    callbacks: Sequence[Callback] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainResult:
    """Play the plan's steps that are left, evaluate and save; returns how it ended. Every rank calls it.

    Args:
        data: all samples, the same on every rank: tensors with one sample per row, or a `Data`. They are shuffled by
            train.seed and repeated as data.epochs says. Checkpoints and metrics go into run.folder.
        held_out: the samples that [evaluate] is about; without them, the last evaluate.hold_out of `data`. Given without
            [evaluate], they are evaluated on every evaluate.every steps.
        callbacks: called on rank 0 (see run/callbacks.py).
        stopping: asked before each step; when it says so on one rank, all of them stop, with a checkpoint.

    Raises PlanError for evaluations without samples, Spiked, a PlanError, when the guard ends the run, and OutOfMemory on a
    rank that asks for memory and is not given it.
    """
    plan, world = trainer.plan, trainer.world
    with trainer.oom_advisor:
        everything = _as_data(data)
        training, held = split_held_out(everything, plan.job.evaluate)
        if eval_data is not None:
            held = _as_data(eval_data)
        elif held is None and plan.job.evaluate.is_enabled:
            text = "the plan asks for evaluations, and no samples were passed"
            raise PlanError(text, fix="pass held_out=...", location="held_out")
        resumed = resume(trainer.executor, plan, world, everything.digest)
        evaluating = None if held is None else EvalSamples(held, plan, plan.data_index(world.rank))
        with prefetch(open_feed(training, plan, world.rank), plan.run.workers) as feed:
            return play_all(
                trainer.executor,
                plan,
                feed,
                world,
                should_stop,
                callbacks,
                eval_samples=evaluating,
                eval_history=resumed.eval_history,
            )


def _as_data(samples: Samples) -> Dataset:
    return ExampleDataset(samples) if isinstance(samples, Mapping) else samples
