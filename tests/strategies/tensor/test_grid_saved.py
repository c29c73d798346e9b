"""A checkpoint of squares and cubes is that of the model: any other plan takes it up, moments included, and vice versa."""

from pathlib import Path

import pytest
import torch

from meshwright.core.mesh import Mesh
from meshwright.core.strategy import Strategy
from meshwright.strategies.data.batch import Batch
from meshwright.strategies.data.zero import Zero
from meshwright.strategies.tensor.cube import Cube
from meshwright.strategies.tensor.grid import Grid
from meshwright.testing.spawn import on_threads
from tests.strategies.tensor.llama import planned
from tests.strategies.tensor.squares import known_even
from tests.strategies.tensor.test_line_saved import Found, played

DATA = (Batch(axis="dp_shard"), Zero())
PLANS: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "alone": (Mesh(), ()),
    "square": (Mesh(dp_shard=2, tp=2), (Grid(), *DATA)),
    "cube": (Mesh(dp_shard=2, tp_depth=2, tp=2), (Cube(), *DATA)),
}


def play(plan: str, folder: Path | None, into: Path | None) -> list[Found]:
    """Of every rank the parameters after what is in `folder`, or after two steps, saved into `into` then; and two more losses."""
    mesh, strategies = PLANS[plan]
    reading, made = planned(known_even(tie_word_embeddings=True), mesh, strategies)
    return on_threads(lambda world: played(world, reading, made, folder, into), mesh)


@pytest.mark.parametrize(("saved", "taken"), [("square", "cube"), ("cube", "alone"), ("alone", "square")])
def test_a_checkpoint_crosses(saved: str, taken: str, tmp_path: Path):
    before = play(saved, None, tmp_path)
    folder = next(path for path in sorted(tmp_path.iterdir()) if path.is_dir())
    for parameters, loss in play(taken, folder, None):
        for name, value in before[0][0].items():
            assert torch.equal(parameters[name], value), name
        assert loss == pytest.approx(before[0][1], rel=1e-5)
