"""Checkpoints of modes 2d and 3d are loaded under any other plan, optimizer states included, and vice
versa.
"""

from pathlib import Path

import pytest

from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.tensor.cube_3d import TensorParallel3D
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from tests.parallel.checkpoint_crossing import loads_under_other_plan
from tests.parallel.tensor.even_llama import analyzed_even_llama
from tests.parallel.tensor.odd_llama import planned

DATA = (BatchSplit(axis="dp_shard"), ZeRO())
PLANS: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "alone": (Mesh(), ()),
    "square": (Mesh(dp_shard=2, tp=2), (TensorParallel2D(), *DATA)),
    "3d": (Mesh(dp_shard=2, tp_depth=2, tp=2), (TensorParallel3D(), *DATA)),
}


@pytest.mark.parametrize(("saved", "taken"), [("square", "3d"), ("3d", "alone"), ("alone", "square")])
def test_a_checkpoint_is_loaded_under_another_plan(saved: str, taken: str, tmp_path: Path):
    analyzed = analyzed_even_llama(tie_word_embeddings=True)
    (_, before), (_, after) = planned(analyzed, *PLANS[saved]), planned(analyzed, *PLANS[taken])
    loads_under_other_plan(analyzed, before, after, tmp_path)
