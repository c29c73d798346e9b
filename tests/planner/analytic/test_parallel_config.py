"""Parallel layouts: what follows from their sizes, and errors of invalid ones."""

from dataclasses import replace

from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import DUALPIPE, ParallelConfig

SHAPE = ModelShape("gpt", 60, 6656, 52)


def test_ranks_multiply_and_both_data_axes_shard_weights():
    layout = ParallelConfig(dp=3, tp=2, pp=5, cp=7)
    assert layout.num_ranks == 210
    assert layout.data_parallel_size == 21
    assert layout.local_tokens(SHAPE) == 2048 / 7


def test_the_fullest_rank_has_the_layers_that_do_not_come_out_even():
    assert ParallelConfig(pp=4).max_layers_per_rank(SHAPE) == 15
    assert ParallelConfig(pp=16).max_layers_per_rank(SHAPE) == 4
    assert ParallelConfig(pp=2).max_layers_per_rank(ModelShape("odd", 30, 64, 4)) == 15
    assert (
        ParallelConfig(pp=16).max_layers_per_rank(ModelShape("with ends", 30, 64, 4)) == 2
    )  # 30 layers, the embedding and the head


def test_an_invalid_layout_is_reported_with_the_repair():
    layout = ParallelConfig(tp=8, pp=31, virtual_stages=2, num_microbatches=3)
    said = [str(fault) for fault in layout.diagnostics(SHAPE)]
    assert len(said) == 3
    assert "tp 8 does not divide 52 attention heads" in said[0]
    assert "pp 31 x 2 virtual stages for 60 layers" in said[1]
    assert "3 microbatches with virtual stages on pp 31" in said[2]
    assert all("repair: " in text for text in said)
    assert not list(ParallelConfig(tp=4, pp=4, virtual_stages=3, num_microbatches=8).diagnostics(SHAPE))


def test_invalid_groups_and_directions_are_reported():
    said = " ".join(
        str(fault)
        for fault in ParallelConfig(
            dp=6, cp=4, ulysses_degree=3, zero_group_size=4, zero_stage=1
        ).diagnostics(SHAPE)
    )
    assert "3 of cp 4 ranks exchange tokens for 52 attention heads" in said
    assert "ZeRO stage 1 in groups of 4 of dp 6 replicas" in said
    assert any(
        "two microbatches" in str(fault)
        for fault in ParallelConfig(pp=4, num_microbatches=1, schedule_profile=DUALPIPE).diagnostics(SHAPE)
    )
    assert any(
        "even pp" in str(fault)
        for fault in ParallelConfig(pp=3, num_microbatches=6, schedule_profile=DUALPIPE).diagnostics(SHAPE)
    )
    assert not list(
        ParallelConfig(dp=6, cp=4, ulysses_degree=2, zero_group_size=3, zero_stage=3).diagnostics(SHAPE)
    )


def test_replica_groups_hold_the_same_shards():
    layout = ParallelConfig(dp=8, cp=2, tp=2, zero_stage=3, zero_group_size=4)
    assert (layout.data_parallel_size, layout.zero_shard_size) == (16, 8)
    assert (layout.tp_stride, layout.dp_stride) == (1, 2)
    assert (
        replace(layout, tp_across_hosts=True).tp_stride,
        replace(layout, tp_across_hosts=True).dp_stride,
    ) == (16, 1)
