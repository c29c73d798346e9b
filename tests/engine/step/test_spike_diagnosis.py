"""Spike diagnosis with pipeline stages: the same samples, block and parameter as on one device."""

from functools import cache

import pytest

from meshwright.engine.runtime.loss_guard import LossSpike
from meshwright.engine.step.spike_diagnosis import ReplayFindings
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from tests.engine.step.test_spike_diagnosis_suspects import Faulty, spikes

SHARD = BatchSplit(axis="dp_shard")
LAYOUTS: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "two stages": (Mesh(pp=2), (Pipeline(),)),
    "three stages": (Mesh(pp=3), (Pipeline(schedule="gpipe"),)),
    "two virtual stages on each of two ranks": (
        Mesh(pp=2),
        (Pipeline(schedule="interleaved", virtual_stages=2),),
    ),
    "replicas of stages": (Mesh(pp=2, dp_replicate=3), (Pipeline(), BatchSplit(), DDP())),
    "shards of stages": (Mesh(pp=2, dp_shard=3), (Pipeline(), SHARD, ZeRO())),
}


class Tied(Faulty):
    """Its first block and its last one share a matrix."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.head.weight = self.embed.weight


def diagnoses_of_rank(spike: LossSpike, index: int) -> list[object]:
    """Returns what is said of the rank `index`."""
    suspect = spike.rank_reports[index]
    return [suspect.phase, suspect.block, suspect.parameter, suspect.loss, suspect.grad_norm]


def same(found: list[object], expected: list[object]) -> bool:
    return found[:3] == expected[:3] and found[3:] == pytest.approx(expected[3:], rel=1e-9, nan_ok=True)


@cache
def diagnoses_without_stages(how: str, ranks: int) -> LossSpike:
    """Returns what ranks say that have the whole model."""
    return spikes(how, Mesh(dp_replicate=ranks), () if ranks == 1 else (BatchSplit(), DDP()))[0]


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("two stages", "forward"),
        ("three stages", "backward"),
        ("two virtual stages on each of two ranks", "backward"),
        ("two virtual stages on each of two ranks", "large"),
        ("replicas of stages", "backward"),
        ("shards of stages", "forward"),
        ("shards of stages", "large"),
    ],
)
def test_all_ranks_find_what_ranks_with_the_whole_model_find(layout: str, how: str):
    mesh, strategies = LAYOUTS[layout]
    found = spikes(how, mesh, strategies)
    expected = diagnoses_without_stages(how, mesh.dp_replicate * mesh.dp_shard)
    assert len({repr(each) for each in found}) == 1
    for rank, suspect in enumerate(found[0].rank_reports):
        assert suspect.rank == rank
        index = mesh.coordinate(rank)["dp_shard"] + mesh.coordinate(rank)["dp_replicate"]
        assert same(diagnoses_of_rank(found[0], rank), diagnoses_of_rank(expected, index)), (
            diagnoses_of_rank(found[0], rank),
            diagnoses_of_rank(expected, index),
        )


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "dualpipe"])
def test_partial_gradients_of_several_stages_are_summed_before_they_are_squared(schedule: str):
    (expected,) = spikes("large", Mesh(), (), model=Tied)
    for found in spikes("large", Mesh(pp=2), (Pipeline(schedule=schedule),), model=Tied):
        assert same(diagnoses_of_rank(found, 1), diagnoses_of_rank(expected, 0)), (
            diagnoses_of_rank(found, 1),
            diagnoses_of_rank(expected, 0),
        )


@pytest.mark.parametrize("rows_of_last", [0, 1])
@pytest.mark.parametrize("layout", ["replicas of stages", "shards of stages"])
def test_ranks_without_data_take_part_and_are_not_suspected(layout: str, rows_of_last: int):
    mesh, strategies = LAYOUTS[layout]
    spike, *_ = spikes("backward", mesh, strategies, bad_rows=(1,), rows_of_last=rows_of_last)
    assert spike.culprit is not None
    assert spike.culprit.block == "layers.1"
    idle = [rank for rank in range(mesh.world_size) if 2 in mesh.coordinate(rank).values()]
    assert [bool(spike.rank_reports[rank].parameter) for rank in idle] == [bool(rows_of_last)] * 2


def test_a_stage_that_does_not_check_its_gradients_is_noticed(monkeypatch):
    mesh, strategies = LAYOUTS["two stages"]
    monkeypatch.setattr(ReplayFindings, "check_gradients", lambda *_: None)
    assert spikes("backward", mesh, strategies)[0].culprit.block != "layers.1"
