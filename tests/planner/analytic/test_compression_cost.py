"""Coded gradient sums in closed form: against formulas by hand, and against the plan that they stand for."""

from dataclasses import replace
from math import inf

import pytest

import meshwright as mw
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.plan.strategy_state import local_state_nbytes
from meshwright.planner.analytic.closed_form_memory import estimate_memory
from meshwright.planner.analytic.closed_form_step_time import step_time
from meshwright.planner.analytic.compression_cost import (
    CODE_NBYTES,
    codec_gain,
    compressed_sum,
    is_codable,
    residual_nbytes,
    scratch_nbytes,
)
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import DUALPIPE, ParallelConfig
from meshwright.planner.machine.machine import Machine
from meshwright.planner.program_cost.compression_gain import compression_gain
from tests.parallel.compression.coded_plans import ANALYZED
from tests.planner.analytic.free_machine import FREE
from tests.planner.simple_machine import ground
from tests.tiny_model import tiny_job

SHAPE = ModelShape("gpt", 4, 1024, 8, vocab=32_000)
RATE, CODING = 1e9, 1e-12
# hosts of 4, whose links are as fast as those inside them
SLOW: Machine = replace(
    FREE,
    device=replace(FREE.device, link_rate=RATE, nic_rate=RATE),
    rates=replace(FREE.rates, link=1.0, nic=1.0, fabric_half_hosts=inf),
    host_size_override=4,
    codings={"int8": CODING},
)
CODED = ParallelConfig(dp=16, compress="int8")
HYBRID = replace(CODED, zero_stage=2, zero_group_size=4)


def test_codes_are_summed_along_the_outermost_axis():
    assert compressed_sum(CODED, 1e6) == compressed_sum(replace(CODED, cp=1), 1e6)
    ddp, zero = compressed_sum(CODED, 1e6), compressed_sum(replace(CODED, zero_stage=1), 1e6)
    assert (ddp.numel, ddp.num_ranks, ddp.num_passes, ddp.num_per_step) == (1e6, 16, 2, 1)
    assert (zero.num_passes, zero.num_per_step) == (1, 1)
    each_microbatch = replace(CODED, zero_stage=2, num_microbatches=3)
    assert compressed_sum(each_microbatch, 1e6).num_per_step == 3
    across = compressed_sum(HYBRID, 1e6)
    assert (across.numel, across.num_ranks, across.stride, across.num_passes) == (250_000, 4, 4, 2)


def test_seconds_and_bytes_between_groups_of_one_host_each_are_those_by_hand():
    numel = HYBRID.max_numel_per_rank(SHAPE) / 4
    gain = codec_gain(SHAPE, HYBRID, SLOW)
    assert gain.saved_nbytes == pytest.approx(2 * 3 / 4 * (2 - CODE_NBYTES["int8"]) * numel)
    assert gain.coding_s == pytest.approx(CODING * numel)
    assert gain.exact_s == pytest.approx(2 * 3 / 4 * 2 * numel / RATE)
    assert gain.coded_s == pytest.approx(2 * 3 / 4 * CODE_NBYTES["int8"] * numel / RATE)
    exact = step_time(SHAPE, replace(HYBRID, compress=""), SLOW)
    coded = step_time(SHAPE, HYBRID, SLOW)
    seen = 1 - SLOW.rates.grad_reduce_overlap
    assert exact.dp_comm - coded.dp_comm == pytest.approx(
        seen * (gain.exact_s - gain.coded_s - gain.coding_s)
    )
    assert replace(coded, dp_comm=exact.dp_comm) == exact


