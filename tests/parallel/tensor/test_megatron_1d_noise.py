"""The gradient noise scale under tensor parallelism: squares are summed over slices, and replicated weights
count once.
"""

import pytest

from meshwright.api import make_plan
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.engine.step.test_gradient_noise import noisy
from tests.parallel.tensor.declared_pairs import pairs
from tests.tiny_model import executor_of, tiny_job, token_samples

SHARD = BatchSplit(axis="dp_shard")
LAYOUTS = {
    "alone": ({}, (), 3),
    "ddp": ({"dp_replicate": 2}, None, 0),
    "stage 1": ({"dp_shard": 2}, (SHARD, ZeRO(stage=1)), 3),
    "stage 3": ({"dp_shard": 2}, (SHARD, ZeRO()), 3),
}


@pytest.fixture(scope="module")
def analyzed() -> AnalyzedModel:
    return pairs()


def plan_of(analyzed: AnalyzedModel, layout: str, ranks: int) -> Plan:
    sizes, strategies, micro = LAYOUTS[layout]
    chosen = strategies if strategies is None or ranks == 1 else (TensorParallel(), *strategies)
    return make_plan(analyzed, noisy(tiny_job()), Mesh(**sizes, tp=ranks), chosen, micro)


def measured(analyzed: AnalyzedModel, plan: Plan) -> list[float]:
    """The noise scale of three steps, the same on every rank."""

    def rank(world: World) -> list[float]:
        executor, local_batches = (
            executor_of(analyzed, plan, world),
            open_local_batches(ExampleDataset(token_samples()), plan, world.rank),
        )
        return [
            executor.step(local_batches.batch(step)).noise_scale or -1.0 for step in range(3)
        ]  # -1: not known yet

    found = run_on_threads(rank, plan.mesh)
    assert all(each == found[0] for each in found)
    return found[0]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_equals_that_of_the_same_microbatches_without_tensor_parallelism(
    analyzed: AnalyzedModel, layout: str, ranks: int
):
    plan = plan_of(analyzed, layout, ranks)
    assert static_checks(plan) == []
    expected = measured(analyzed, plan_of(analyzed, layout, 1))
    assert any(each > 0 for each in expected)
    assert measured(analyzed, plan) == pytest.approx(expected, rel=1e-8)


def test_weights_that_count_twice_are_noticed(analyzed: AnalyzedModel, monkeypatch: pytest.MonkeyPatch):
    expected = measured(analyzed, plan_of(analyzed, "ddp", 1))
    monkeypatch.setattr(
        RankView,
        "params_counted_in_sum",
        property(lambda view: {each.param.name for each in view.param_shardings}),
    )
    assert measured(analyzed, plan_of(analyzed, "ddp", 2)) != pytest.approx(expected, rel=1e-3)
