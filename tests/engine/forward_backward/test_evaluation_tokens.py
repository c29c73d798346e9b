"""Evaluation under context parallelism equals one device, and every token counts once."""

import pytest

from meshwright.api import make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.engine.forward_backward.evaluation import Evaluation
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.engine.one_device import sample_range
from tests.parallel.data.tokenwise_model import TokenSharding
from tests.tiny_model import analyzed_model, tiny_job, token_samples

DATA = token_samples(24)
ANALYZED = analyzed_model(tied=True)
LAYOUTS: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "tokens": (Mesh(cp=3), (TokenSharding(), DDP(axis="cp"))),
    "samples and tokens": (Mesh(dp_replicate=2, cp=3), (BatchSplit(), TokenSharding(), DDP())),
    "shards": (Mesh(dp_shard=3, cp=2), (BatchSplit(axis="dp_shard"), TokenSharding(), ZeRO())),
}


def found(mesh: Mesh, strategies: tuple[Strategy, ...]) -> list[list[Evaluation]]:
    """Returns what each rank finds before and after a step."""
    plan = make_plan(ANALYZED, tiny_job(), mesh, strategies, 2)

    def rank(world: World) -> list[Evaluation]:
        with parallelize(ANALYZED, plan, world=world) as engine:
            mine = [engine.local_batch(sample_range(DATA, at, at + 12)) for at in (0, 12)]
            before = engine.executor.evaluate(mine)
            engine.step(engine.local_batch(sample_range(DATA, 0, 12)))
            return [before, engine.executor.evaluate(mine)]

    return run_on_threads(rank, mesh)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_equals_one_device_over_as_many_tokens(layout: str):
    (expected,) = found(Mesh(), ())
    for mine in found(*LAYOUTS[layout]):
        assert [each.loss for each in mine] == pytest.approx([each.loss for each in expected], rel=1e-10)
        assert [each.tokens for each in mine] == [each.tokens for each in expected]
