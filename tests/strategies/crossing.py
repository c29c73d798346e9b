"""A checkpoint that is saved under one plan and taken up under another, on threads."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from meshwright.api import build
from meshwright.comm.group import World
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.strategy import Strategy
from meshwright.model.reading import Reading
from meshwright.testing.spawn import on_threads
from tests.strategies.tensor.llama import batches, known, planned

Found = tuple[dict[str, torch.Tensor], float]
Chosen = Callable[[Mesh], Sequence[Strategy] | None]


def crosses(saved: Mesh, taken: Mesh, folder: Path, chosen: Chosen = lambda mesh: None, micro: int = 0) -> None:
    """Train on `saved`, save, take it up on `taken`: the same parameters to the bit, and the same losses afterwards.

    `chosen(mesh)` are the strategies of each; None: the default ones.
    """
    reading = known()
    _, first = planned(reading, saved, chosen(saved), micro)
    _, second = planned(reading, taken, chosen(taken), micro)
    (parameters, losses), *_ = on_threads(lambda world: _played(world, reading, first, None, folder), saved)
    into = next(path for path in sorted(folder.iterdir()) if path.is_dir())
    for found, loss in on_threads(lambda world: _played(world, reading, second, into, None), taken):
        for name, value in parameters.items():
            assert torch.equal(found[name], value), name
        assert loss == pytest.approx(losses, rel=1e-5)


def _played(world: World, reading: Reading, plan: Plan, folder: Path | None, into: Path | None) -> Found:
    """The parameters after what is in `folder`, or after two steps, saved into `into` then; and two more losses."""
    with build(reading, plan, world=world) as engine:
        if folder is not None:
            engine.load(folder)
        else:
            for batch in batches(2):
                engine.step(engine.share(batch))
        if into is not None:
            engine.save(into)
        found = {name: value.clone() for name, value in engine.player.parameters().items()}
        first = engine.step(engine.share(batches(3)[2])).loss
        return found, first + engine.step(engine.share(batches(1)[0])).loss  # the second shows the moments
