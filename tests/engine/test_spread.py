"""What every rank gets of a model whose parts lie on several: weights and buffers as one device has them."""

import pytest
import torch

from meshwright.api import build, make_plan, read
from meshwright.comm.group import World
from meshwright.core.mesh import Mesh
from meshwright.engine import spread
from meshwright.engine.spread import spread_buffers
from meshwright.strategies.pipeline.pipeline import Pipeline
from meshwright.testing.spawn import on_threads
from tests.engine.alone import part
from tests.engine.test_relay import Skips
from tests.tiny import rows, tiny_job

DATA = rows(4)


def held(mesh: Mesh) -> list[dict[str, torch.Tensor]]:
    """Weights and buffers after a step, as each rank tells them."""
    reading = read(Skips, part(DATA, 0, 2))
    plan = make_plan(reading, tiny_job(batch=4), mesh, (Pipeline(),) if mesh.pp > 1 else (), 4)

    def rank(world: World) -> dict[str, torch.Tensor]:
        with build(reading, plan, world=world) as engine:
            engine.step(engine.share(DATA))
            return engine.player.parameters() | spread_buffers(plan, engine.player.state, "TEST")

    return on_threads(rank, mesh)


@pytest.mark.parametrize("ranks", [2, 3])
def test_statistics_of_all_layers_are_told_by_the_rank_that_takes_them(ranks: int):
    (wanted,) = held(Mesh())
    assert wanted["layers.3.1.num_batches_tracked"] == 1
    for found in held(Mesh(pp=ranks)):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def test_buffers_that_are_not_told_are_noticed(monkeypatch):
    monkeypatch.setattr(spread, "persistent_buffers", lambda module: iter(()))
    (wanted,) = held(Mesh())
    monkeypatch.undo()
    assert held(Mesh(pp=2))[0].keys() - wanted.keys() >= {"layers.0.1.running_mean", "layers.3.1.running_var"}