def test_ranks_that_share_hosts_send_their_codes_each_on_their_own():
    numel = CODED.max_numel_per_rank(SHAPE)
    gain = codec_gain(SHAPE, replace(CODED, zero_stage=1), SLOW)
    # four cards share the bytes of a ring; a rank exchanges codes with the 12 of other hosts
    expected = 15 / 16 * 2 * numel / 4 - 12 / 16 * CODE_NBYTES["int8"] * numel
    assert gain.saved_nbytes == pytest.approx(expected)
    assert gain.saved_nbytes < 0
    alone = codec_gain(SHAPE, replace(CODED, dp=4, zero_stage=1), SLOW)
    assert alone.saved_nbytes == pytest.approx(3 / 4 * (2 - CODE_NBYTES["int8"]) * numel)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_sums_of_every_stage_are_coded(stage: int):
    config = replace(CODED, dp=4, zero_stage=stage, num_microbatches=2)
    exact, coded = (step_time(SHAPE, replace(config, compress=codec), SLOW) for codec in ("", "int8"))
    assert coded.seconds < exact.seconds
    slow = replace(SLOW, codings={"int8": 1e-3})
    assert step_time(SHAPE, config, slow).seconds > exact.seconds


def test_residuals_and_what_a_sum_takes_are_in_the_memory():
    exact, coded = (estimate_memory(SHAPE, replace(HYBRID, compress=codec)) for codec in ("", "int8"))
    numel, largest = HYBRID.max_numel_per_rank(SHAPE), SHAPE.embedding_numel
    assert (exact.residuals, coded.residuals) == (0.0, numel)  # 4 bytes of a quarter of the weights
    assert coded.gathered_params - exact.gathered_params == scratch_nbytes(HYBRID, largest)
    assert scratch_nbytes(HYBRID, 4e6) == 1e6 * (4 + 2 * CODE_NBYTES["int8"] + 4 / 4)
    assert residual_nbytes(replace(HYBRID, dtype="float16"), numel) == 2 * numel
    assert residual_nbytes(replace(HYBRID, compress=""), numel) == 0


def test_what_is_summed_twice_or_rests_on_the_host_is_not_coded():
    assert is_codable(SHAPE, CODED)
    assert not is_codable(SHAPE, replace(CODED, dp=1))
    assert not is_codable(replace(SHAPE, experts=4, top_k=1), CODED)
    assert is_codable(replace(SHAPE, tied=True), CODED)
    assert not is_codable(replace(SHAPE, tied=True), replace(CODED, pp=2))
    assert not is_codable(SHAPE, replace(CODED, pp=2, schedule_profile=DUALPIPE))
    assert not is_codable(SHAPE, replace(CODED, offload="device_step"))


@pytest.mark.parametrize(
    ("config", "strategies", "mesh"),
    [
        (replace(CODED, dp=3), (mw.BatchSplit(), mw.DDP()), mw.Mesh(dp_replicate=3)),
        (
            replace(CODED, dp=3, zero_stage=1),
            (mw.BatchSplit("dp_shard"), mw.ZeRO(stage=1)),
            mw.Mesh(dp_shard=3),
        ),
        (
            replace(CODED, dp=3, zero_stage=2, num_microbatches=2),
            (mw.BatchSplit("dp_shard"), mw.ZeRO(stage=2)),
            mw.Mesh(dp_shard=3),
        ),
        (
            replace(CODED, dp=6, zero_stage=2, zero_group_size=2),
            (mw.BatchSplit(), mw.BatchSplit("dp_shard"), mw.ZeRO(stage=2, replicate_axis="dp_replicate")),
            mw.Mesh(dp_replicate=3, dp_shard=2),
        ),
    ],
    ids=["ddp", "zero 1", "zero 2", "hybrid"],
)
def test_the_plan_codes_what_the_closed_form_says(
    config: ParallelConfig, strategies: tuple[mw.Strategy, ...], mesh: mw.Mesh
):
    batch = config.dp * int(config.num_microbatches)
    plan = mw.make_plan(ANALYZED, tiny_job(batch=batch), mesh, (*strategies, Int8Compression()), 1)
    numel = sum(param.numel for param in ANALYZED.model_spec.trainable)
    one = compressed_sum(config, numel)
    gain = compression_gain(plan, ground(coding=1.0))
    assert gain.coding_s == pytest.approx(one.num_per_step * one.numel, abs=4)  # shards are padded
    states = plan.for_rank(0).states["compress"]
    owed = sum(local_state_nbytes(each, plan.rank_view(0)) for each in states) / 8
    assert owed == pytest.approx(residual_nbytes(config, numel) / 4, abs=4)
