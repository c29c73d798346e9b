"""What ranks along pp have: their layers by how code bases cut, and the micro-batches under way by how they take turns."""

from dataclasses import replace

import pytest

from meshwright.planner.analytic.framework_memory import Cut
from meshwright.planner.analytic.memory import Stage, fullest, stage, under_way
from meshwright.planner.analytic.model_shape import Shape
from meshwright.planner.analytic.parallel_config import Layout, Order

SHAPE = Shape("gpt", 40, 5120, 40, vocab=128_000)
ZB = Order(1.0, 1.0, -1.0, even=True)


@pytest.mark.parametrize(
    ("layout", "first", "last"),
    [
        (Layout(pp=8, micros=64), 8, 1),
        (Layout(pp=8, micros=3), 3, 1),
        (Layout(pp=4, micros=64, chunks=2), 4 * (1 + 3 / 8), 1 + 4 * 3 / 8),
        (Layout(pp=4, micros=64, chunks=4), 4 * (1 + 3 / 16), 1 / 4 + 4 * 3 / 4),
        (Layout(pp=8, micros=64, order=Order(held=2.0)), 16, 2),
        (Layout(pp=8, micros=64, order=ZB), 8, 8),
        (Layout(pp=8, micros=64, order=replace(ZB, held=2.0)), 16, 16),
    ],
)
def test_micro_batches_under_way_are_those_of_the_papers(layout: Layout, first: float, last: float):
    """1F1B holds min(m, p - rank) of them, with chunks 1 + (p - 1) / (p v) times as many on the first (arXiv 2205.05198)."""
    assert under_way(layout, 0) == first
    assert under_way(layout, layout.pp - 1) == last


@pytest.mark.parametrize("cut", ["layers", "ends", "norm", "cost"])
@pytest.mark.parametrize("pp", [1, 2, 3, 6, 7, 8, 40])
def test_every_layer_is_on_one_rank_and_ends_are_at_the_ends(cut: Cut, pp: int):
    parts = [stage(SHAPE, Layout(pp=pp), rank, cut) for rank in range(pp)]
    assert sum(part.layers for part in parts) == SHAPE.layers
    assert [part.first for part in parts] == [True, *[False] * (pp - 1)]
    assert [part.last for part in parts] == [*[False] * (pp - 1), True]


def test_parts_that_are_folded_give_the_first_rank_both_ends_and_no_layer_more():
    layout = Layout(pp=3, chunks=2, micros=16, order=replace(ZB, folded=True))
    assert [stage(SHAPE, layout, rank) for rank in range(3)] == [
        Stage(13, True, True),
        Stage(13, False, False),
        Stage(14, False, False),
    ]


def test_layers_are_dealt_as_code_bases_do():
    by_cut = {
        cut: [stage(SHAPE, Layout(pp=4), rank, cut).layers for rank in range(4)]
        for cut in ("layers", "ends", "norm")
    }
    assert by_cut == {"layers": [10, 10, 10, 10], "ends": [10, 11, 10, 9], "norm": [10, 11, 11, 8]}
    assert [stage(SHAPE, Layout(pp=6), rank).layers for rank in range(6)] == [
        6,
        7,
        7,
        7,
        7,
        6,
    ]  # 42 items, evenly
    assert stage(SHAPE, Layout(pp=4), 3, "cost").layers < 10  # a head of 128,000 words weighs as two layers
    assert stage(SHAPE, Layout(), 0) == Stage(40, True, True)


@pytest.mark.parametrize("cut", ["layers", "ends", "norm"])
@pytest.mark.parametrize("order", [Order(), ZB])
def test_no_rank_has_more_than_those_that_are_asked(cut: Cut, order: Order):
    for pp in (2, 3, 4, 7, 8, 14, 16):
        layout = Layout(pp=pp, micros=16, order=order)
        asked = set(fullest(layout, cut))
        most = [stage(SHAPE, layout, rank, cut).layers * under_way(layout, rank) for rank in range(pp)]
        heaviest = [stage(SHAPE, layout, rank, cut).layers for rank in range(pp)]
        assert max(most) == max(most[rank] for rank in asked)
        assert max(heaviest) == max(heaviest[rank] for rank in asked)
    assert list(fullest(Layout(pp=5), "cost")) == [0, 1, 2, 3, 4]
