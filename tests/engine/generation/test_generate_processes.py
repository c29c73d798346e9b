"""Generation on processes, where a message is only valid after its wait."""

import pytest

from meshwright.comm.collectives.group import World
from meshwright.engine.generation.sampling_params import GeneratedAnswer
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool
from tests.engine.generation.test_generate import DRAWN, answers_of, answers_on

MESHES = {"shards": Mesh(dp_shard=2), "stages": Mesh(pp=2), "slices": Mesh(tp=2), "experts": Mesh(ep=2)}
MESHES["divided columns"] = Mesh(cp=2)


def answers_of_rank(world: World, layout: str) -> list[GeneratedAnswer]:
    """The answers on one rank."""
    divides = layout == "divided columns"
    family = "llama" if divides else "mixtral"  # which has no window
    how = {"max_num_seqs": 2, "decode_context_parallel": divides}
    return answers_on(world, family, (MESHES[layout], None), DRAWN, **how)


def error_of_rank(world: World, layout: str) -> str:
    """What a rank raises if the callback of one does."""

    def on_token(index: int, token: int) -> None:
        if world.rank == 1:
            raise ValueError("no space left")

    try:
        answers_on(world, "mixtral", (MESHES[layout], None), DRAWN, on_token=on_token)
    except (ValueError, PlanError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", ["shards", "stages"])
def test_a_callback_that_raises_ends_all(process_pool: ProcessPool, layout: str):
    first, second = process_pool.run(error_of_rank, MESHES[layout], layout)
    assert second == "no space left"
    assert "on_token or the tokenizer raised on rank 1: ValueError: no space left" in first


@pytest.mark.parametrize("layout", MESHES)
def test_drawn_answers_are_those_of_one_device(process_pool: ProcessPool, layout: str):
    family = "llama" if layout == "divided columns" else "mixtral"
    expected = [each.tokens for each in answers_of(family, (Mesh(), None), DRAWN)[0]]
    for answers in process_pool.run(answers_of_rank, MESHES[layout], layout):
        assert [each.tokens for each in answers] == expected
