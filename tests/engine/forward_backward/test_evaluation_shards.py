"""Evaluation with sharded weights equals one device, whichever ranks have samples, and whatever glue uses."""

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.engine.params.flat_param_store import FlatParamStore
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from tests.engine.one_device import sample_range
from tests.tiny_model import WIDTH, Tiny, tiny_job, token_samples

SHARD = BatchSplit(axis="dp_shard")
DATA = token_samples(24)
LAYOUTS = {
    **{f"stage {stage}": (Mesh(dp_shard=3), (SHARD, ZeRO(stage=stage))) for stage in (1, 2, 3)},
    "hybrid": (Mesh(dp_replicate=2, dp_shard=3), (BatchSplit(), SHARD, ZeRO(replicate_axis="dp_replicate"))),
}


class Shifted(Tiny):
    """With a vector that the model itself adds, before its first block and behind it."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids * (self.shift.max() > 0)) + self.shift
        for layer in self.layers:
            x = layer(x)
        return self.head(x + self.shift)


ANALYZED = analyze(Shifted, sample_range(DATA, 0, 2))


def evaluations_of(mesh: Mesh, strategies: tuple) -> list[list[float]]:
    """Returns what each rank finds: in each of three steps the losses of evaluation and of training, and then
    what the model says.
    """
    plan = make_plan(ANALYZED, tiny_job(), mesh, strategies, 2)

    def rank(world: World) -> list[float]:
        with parallelize(ANALYZED, plan, world=world) as engine:
            found = []
            for step in range(3):
                mine = [engine.local_batch(sample_range(DATA, at, at + 12)) for at in (0, 12)]
                mine += (
                    [sample_range(DATA, 0, 1)] if world.rank == 0 else []
                )  # the others have one batch less
                found.append(engine.executor.evaluate(mine).loss)
                found.append(
                    engine.step(
                        engine.local_batch(sample_range(DATA, 12 * (step % 2), 12 * (step % 2) + 12))
                    ).loss
                )
            with engine.full_params() as module:
                found.append(module(DATA["input_ids"][:3]).double().sum().item())
            return found

    return run_on_threads(rank, plan.mesh)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_equals_one_device_before_and_after_steps_and_leaves_training_unchanged(layout: str):
    (expected,) = evaluations_of(Mesh(), ())
    for found in evaluations_of(*LAYOUTS[layout]):
        assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("forgotten", ["unshard_block", "refresh_unsharded"])
def test_weights_that_were_not_gathered_are_noticed(forgotten: str, monkeypatch):
    (expected,) = evaluations_of(Mesh(), ())
    monkeypatch.setattr(FlatParamStore, forgotten, lambda *_, **__: None)
    assert evaluations_of(*LAYOUTS["stage 3"])[0] != pytest.approx(expected, rel=1e-3)


class Leaving(Tiny):
    """In an evaluation, which layers a forward calls depends on the tokens."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for number, layer in enumerate(self.layers):
            if self.training or int(input_ids.sum()) % 4 != number:
                x = layer(x)
        return self.head(x)


def test_collectives_match_although_ranks_skip_different_blocks():
    analyzed = analyze(Leaving, sample_range(DATA, 0, 2))

    def losses(mesh: Mesh, strategies: tuple) -> list[float]:
        plan = make_plan(analyzed, tiny_job(), mesh, strategies, 1)

        def rank(world: World) -> float:
            with parallelize(analyzed, plan, world=world) as engine:
                return engine.executor.evaluate(
                    [engine.local_batch(sample_range(DATA, at, at + 12)) for at in (0, 12)]
                ).loss

        return run_on_threads(rank, plan.mesh)

    (expected,) = losses(Mesh(), ())
    assert losses(*LAYOUTS["stage 3"]) == pytest.approx([expected] * 3, rel=1e-12)
