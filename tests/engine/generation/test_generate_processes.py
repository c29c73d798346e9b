"""Generation on processes, where a message is only valid after its wait."""

import pytest

from meshwright.comm.collectives.group import World
from meshwright.engine.generation.sampling_params import GeneratedAnswer
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool
from tests.engine.generation.test_generate import DRAWN, answers_of, answers_on

MESHES = {"shards": Mesh(dp_shard=2), "stages": Mesh(pp=2), "slices": Mesh(tp=2), "experts": Mesh(ep=2)}


def answers_of_rank(world: World, layout: str) -> list[GeneratedAnswer]:
    """The answers on one rank."""
    return answers_on(world, "mixtral", (MESHES[layout], None), DRAWN, max_num_seqs=2)


@pytest.mark.parametrize("layout", MESHES)
def test_drawn_answers_are_those_of_one_device(process_pool: ProcessPool, layout: str):
    expected = [each.tokens for each in answers_of("mixtral", (Mesh(), None), DRAWN)[0]]
    for answers in process_pool.run(answers_of_rank, MESHES[layout], layout):
        assert [each.tokens for each in answers] == expected
