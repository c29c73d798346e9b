"""Bytes of a rank from sizes: the papers' tables, and what each technique saves."""

from dataclasses import replace

import pytest

from meshwright.planner.footprint import Footprint, footprint, under_way
from meshwright.planner.layout import Layout, Order
from meshwright.planner.shapes import Shape

# table 1 of arXiv 1910.02054: GB per device of 7.5 B weights at 1, 4, 16, 64, 256, 1024 copies
ZERO_TABLE = {
    1: (120, 52.5, 35.6, 31.4, 30.4, 30.1),
    2: (120, 41.3, 21.6, 16.6, 15.4, 15.1),
    3: (120, 30, 7.5, 1.88, 0.47, 0.12),
}
BLOCKS = Shape("7.5b", 36, 4096, 32, vocab=1)


def states(found: Footprint) -> float:
    return (found.weights + found.gradients + found.moments) / 1e9


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_states_are_those_of_the_table(shards: int):
    scale = 7.5e9 / BLOCKS.numel
    for copies, paper in zip((1, 4, 16, 64, 256, 1024), ZERO_TABLE[shards], strict=True):
        assert states(footprint(BLOCKS, Layout(dp=copies, shards=shards))) * scale == pytest.approx(paper, rel=0.005, abs=0.006)


@pytest.mark.parametrize("tp", [1, 8])
def test_activations_of_a_layer_are_those_of_the_table(tp: int):
    """34 s b h / t with tokens on tensor ranks (arXiv 2205.05198, table 2), less a byte each for the masks of two dropouts."""
    shape = Shape("gpt", 1, 1024, 16, vocab=1)
    found = footprint(shape, Layout(tp=tp, sequence=tp > 1, micro_batch=4, reruns="attention"))
    unit = 4 * shape.sequence * shape.hidden / tp
    assert found.activations / unit == pytest.approx(34 - 2)


def test_scores_are_kept_unless_a_kernel_is_fused_or_they_are_rerun():
    shape = Shape("gpt", 10, 1024, 16, vocab=1)
    fused, eager, again = (
        footprint(shape, Layout(kernel=kernel, reruns=reruns)).activations
        for kernel, reruns in (("flash2", "none"), ("softmax", "none"), ("softmax", "attention"))
    )
    scores = 5 * shape.heads * shape.sequence**2
    assert eager - fused == pytest.approx(10 * scores)
    assert again - fused == pytest.approx(scores)


def test_what_is_rerun_keeps_the_inputs_of_layers():
    """2 s b h per layer, and one layer's inside."""
    shape = Shape("gpt", 24, 1024, 16, vocab=1)
    found = footprint(shape, Layout(reruns="layers")).activations
    one = footprint(replace(shape, layers=1), Layout()).activations
    assert found == pytest.approx(24 * 2 * shape.sequence * shape.hidden + one)


@pytest.mark.parametrize(
    ("layout", "first", "last"),
    [
        (Layout(pp=8, micros=64), 8, 1),
        (Layout(pp=8, micros=3), 3, 1),
        (Layout(pp=4, micros=64, chunks=2), 4 * (1 + 3 / 8), 1 + 4 * 3 / 8),
        (Layout(pp=8, micros=64, order=Order(held=2.0)), 16, 2),
    ],
)
def test_micro_batches_under_way_are_those_of_the_papers(layout: Layout, first: float, last: float):
    """1F1B holds min(m, p - rank) of them, with chunks 1 + (p - 1) / (p v) times as many on the first (arXiv 2205.05198)."""
    assert under_way(layout, 0) == first
    assert under_way(layout, layout.pp - 1) == last


def test_the_fullest_rank_along_pp_is_the_one_with_most():
    deep = Shape("deep", 32, 4096, 32, vocab=1000)
    words = replace(deep, vocab=500_000)
    assert footprint(deep, Layout(pp=4, micros=16)).logits == 0  # the first, with four micro-batches under way
    assert footprint(words, Layout(pp=4, micros=16, reruns="layers", micro_batch=4)).logits == 4 * 2048 * 500_000 * 10


def test_weights_in_shards_need_room_for_layers_that_are_gathered():
    found = footprint(BLOCKS, Layout(dp=64, shards=3))
    assert found.gathered == pytest.approx((2 + 2 + 2) * BLOCKS.layer_numel)
    assert footprint(BLOCKS, Layout(dp=64, shards=2)).gathered == 0
