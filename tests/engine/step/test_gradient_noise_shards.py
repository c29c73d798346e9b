"""The gradient noise scale with sharded gradients: by hand from the gradient of each part of the batch."""

import pytest

from meshwright.api import make_plan
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from tests.engine.noise_steps import train_and_record
from tests.engine.one_device import sample_range
from tests.engine.step.test_gradient_noise import ANALYZED, averaged, by_hand, noisy
from tests.tiny_model import tiny_job, token_samples

SHARD = BatchSplit(axis="dp_shard")
LAYOUTS = {
    **{f"stage {stage}": (Mesh(dp_shard=3), (SHARD, ZeRO(stage=stage))) for stage in (1, 2, 3)},
    **{
        f"stage {stage}, hybrid": (
            Mesh(dp_replicate=2, dp_shard=3),
            (BatchSplit(), SHARD, ZeRO(stage=stage, replicate_axis="dp_replicate")),
        )
        for stage in (1, 2, 3)
    },
}


@pytest.mark.parametrize("micro_batch", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_equals_the_formula_on_each_separately_summed_part_of_the_batch(layout: str, micro_batch: int):
    """Stage 1 sums what a rank has accumulated, stages 2 and 3 each microbatch: these are then the parts."""
    mesh, strategies = LAYOUTS[layout]
    plan = make_plan(ANALYZED, noisy(tiny_job()), mesh, strategies, micro_batch)
    outcome, models = train_and_record(mesh, strategies, micro_batch)
    batches_by_rank = [
        open_local_batches(ExampleDataset(token_samples()), plan, rank) for rank in range(mesh.world_size)
    ]
    found = []
    for step, model in enumerate(models):
        parts = [local_batches.batch(step) for local_batches in batches_by_rank]
        size = plan.local_batch if "stage 1" in layout else plan.micro_batch
        small = [
            sample_range(each, at, at + size) for each in parts for at in range(0, plan.local_batch, size)
        ]
        found.append(by_hand(model, parts, [each for each in small if (each["labels"] >= 0).any()]))
    expected = averaged(found)
    for metrics in outcome:
        assert [each.noise_scale for each in metrics] == pytest.approx(expected, rel=1e-8)
