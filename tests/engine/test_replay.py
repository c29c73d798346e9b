"""Whom a harmful step is traced to where the layers lie on several ranks: the same rows, block and parameter as on one device."""

from collections.abc import Sequence
from functools import cache

import pytest

from meshwright.api import make_plan, read
from meshwright.comm.group import World
from meshwright.core.job import Guard
from meshwright.core.mesh import Mesh
from meshwright.core.strategy import Strategy
from meshwright.engine.replay import Seen
from meshwright.engine.spikes import Spike
from meshwright.strategies.data.batch import Batch
from meshwright.strategies.data.replicate import Replicate
from meshwright.strategies.data.zero import Zero
from meshwright.strategies.pipeline.pipeline import Pipeline
from meshwright.testing.spawn import on_threads
from tests.engine.alone import part
from tests.engine.test_suspects import DATA, MARK, Faulty
from tests.tiny import player_of, tiny_job

SHARD = Batch(axis="dp_shard")
LAYOUTS: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "two parts": (Mesh(pp=2), (Pipeline(),)),
    "three parts": (Mesh(pp=3), (Pipeline(schedule="gpipe"),)),
    "two parts on each of two ranks": (Mesh(pp=2), (Pipeline(schedule="interleaved", chunks=2),)),
    "copies of parts": (Mesh(pp=2, dp_replicate=3), (Pipeline(), Batch(), Replicate())),
    "shards of parts": (Mesh(pp=2, dp_shard=3), (Pipeline(), SHARD, Zero())),
}
CLEAN = {**DATA, "input_ids": DATA["input_ids"].clamp(max=MARK - 1)}


class Tied(Faulty):
    """Its first block and its last one share a matrix."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.head.weight = self.embed.weight


def spikes(
    how: str,
    mesh: Mesh,
    strategies: Sequence[Strategy],
    bad_row: int = 9,
    rows_of_last: int = 12,
    model: type[Faulty] = Faulty,
) -> list[Spike]:
    """What each rank says of the third of four steps, the only one in which a row is marked; the fourth is a good one again."""
    ids = CLEAN["input_ids"].clone()
    ids[bad_row, 0] = MARK
    reading = read(lambda: model(how), part(CLEAN, 0, 2))
    plan = make_plan(reading, tiny_job(guard=Guard("skip", factor=50.0, window=2)), mesh, strategies, 2)
    share = 12 // plan.num_data

    def rank(world: World) -> Spike:
        player, first = player_of(reading, plan, world), share * plan.data_index(world.rank)
        steps = [part(batch, first, first + share) for batch in (CLEAN, CLEAN, {**CLEAN, "input_ids": ids}, CLEAN)]
        if rows_of_last < 12 and plan.data_index(world.rank) == plan.num_data - 1:
            steps[2] = part(steps[2], 0, rows_of_last) if rows_of_last else None
        metrics = [player.step(batch) for batch in steps]
        player.close()
        assert [each.spike is None for each in metrics] == [True, True, False, True]
        assert metrics[3].loss < metrics[0].loss
        return metrics[2].spike

    return on_threads(rank, plan.mesh)


def told(spike: Spike, index: int) -> list[object]:
    """What is said of the rank `index`."""
    suspect = spike.suspects[index]
    return [suspect.stage, suspect.block, suspect.parameter, suspect.loss, suspect.grad_norm]


def same(found: list[object], wanted: list[object]) -> bool:
    return found[:3] == wanted[:3] and found[3:] == pytest.approx(wanted[3:], rel=1e-9, nan_ok=True)


@cache
def wholly(how: str, ranks: int) -> Spike:
    """What ranks say that have the whole model."""
    return spikes(how, Mesh(dp_replicate=ranks), () if ranks == 1 else (Batch(), Replicate()))[0]


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("two parts", "forward"),
        ("three parts", "backward"),
        ("two parts on each of two ranks", "backward"),
        ("two parts on each of two ranks", "large"),
        ("copies of parts", "backward"),
        ("shards of parts", "forward"),
        ("shards of parts", "large"),
    ],
)
def test_all_ranks_find_what_ranks_with_the_whole_model_find(layout: str, how: str):
    mesh, strategies = LAYOUTS[layout]
    found = spikes(how, mesh, strategies)
    wanted = wholly(how, mesh.dp_replicate * mesh.dp_shard)
    assert len({repr(each) for each in found}) == 1
    for rank, suspect in enumerate(found[0].suspects):
        assert suspect.rank == rank
        index = mesh.coordinate(rank)["dp_shard"] + mesh.coordinate(rank)["dp_replicate"]
        assert same(told(found[0], rank), told(wanted, index)), (told(found[0], rank), told(wanted, index))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "dualpipe"])
def test_what_several_parts_have_of_a_gradient_is_added_up_before_it_is_squared(schedule: str):
    (wanted,) = spikes("large", Mesh(), (), model=Tied)
    for found in spikes("large", Mesh(pp=2), (Pipeline(schedule=schedule),), model=Tied):
        assert same(told(found, 1), told(wanted, 0)), (told(found, 1), told(wanted, 0))


@pytest.mark.parametrize("rows_of_last", [0, 1])
@pytest.mark.parametrize("layout", ["copies of parts", "shards of parts"])
def test_ranks_whose_data_ran_out_take_part_and_have_done_nothing(layout: str, rows_of_last: int):
    mesh, strategies = LAYOUTS[layout]
    spike, *_ = spikes("backward", mesh, strategies, bad_row=1, rows_of_last=rows_of_last)
    assert spike.culprit is not None
    assert spike.culprit.block == "layers.1"
    idle = [rank for rank in range(mesh.world) if 2 in mesh.coordinate(rank).values()]
    assert [bool(spike.suspects[rank].parameter) for rank in idle] == [bool(rows_of_last)] * 2


def test_a_part_that_does_not_look_at_its_gradients_is_noticed(monkeypatch):
    mesh, strategies = LAYOUTS["two parts"]
    monkeypatch.setattr(Seen, "gradients", lambda *_: None)
    assert spikes("backward", mesh, strategies)[0].culprit.block != "layers.1"
