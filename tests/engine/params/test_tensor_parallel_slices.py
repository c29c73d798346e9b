"""The slices of a weight on one rank: read by rows where possible, and joined again."""

import pytest
import torch

from meshwright.comm.collectives.group import World
from meshwright.engine.params.tensor_parallel_slices import ParamSlices
from meshwright.model.tensors.lazy_mapping import LazyTensors, Region, narrow_to
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from tests.parallel.tensor.odd_llama import SIZES, llama, planned

TABLE, NORM = "model.embed_tokens.weight", "model.norm.weight"
WHOLE = torch.arange(SIZES["vocab_size"] * 2.0).view(-1, 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_of_other_ranks_are_not_read_of_a_table(ranks: int):
    _, plan = planned(llama(), Mesh(tp=ranks), (VocabParallel(),))

    def body(world: World) -> tuple[torch.Tensor, list[object], torch.Tensor]:
        asked: list[object] = []

        def values(name: str, region: Region = ()) -> torch.Tensor:
            asked.append((name, *region))
            return narrow_to(WHOLE, region) if region else WHOLE

        slices = ParamSlices(plan.for_rank(world.rank), world)
        given = LazyTensors([TABLE, NORM], values, values)
        mine = slices.load_slice(TABLE, given)
        assert slices.load_slice(NORM, given) is WHOLE
        assert torch.equal(mine, slices.local_slice(TABLE, WHOLE))
        return mine, asked, slices.load_slice(TABLE, {TABLE: WHOLE})

    found = run_on_threads(body, plan.mesh)
    assert torch.equal(torch.cat([mine for mine, _, _ in found]), WHOLE)
    assert all(torch.equal(mine, plain) for mine, _, plain in found)
    first = 0
    for mine, asked, _ in found:
        assert asked == [(TABLE, range(first, first + len(mine))), (NORM,)]
        first += len(mine)
