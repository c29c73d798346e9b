"""A checkpoint of squares and cubes is that of the model: any other plan takes it up, moments included, and vice versa."""

from pathlib import Path

import pytest

from meshwright.core.mesh import Mesh
from meshwright.core.strategy import Strategy
from meshwright.strategies.data.batch import Batch
from meshwright.strategies.data.zero import Zero
from meshwright.strategies.tensor.cube import Cube
from meshwright.strategies.tensor.grid import Grid
from tests.strategies.crossing import crosses
from tests.strategies.tensor.llama import planned
from tests.strategies.tensor.squares import known_even

DATA = (Batch(axis="dp_shard"), Zero())
PLANS: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "alone": (Mesh(), ()),
    "square": (Mesh(dp_shard=2, tp=2), (Grid(), *DATA)),
    "cube": (Mesh(dp_shard=2, tp_depth=2, tp=2), (Cube(), *DATA)),
}


@pytest.mark.parametrize(("saved", "taken"), [("square", "cube"), ("cube", "alone"), ("alone", "square")])
def test_a_checkpoint_crosses(saved: str, taken: str, tmp_path: Path):
    reading = known_even(tie_word_embeddings=True)
    (_, before), (_, after) = planned(reading, *PLANS[saved]), planned(reading, *PLANS[taken])
    crosses(reading, before, after, tmp_path)
