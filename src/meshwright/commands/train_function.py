"""The loop of the command, for people who have an engine: `meshwright.train(engine, data)` in place of a loop of one's own.

    engine = meshwright.build(reading, plan)
    ended  = meshwright.train(engine, rows, held_out=other_rows, callbacks=[Callback(on_evaluate=...)])

It does what `meshwright train` does with a config: shuffles, steps, evaluates, saves, writes metrics, and when it is
called again, goes on from the newest checkpoint. A rank that runs out of memory says what takes less.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from meshwright.api import Engine
from meshwright.plan.job.errors import PlanError
from meshwright.run.checkpoint.resume import resume
from meshwright.run.data.eval_split import Evaluating, divided
from meshwright.run.data.feed import Data, ExampleData, open_feed
from meshwright.run.data.prefetch import ahead
from meshwright.run.telemetry.callbacks import Callback
from meshwright.run.training.train_loop import Ended
from meshwright.run.training.train_loop import train as play_all

Samples = Data | Mapping[str, torch.Tensor]


def train(
    engine: Engine,
    data: Samples,
    *,
    held_out: Samples | None = None,
    callbacks: Sequence[Callback] = (),
    stopping: Callable[[], bool] = lambda: False,
) -> Ended:
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
    plan, world = engine.plan, engine.world
    with engine.telling:
        everything = _as_data(data)
        training, held = divided(everything, plan.job.evaluate)
        if held_out is not None:
            held = _as_data(held_out)
        elif held is None and plan.job.evaluate.asked_for:
            text = "the plan asks for evaluations, and no samples were passed"
            raise PlanError(text, fix="pass held_out=...", where="held_out")
        resumed = resume(engine.player, plan, world, everything.digest)
        evaluating = None if held is None else Evaluating(held, plan, plan.data_index(world.rank))
        with ahead(open_feed(training, plan, world.rank), plan.run.workers) as feed:
            return play_all(engine.player, plan, feed, world, stopping, callbacks, evaluating=evaluating, so_far=resumed.so_far)


def _as_data(samples: Samples) -> Data:
    return ExampleData(samples) if isinstance(samples, Mapping) else samples
