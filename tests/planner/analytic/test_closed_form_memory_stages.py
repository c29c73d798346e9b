"""Pipeline ranks: their layers, and the microbatches in flight under each schedule."""

from dataclasses import replace

import pytest

from meshwright.planner.analytic.closed_form_memory import (
    StageLayers,
    fullest_pp_ranks,
    microbatches_in_flight,
    stage_layers,
)
from meshwright.planner.analytic.memory_coefficients import LayerSplit
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ParallelConfig, ScheduleProfile

SHAPE = ModelShape("gpt", 40, 5120, 40, vocab=128_000)
ZB = ScheduleProfile(1.0, 1.0, -1.0, uniform_memory=True)


@pytest.mark.parametrize(
    ("layout", "first", "last"),
    [
        (ParallelConfig(pp=8, num_microbatches=64), 8, 1),
        (ParallelConfig(pp=8, num_microbatches=3), 3, 1),
        (ParallelConfig(pp=4, num_microbatches=64, virtual_stages=2), 4 * (1 + 3 / 8), 1 + 4 * 3 / 8),
        (ParallelConfig(pp=4, num_microbatches=64, virtual_stages=4), 4 * (1 + 3 / 16), 1 / 4 + 4 * 3 / 4),
        (ParallelConfig(pp=8, num_microbatches=64, schedule_profile=ScheduleProfile(in_flight=2.0)), 16, 2),
        (ParallelConfig(pp=8, num_microbatches=64, schedule_profile=ZB), 8, 8),
        (ParallelConfig(pp=8, num_microbatches=64, schedule_profile=replace(ZB, in_flight=2.0)), 16, 16),
    ],
)
def test_micro_batches_in_flight_are_those_of_the_papers(layout: ParallelConfig, first: float, last: float):
    """1F1B holds min(m, p - rank) of them, with chunks 1 + (p - 1) / (p v) times as many on the first (arXiv
    2205.05198).
    """
    assert microbatches_in_flight(layout, 0) == first
    assert microbatches_in_flight(layout, layout.pp - 1) == last


@pytest.mark.parametrize("cut", ["layers", "ends", "norm", "cost"])
@pytest.mark.parametrize("pp", [1, 2, 3, 6, 7, 8, 40])
def test_every_layer_is_on_one_rank_and_ends_are_at_the_ends(cut: LayerSplit, pp: int):
    parts = [stage_layers(SHAPE, ParallelConfig(pp=pp), rank, cut) for rank in range(pp)]
    assert sum(part.layers for part in parts) == SHAPE.layers
    assert [part.has_embedding for part in parts] == [True, *[False] * (pp - 1)]
    assert [part.has_head for part in parts] == [*[False] * (pp - 1), True]


def test_v_shaped_stages_give_the_first_rank_both_ends_and_no_more_layers():
    layout = ParallelConfig(
        pp=3, virtual_stages=2, num_microbatches=16, schedule_profile=replace(ZB, is_folded=True)
    )
    assert [stage_layers(SHAPE, layout, rank) for rank in range(3)] == [
        StageLayers(13, True, True),
        StageLayers(13, False, False),
        StageLayers(14, False, False),
    ]


def test_layers_are_split_as_code_bases_do():
    by_cut = {
        cut: [stage_layers(SHAPE, ParallelConfig(pp=4), rank, cut).layers for rank in range(4)]
        for cut in ("layers", "ends", "norm")
    }
    assert by_cut == {"layers": [10, 10, 10, 10], "ends": [10, 11, 10, 9], "norm": [10, 11, 11, 8]}
    assert [stage_layers(SHAPE, ParallelConfig(pp=6), rank).layers for rank in range(6)] == [
        6,
        7,
        7,
        7,
        7,
        6,
    ]  # 42 items, evenly
    assert (
        stage_layers(SHAPE, ParallelConfig(pp=4), 3, "cost").layers < 10
    )  # a head of 128,000 words weighs as two layers
    assert stage_layers(SHAPE, ParallelConfig(), 0) == StageLayers(40, True, True)


@pytest.mark.parametrize("cut", ["layers", "ends", "norm"])
@pytest.mark.parametrize("order", [ScheduleProfile(), ZB])
def test_the_ranks_considered_include_the_fullest(cut: LayerSplit, order: ScheduleProfile):
    for pp in (2, 3, 4, 7, 8, 14, 16):
        layout = ParallelConfig(pp=pp, num_microbatches=16, schedule_profile=order)
        asked = set(fullest_pp_ranks(layout, cut))
        most = [
            stage_layers(SHAPE, layout, rank, cut).layers * microbatches_in_flight(layout, rank)
            for rank in range(pp)
        ]
        heaviest = [stage_layers(SHAPE, layout, rank, cut).layers for rank in range(pp)]
        assert max(most) == max(most[rank] for rank in asked)
        assert max(heaviest) == max(heaviest[rank] for rank in asked)
    assert list(fullest_pp_ranks(ParallelConfig(pp=5), "cost")) == [0, 1, 2, 3, 4]
