"""Averages of shards in place and of parameters in a buffer, in the dtype of what is stepped."""

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.testing.ranks import run_on_threads
from tests.parallel.outer.site_plans import ANALYZED, samples_of, site_plan
from tests.tiny_model import executor_of

MIXED = mw.PrecisionConfig("bfloat16", "bfloat16", "float32", master="float32")
NARROW = mw.PrecisionConfig("bfloat16", "bfloat16", "float32")
WIDE = mw.PrecisionConfig()


@pytest.mark.parametrize(
    ("inner", "precision", "buffers"),
    [
        ("zero 2", WIDE, 0),
        ("zero 2", MIXED, 0),
        ("one rank each", WIDE, 2),
        ("one rank each", MIXED, 2),
        ("zero 2", NARROW, 2),
    ],
)
def test_every_site_goes_on_with_the_same_mean_of_what_is_stepped(
    inner: str, precision: mw.PrecisionConfig, buffers: int
):
    _, plan = site_plan(inner, mw.LocalSGD(sync_every=2), precision=precision)
    actions = plan.for_rank(0).actions
    averages = [each for each in actions if each.kind == "AVERAGE"]
    packs = [each for each in actions if each.kind == "PACK_ROUND"]
    assert len({hold.name for each in packs for hold in each.allocations}) == buffers
    assert {each.transfer.dtype for each in averages} == {"float32"}

    def body(world: World) -> list[dict[str, torch.Tensor]]:
        executor, found = executor_of(ANALYZED, plan, world), []
        for step in range(2):
            executor.step(samples_of(plan, world.rank, step))
            found.append({name: each.clone() for name, each in executor.gather_parameters().items()})
        executor.close()
        return found

    ranks = run_on_threads(body, plan.mesh)
    between, after = ([each[step] for each in ranks] for step in range(2))
    assert not torch.equal(between[0]["head.weight"], between[-1]["head.weight"])
    for name, value in after[0].items():
        assert all(torch.equal(value, each[name]) for each in after), name
