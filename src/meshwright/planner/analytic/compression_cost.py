"""Compressed gradient sums in closed form: seconds, bytes through the slowest link, and residuals.

Why it works: codes travel by an exchange (all-to-all) and are summed by their owners, which is a formula of
elements and rates as an exact sum is. The search compares both on the axis that `compress` takes by default,
the outermost along which gradients are summed (parallel/compression/gradient_compression.py):

    replicas of ZeRO groups     all_reduce of a shard           E = N / shards    once per step
    one ZeRO group              reduce_scatter of gradients     E = N             stage 2, 3: each microbatch
    no ZeRO                     all_reduce of gradients         E = N             once per step

    exact     k ring(b E)                       k = 2 for an all_reduce, 1 for a reduce_scatter
    coded     k exchange(c E) + coding E        c bytes per element; coding is measured by `bench device`
    residual  4 E on each rank, twice where the loss scale may leave a step out

Of h ranks on one host a ring sends (n - 1) / n b E out of it, over all their cards; in an exchange each rank
sends (n - h) / n c E. So an exchange of ranks that share hosts needs c < b / h to send less between hosts:
codes pay between groups with one rank per host, and hardly over all ranks at once.

Limits: not proposed for models with experts, tied embeddings on several pipeline ranks (summed once more,
exactly), bidirectional schedules, and beside offload. Norms and other small parameters count as coded.
Paper: Wang et al. 2023, "ZeRO++", arXiv 2306.10209, section 3.3.
"""

from dataclasses import dataclass

from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.machine.compression_gain import CompressionGain
from meshwright.planner.machine.machine import Machine
from meshwright.planner.machine.roofline import all_gather_seconds, exchange_seconds, ranks_per_host

CODE_NBYTES = {"int8": 1 + 4 / 256}  # of an element, scales included
RESIDUAL_NBYTES = SUM_NBYTES = 4  # float32


@dataclass(frozen=True)
class CompressedSum:
    """The sum of `numel` elements over `num_ranks` ranks, `stride` apart: `num_passes` 2 for an all_reduce, 1
    for a reduce_scatter; `num_per_step` of them in a step.
    """

    numel: float
    num_ranks: float
    stride: float
    num_passes: int
    num_per_step: float


def compressed_sum(config: ParallelConfig, numel: float) -> CompressedSum:
    """Returns the sum along the outermost data-parallel axis; a rank has `numel` weights."""
    shards = config.zero_shard_size
    if config.num_zero_groups > 1:
        return CompressedSum(numel / shards, config.num_zero_groups, config.dp_stride * shards, 2, 1)
    per_step = config.num_microbatches if config.zero_stage >= 2 else 1
    return CompressedSum(numel, shards, config.dp_stride, 1 if config.zero_stage else 2, per_step)


def is_codable(shape: ModelShape, config: ParallelConfig) -> bool:
    """Returns whether gradients of `config` can be summed as codes, as far as this module knows it."""
    return (
        config.data_parallel_size > 1
        and not shape.experts
        and not (shape.tied and config.pp > 1)
        and not config.schedule_profile.is_bidirectional
        and not config.uses_host
    )


def coded_pass_seconds(
    config: ParallelConfig, machine: Machine, one: CompressedSum, numel: float, *, coding: bool = True
) -> float:
    """Returns the seconds of one pass over `numel` elements as codes; `coding`: with half of the seconds to
    code of an all_reduce, or all of a reduce_scatter.
    """
    nbytes = CODE_NBYTES[config.compress] * numel
    seconds = exchange_seconds(machine, nbytes, one.num_ranks, one.stride, config.num_ranks)
    return seconds + (machine.codings[config.compress] * numel / one.num_passes if coding else 0.0)


def residual_nbytes(config: ParallelConfig, numel: float) -> float:
    """Returns the bytes that a rank with `numel` weights keeps of what codes have lost."""
    if not config.compress:
        return 0.0
    times = 2 if config.dtype == "float16" else 1  # new ones, until the loss scale has decided
    return times * RESIDUAL_NBYTES * compressed_sum(config, numel).numel


def scratch_nbytes(config: ParallelConfig, numel: float) -> float:
    """Returns the bytes of the sum of `numel` weights while it lasts: a float32 copy, codes that go and come,
    and the float32 sum of a slice.
    """
    if not config.compress:
        return 0.0
    one = compressed_sum(config, numel)
    return one.numel * (SUM_NBYTES + 2 * CODE_NBYTES[config.compress] + SUM_NBYTES / one.num_ranks)


def codec_gain(shape: ModelShape, config: ParallelConfig, machine: Machine) -> CompressionGain:
    """Returns what the codec of `config` gains in a step over exact sums; its seconds to code are known.

    Bytes are those of a rank through the slowest link that it uses.
    """
    one = compressed_sum(config, config.max_numel_per_rank(shape))
    exact, coded = config.grad_reduce_itemsize * one.numel, CODE_NBYTES[config.compress] * one.numel
    ring, spread = _link_shares(machine, one)
    times = one.num_passes * one.num_per_step
    exact_s = all_gather_seconds(machine, exact, one.num_ranks, one.stride, config.num_ranks)
    return CompressionGain(
        times * (ring * exact - spread * coded),
        one.num_per_step * machine.codings[config.compress] * one.numel,
        times * exact_s,
        times * coded_pass_seconds(config, machine, one, one.numel, coding=False),
    )


def _link_shares(machine: Machine, one: CompressedSum) -> tuple[float, float]:
    """Returns the shares of its bytes that a rank sends through its slowest link: in a ring, an exchange."""
    others = (one.num_ranks - 1) / one.num_ranks
    if one.num_ranks * one.stride <= machine.devices_per_host:
        return others, others
    here = ranks_per_host(machine, one.num_ranks, one.stride)
    return others / here, (one.num_ranks - here) / one.num_ranks
