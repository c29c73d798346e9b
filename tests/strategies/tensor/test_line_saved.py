"""A checkpoint of divided matrices is that of the model: any other plan takes it up, moments included, and vice versa."""

from pathlib import Path

import pytest
import torch

from meshwright.api import build
from meshwright.comm.group import World
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.model.reading import Reading
from meshwright.testing.spawn import on_threads
from tests.strategies.tensor.llama import batches, known, planned

MESHES = {
    "divided": Mesh(tp=2),
    "unevenly": Mesh(tp=3),
    "in shards": Mesh(dp_shard=2, tp=2),
    "copies": Mesh(dp_replicate=2),
    "alone": Mesh(),
}


Found = tuple[dict[str, torch.Tensor], float]


def play(mesh: Mesh, folder: Path | None, into: Path | None) -> list[Found]:
    """Of every rank the parameters after what is in `folder`, or after two steps, saved into `into` then; and two more losses."""
    reading, plan = planned(known(), mesh)
    return on_threads(lambda world: played(world, reading, plan, folder, into), mesh)


def played(world: World, reading: Reading, plan: Plan, folder: Path | None, into: Path | None) -> Found:
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


@pytest.mark.parametrize(
    ("saved", "taken"),
    [
        ("divided", "alone"),
        ("alone", "unevenly"),
        ("unevenly", "in shards"),
        ("in shards", "divided"),
        ("in shards", "copies"),
        ("copies", "in shards"),
    ],
)
def test_a_checkpoint_crosses(saved: str, taken: str, tmp_path: Path):
    before = play(MESHES[saved], None, tmp_path)
    folder = next(path for path in sorted(tmp_path.iterdir()) if path.is_dir())
    after = play(MESHES[taken], folder, None)
    for parameters, loss in after:
        for name, value in before[0][0].items():
            assert torch.equal(parameters[name], value), name
        assert loss == pytest.approx(before[0][1], rel=1e-5)
