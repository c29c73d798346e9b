"""Layouts: what follows from their sizes, and what keeps them from being plans."""

from dataclasses import replace

from meshwright.planner.analytic.model_shape import Shape
from meshwright.planner.analytic.parallel_config import BOTH, Layout

SHAPE = Shape("gpt", 60, 6656, 52)


def test_ranks_multiply_and_copies_along_two_axes_share_weights():
    layout = Layout(dp=3, tp=2, pp=5, cp=7)
    assert layout.ranks == 210
    assert layout.sharers == 21
    assert layout.tokens(SHAPE) == 2048 / 7


def test_the_fullest_rank_has_the_layers_that_do_not_come_out_even():
    assert Layout(pp=4).layers(SHAPE) == 15
    assert Layout(pp=16).layers(SHAPE) == 4
    assert Layout(pp=2).layers(Shape("odd", 30, 64, 4)) == 15
    assert Layout(pp=16).layers(Shape("with ends", 30, 64, 4)) == 2  # 30 layers, the embedding and the head


def test_a_layout_that_no_plan_can_have_is_told_with_the_repair():
    layout = Layout(tp=8, pp=31, chunks=2, micros=3)
    said = [str(fault) for fault in layout.faults(SHAPE)]
    assert len(said) == 3
    assert "tp 8 ranks share 52 heads" in said[0]
    assert "pp 31 x 2 chunks for 60 layers" in said[1]
    assert "3 micro-batches in chunks on pp 31" in said[2]
    assert all("repair: " in text for text in said)
    assert not list(Layout(tp=4, pp=4, chunks=3, micros=8).faults(SHAPE))


def test_groups_and_directions_that_no_plan_can_have_are_told():
    said = " ".join(str(fault) for fault in Layout(dp=6, cp=4, swaps=3, within=4, shards=1).faults(SHAPE))
    assert "3 of cp 4 ranks exchange tokens for 52 heads" in said
    assert "shares among 4 of dp 6 copies at stage 1" in said
    assert any(
        "two micro-batches" in str(fault) for fault in Layout(pp=4, micros=1, order=BOTH).faults(SHAPE)
    )
    assert any(
        "even number of ranks" in str(fault) for fault in Layout(pp=3, micros=6, order=BOTH).faults(SHAPE)
    )
    assert not list(Layout(dp=6, cp=4, swaps=2, within=3, shards=3).faults(SHAPE))


def test_groups_of_copies_hold_the_same_shares():
    layout = Layout(dp=8, cp=2, tp=2, shards=3, within=4)
    assert (layout.sharers, layout.holders) == (16, 8)
    assert (layout.apart, layout.beside) == (1, 2)
    assert (replace(layout, outside=True).apart, replace(layout, outside=True).beside) == (16, 1)
