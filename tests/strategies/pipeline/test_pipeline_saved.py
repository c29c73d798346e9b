"""A checkpoint of parts is that of the model: any other plan takes it up, moments included, and vice versa."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from meshwright.api import default_strategies
from meshwright.core.mesh import Mesh
from meshwright.core.strategy import Strategy
from meshwright.strategies.pipeline.pipeline import Pipeline
from tests.strategies.crossing import crosses
from tests.strategies.tensor.llama import known

MESHES = {
    "two parts": Mesh(pp=2),
    "three parts": Mesh(pp=3),
    "parts in shards": Mesh(pp=2, dp_shard=2),
    "copies": Mesh(dp_replicate=2),
    "alone": Mesh(),
}


def chosen(mesh: Mesh) -> Sequence[Strategy]:
    """The default strategies, and a pipeline where the mesh has one."""
    return (*((Pipeline(),) if mesh.pp > 1 else ()), *default_strategies(mesh, known().anatomy))


@pytest.mark.parametrize(
    ("saved", "taken"),
    [("two parts", "alone"), ("alone", "three parts"), ("three parts", "copies"), ("parts in shards", "two parts")],
)
def test_a_checkpoint_crosses(saved: str, taken: str, tmp_path: Path):
    crosses(MESHES[saved], MESHES[taken], tmp_path, chosen, 1)
