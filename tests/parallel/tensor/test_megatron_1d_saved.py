"""Checkpoints of tensor-parallel plans are loaded under any other plan, optimizer states included, and vice
versa.
"""

from pathlib import Path

import pytest

from meshwright.plan.sharding.mesh import Mesh
from tests.parallel.checkpoint_crossing import loads_under_other_plan
from tests.parallel.tensor.odd_llama import analyzed_llama, planned

MESHES = {
    "sharded": Mesh(tp=2),
    "unevenly": Mesh(tp=3),
    "in shards": Mesh(dp_shard=2, tp=2),
    "ddp": Mesh(dp_replicate=2),
    "alone": Mesh(),
}


@pytest.mark.parametrize(
    ("saved", "taken"),
    [
        ("sharded", "alone"),
        ("alone", "unevenly"),
        ("unevenly", "in shards"),
        ("in shards", "sharded"),
        ("in shards", "ddp"),
        ("ddp", "in shards"),
    ],
)
def test_a_checkpoint_is_loaded_under_another_plan(saved: str, taken: str, tmp_path: Path):
    (analyzed, before), (_, after) = (
        planned(analyzed_llama(), MESHES[saved]),
        planned(analyzed_llama(), MESHES[taken]),
    )
    loads_under_other_plan(analyzed, before, after, tmp_path)
