"""A checkpoint of parts is that of the model: any other plan takes it up, moments included, and vice versa."""

from pathlib import Path

import pytest

from meshwright.api import default_strategies
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.strategies.pipeline.pipeline import Pipeline
from tests.strategies.crossing import crosses
from tests.strategies.tensor.llama import known, planned

MESHES = {
    "two parts": Mesh(pp=2),
    "three parts": Mesh(pp=3),
    "parts in shards": Mesh(pp=2, dp_shard=2),
    "copies": Mesh(dp_replicate=2),
    "alone": Mesh(),
}


def plan_on(mesh: Mesh) -> Plan:
    """With the default strategies, and a pipeline where the mesh has one."""
    pipeline = (Pipeline(),) if mesh.pp > 1 else ()
    return planned(known(), mesh, (*pipeline, *default_strategies(mesh, known().anatomy)), 1)[1]


@pytest.mark.parametrize(
    ("saved", "taken"),
    [("two parts", "alone"), ("alone", "three parts"), ("three parts", "copies"), ("parts in shards", "two parts")],
)
def test_a_checkpoint_crosses(saved: str, taken: str, tmp_path: Path):
    crosses(known(), plan_on(MESHES[saved]), plan_on(MESHES[taken]), tmp_path)
