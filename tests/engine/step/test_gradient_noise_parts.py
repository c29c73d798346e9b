"""The gradient noise scale with pipeline stages: by hand from the gradient of each part of the batch.

By hand from the gradient of each part of the batch.
"""

import pytest

from meshwright.api import make_plan
from meshwright.comm.collectives.group import World
from meshwright.engine.step.gradient_noise import GradientNoiseScale
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from meshwright.testing.ranks import run_on_threads
from tests.engine.noise_steps import train_and_record
from tests.engine.one_device import sample_range
from tests.engine.step.test_gradient_noise import ANALYZED, averaged, by_hand, noisy
from tests.parallel.tensor.declared_pairs import pairs
from tests.tiny_model import analyzed_model, executor_of, tiny_job, token_samples

SHARD = BatchSplit(axis="dp_shard")
ALONE: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "two stages": (Mesh(pp=2), (Pipeline(),)),
    "three stages": (Mesh(pp=3), (Pipeline(schedule="gpipe"),)),
    "two virtual stages on each of two ranks": (
        Mesh(pp=2),
        (Pipeline(schedule="interleaved", virtual_stages=2),),
    ),
}
BESIDE: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "replicas": (Mesh(pp=2, dp_replicate=3), (Pipeline(), BatchSplit(), DDP())),
    "stage 1": (Mesh(pp=2, dp_shard=3), (Pipeline(), SHARD, ZeRO(stage=1))),
    "stage 3": (Mesh(pp=2, dp_shard=3), (Pipeline(schedule="interleaved", virtual_stages=2), SHARD, ZeRO())),
}


@pytest.mark.parametrize("layout", ALONE)
def test_one_data_rank_compares_its_first_micro_batch_with_the_whole(layout: str):
    metrics, models = train_and_record(*ALONE[layout], 3)
    local_batches = open_local_batches(
        ExampleDataset(token_samples()), make_plan(ANALYZED, tiny_job(), Mesh(), (), 3), 0
    )
    batches = [local_batches.batch(step) for step in range(3)]
    expected = averaged(
        by_hand(model, [each], [sample_range(each, 0, 3)])
        for model, each in zip(models, batches, strict=True)
    )
    for mine in metrics:
        assert [each.noise_scale for each in mine] == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("layout", BESIDE)
def test_it_equals_the_formula_on_each_separately_summed_part_of_the_batch(layout: str):
    mesh, strategies = BESIDE[layout]
    metrics, models = train_and_record(mesh, strategies)
    plan = make_plan(ANALYZED, tiny_job(), Mesh(dp_replicate=3), None, 2)
    batches_by_rank = [open_local_batches(ExampleDataset(token_samples()), plan, rank) for rank in range(3)]
    found = []
    for step, model in enumerate(models):
        parts = [local_batches.batch(step) for local_batches in batches_by_rank]
        size = 2 if layout == "stage 3" else 4
        small = [sample_range(each, at, at + size) for each in parts for at in range(0, 4, size)]
        found.append(by_hand(model, parts, [each for each in small if (each["labels"] >= 0).any()]))
    for mine in metrics:
        assert [each.noise_scale for each in mine] == pytest.approx(averaged(found), rel=1e-8)


def test_tensor_parallel_slices_of_stages_count_each_weight_once():
    analyzed = pairs(layers=4)

    def scales(mesh: Mesh, strategies: tuple[Strategy, ...]) -> list[list[float | None]]:
        plan = make_plan(analyzed, noisy(tiny_job()), mesh, strategies, 3)

        def rank(world: World) -> list[float | None]:
            executor, local_batches = (
                executor_of(analyzed, plan, world),
                open_local_batches(ExampleDataset(token_samples()), plan, world.rank),
            )
            found = [executor.step(local_batches.batch(step)).noise_scale for step in range(3)]
            executor.close()
            return found

        return run_on_threads(rank, mesh)

    (expected,) = scales(Mesh(), ())
    assert scales(Mesh(pp=2, tp=3), (Pipeline(), TensorParallel())) == [pytest.approx(expected, rel=1e-8)] * 6


def test_weights_that_several_stages_use_are_refused():
    with pytest.raises(PlanError, match="used by several stages, and no rank has the gradient of one part"):
        make_plan(analyzed_model(tied=True), noisy(tiny_job()), Mesh(pp=2), (Pipeline(),), 2)


def test_a_stage_that_does_not_send_its_squares_is_noticed(monkeypatch):
    truth, _ = train_and_record(*BESIDE["replicas"])
    measure = GradientNoiseScale.compute_grad_sqnorm
    monkeypatch.setattr(
        GradientNoiseScale,
        "compute_grad_sqnorm",
        lambda self, action: None if self._reports_weights else measure(self, action),
    )
    found, _ = train_and_record(*BESIDE["replicas"])
    assert found[0][-1].noise_scale != pytest.approx(truth[0][-1].noise_scale, rel=1e-3)
