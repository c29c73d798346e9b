"""float16 with pipeline stages: an overflow in one stage skips the step on all ranks, and all change the loss
scale.
"""

from math import inf

import pytest
import torch

from meshwright.api import make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.engine.params.flat_param_store import FlatParamStore
from meshwright.engine.runtime.rank_state import Metrics
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.job import LossGuard, OptimizerConfig, PrecisionConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.engine.one_device import bits
from tests.tiny_model import analyzed_model, tiny_job, token_samples

AUTOCAST = PrecisionConfig(compute="float16", loss_scale=1024.0)
HALF = PrecisionConfig("float16", "float16", "float32", master="float32", loss_scale=1024.0)
LAYOUTS: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "two stages": (Mesh(pp=2), (Pipeline(),)),
    "three stages": (Mesh(pp=3), (Pipeline(),)),
    "shards": (Mesh(pp=2, dp_shard=2), (Pipeline(), BatchSplit(axis="dp_shard"), ZeRO())),
}


def steps(
    precision: PrecisionConfig, layout: str, planted: int = -1, guard: LossGuard | None = None
) -> list[tuple[list[Metrics], list[bool]]]:
    """Each rank's metrics of three steps, and whether each moved its weights; in the second a gradient of
    `planted` is inf.
    """
    mesh, strategies = LAYOUTS[layout] if layout else (Mesh(), ())
    job = tiny_job(
        precision=precision,
        optimizer=OptimizerConfig("sgd", lr=0.1, weight_decay=0.0),
        guard=guard or LossGuard("off"),
    )
    plan = make_plan(analyzed_model(), job, mesh, strategies, 2)

    def rank(world: World) -> tuple[list[Metrics], list[bool]]:
        with parallelize(analyzed_model(), plan, world=world) as engine:
            found, moved = list[Metrics](), list[bool]()
            square, store = FlatParamStore.compute_sqnorm, engine.executor.state.flat_params

            def planting() -> None:
                held = next(iter(store.update_groups()), None)
                for tensor in [
                    p.grad for p in engine.executor.state.trained_module.trainable_parameters.values()
                ] + list(held.gradients if held else ()):
                    if tensor is not None and len(found) == 1 and world.rank == planted:
                        tensor.view(-1)[0] = inf
                square(store)

            store.compute_sqnorm = planting
            for _ in range(3):
                before = bits(engine.executor.gather_parameters())
                found.append(engine.step(engine.local_batch(token_samples(12))))
                moved.append(before != bits(engine.executor.gather_parameters()))
            return found, moved

    return run_on_threads(rank, mesh)


@pytest.mark.parametrize("precision", [AUTOCAST, HALF], ids=["autocast", "half"])
@pytest.mark.parametrize(
    ("layout", "planted"), [("two stages", 0), ("two stages", 1), ("three stages", 1), ("shards", 3)]
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(layout: str, planted: int, precision: PrecisionConfig):
    found = steps(precision, layout, planted)
    for metrics, moved in found:
        assert [each.overflow for each in metrics] == [False, True, False]
        assert [each.loss_scale for each in metrics] == [1024.0, 512.0, 512.0]
        assert moved == [True, False, True]
        assert [each.loss for each in metrics] == [each.loss for each in found[0][0]]


@pytest.mark.parametrize("precision", [AUTOCAST, HALF], ids=["autocast", "half"])
def test_without_one_it_trains_as_one_device_does(precision: PrecisionConfig):
    ((expected, _),) = steps(precision, "")
    for metrics, moved in steps(precision, "three stages"):
        assert all(moved)
        assert [each.loss for each in metrics] == pytest.approx([each.loss for each in expected], rel=2e-3)
        assert [each.grad_norm for each in metrics] == pytest.approx(
            [each.grad_norm for each in expected], rel=1e-2
        )


def test_the_guard_leaves_an_overflow_to_the_scale():
    for metrics, _ in steps(AUTOCAST, "two stages", 0, LossGuard("skip", factor=0.0)):
        assert [each.spike for each in metrics] == [None] * 3
        assert [each.overflow for each in metrics] == [False, True, False]


def test_ranks_that_check_only_their_own_gradients_are_noticed(monkeypatch):
    def own(self: FlatParamStore) -> torch.Tensor:
        mine = [
            p.grad for p in self._state.trained_module.trainable_parameters.values() if p.grad is not None
        ]
        return torch.linalg.vector_norm(torch.stack([each.float().norm() for each in mine]))

    monkeypatch.setattr(FlatParamStore, "total_norm", property(own))
    scales = [metrics[1].loss_scale for metrics, _ in steps(AUTOCAST, "two stages", 0)]
    assert scales == [512.0, 1024.0]
