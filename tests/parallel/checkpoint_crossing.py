"""Saves a checkpoint under one plan and loads it under another, with ranks as threads."""

from pathlib import Path

import pytest
import torch

from meshwright.api import parallelize
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.plan.plan import Plan
from meshwright.testing.ranks import run_on_threads
from tests.parallel.tensor.odd_llama import batches

Found = tuple[dict[str, torch.Tensor], float]


def loads_under_other_plan(analyzed: AnalyzedModel, saved: Plan, taken: Plan, folder: Path) -> None:
    """Train under `saved`, save, take it up under `taken`: the same parameters to the bit, and the same
    losses afterwards.
    """
    (parameters, losses), *_ = run_on_threads(
        lambda world: _train_and_save(world, analyzed, saved, None, folder), saved.mesh
    )
    into = next(path for path in sorted(folder.iterdir()) if path.is_dir())
    for found, loss in run_on_threads(
        lambda world: _train_and_save(world, analyzed, taken, into, None), taken.mesh
    ):
        for name, value in parameters.items():
            assert torch.equal(found[name], value), name
        assert loss == pytest.approx(losses, rel=1e-5)


def _train_and_save(
    world: World, analyzed: AnalyzedModel, plan: Plan, folder: Path | None, into: Path | None
) -> Found:
    """The parameters after what is in `folder`, or after two steps, saved into `into` then; and two more
    losses.
    """
    with parallelize(analyzed, plan, world=world) as engine:
        if folder is not None:
            engine.load(folder)
        else:
            for batch in batches(2):
                engine.step(engine.local_batch(batch))
        if into is not None:
            engine.save(into)
        found = {name: value.clone() for name, value in engine.executor.gather_parameters().items()}
        first = engine.step(engine.local_batch(batches(3)[2])).loss
        return found, first + engine.step(
            engine.local_batch(batches(1)[0])
        ).loss  # the second shows the moments
