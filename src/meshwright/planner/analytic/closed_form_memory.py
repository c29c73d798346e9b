"""Bytes of the fullest rank, in closed form: model states, activations, logits, unsharded parameters.

    weights, gradients, optimizer_states    per weight, each divided by the ranks that share it
    residuals                  what codes of gradients have lost (compression_cost.py)
    activations                saved tensors of a layer and a microbatch, times the microbatches in flight
    block_backward | logits    the larger of two peaks: the backward of a block, with its recomputed tensors;
                               the loss, with every copy of one microbatch's logits. Recomputation keeps the
                               first small, tensor ranks the second
    gathered_params            unsharded layers where weights are sharded, the gradients of one, buffers of
                               fixed size
    fragmentation              bytes that the allocator has reserved without tensors
    driver_context             of the driver and of communicators: in the device's figure, not in torch's
    host                       what rests in host memory (offload_cost.py)

    experts              saved rows (token and expert) of the busiest rank: k T, times its load
    allocated = N (w + g / shards + o / shards) + in flight x layers x saved + max(block, logits) + gathered
    total     = allocated (1 + fragmentation) + context

What exists at once differs between code bases: `FrameworkMemory` names it, and its defaults are this
library's. The fullest pp rank is among the first two and the last.

Layers per pp rank (`stage_layers`):

    layers    L layers over p ranks, the first ones taking the rest; if that is uneven and L + 2 is not, as
              `ends`
    ends      embedding, L layers and head, split as L + 2 equal items
    norm      embedding, L layers, last norm and head: L + 3 items
    cost      by weights: a stage ends with the layer that passes its share; the head counts V h, the
              embedding nothing

Under 1F1B pp rank r of p holds min(m, p - r) microbatches; with v virtual stages per rank, those of the
warm-up: (2 (p - r - 1) + (v - 1) p + 1) / v; a schedule that fills bubbles with halves of backward holds the
same on every rank.

Cost: some tens of microseconds a call. Limits: decoders of equal layers; fragmentation is a fixed share,
though in truth it depends on the order of a step, and decides a run that barely fits; temporaries of single
operations are those of the two peaks.

Papers: S. Rajbhandari et al. 2019, arXiv 1910.02054, section 3; V. Korthikanti et al. 2022, arXiv 2205.05198,
sections 4 and 4.2.3; D. Narayanan et al. 2021, arXiv 2104.04473, section 2.2; P. Qi et al. 2023, arXiv
2401.10241, table 1.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from meshwright.planner.analytic.compression_cost import residual_nbytes, scratch_nbytes
from meshwright.planner.analytic.expert_time import local_expert_numel, local_rows, max_expert_load
from meshwright.planner.analytic.memory_coefficients import MESHWRIGHT_MEMORY, FrameworkMemory, LayerSplit
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.offload_cost import NUM_LAYERS_STAYING, tier_memory
from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.machine.roofline import HALF_NBYTES


class StageLayers(NamedTuple):
    """The layers of a pp rank, and whether it has the embedding and the head."""

    layers: int
    has_embedding: bool
    has_head: bool


def stage_layers(
    shape: ModelShape, config: ParallelConfig, pp_rank: int, layer_split: LayerSplit = "layers"
) -> StageLayers:
    """Returns the layers of `pp_rank`.

    Under a V schedule the first rank has both ends, and no extra layer.
    """
    layers, pp = shape.layers, config.pp
    if pp == 1:
        return StageLayers(layers, True, True)
    if config.schedule_profile.is_bidirectional:  # every stage, and both ends, are on two ranks
        low, high = _item_range(layers, pp, pp_rank)
        return StageLayers(high - low, pp_rank in (0, pp - 1), pp_rank in (0, pp - 1))
    if config.schedule_profile.is_folded:
        low, high = _item_range(
            layers, pp, pp - 1 - pp_rank
        )  # the ends are heavy: the first takes no layer more
        return StageLayers(high - low, pp_rank == 0, pp_rank == 0)
    if layer_split == "cost":
        return _split_by_cost(layers, pp, shape.layer_numel, shape.embedding_numel)[pp_rank]
    if layer_split == "layers" and (layers % pp == 0 or (layers + 2) % pp):
        low, high = _item_range(layers, pp, pp_rank)
        return StageLayers(high - low, pp_rank == 0, pp_rank == pp - 1)
    low, high = _item_range(layers + (3 if layer_split == "norm" else 2), pp, pp_rank)
    return StageLayers(max(0, min(high, layers + 1) - max(low, 1)), pp_rank == 0, pp_rank == pp - 1)


def fullest_pp_ranks(config: ParallelConfig, layer_split: LayerSplit = "layers") -> Iterable[int]:
    """Returns the pp ranks of which one holds most.

    The first, whose microbatches stay longest; the second, which may have a layer instead of the embedding;
    the last, with the logits. With a split by cost any rank may have a layer more.
    """
    if layer_split == "cost":
        return range(config.pp)
    return sorted({0, min(1, config.pp - 1), config.pp - 1})


def microbatches_in_flight(config: ParallelConfig, pp_rank: int) -> float:
    """Returns how many microbatches' activations `pp_rank` holds at once, in units of all its layers."""
    pp, virtual_stages, in_flight = config.pp, config.virtual_stages, config.schedule_profile.in_flight
    if pp == 1:
        return 1.0
    if config.schedule_profile.is_bidirectional:
        most = in_flight * (pp + 1)  # each of one of its two stages
    elif config.schedule_profile.uniform_memory:
        most = in_flight * pp
    elif virtual_stages > 1:
        most = in_flight * (2 * (pp - pp_rank - 1) + (virtual_stages - 1) * pp + 1) / virtual_stages
    else:
        most = in_flight * (pp - pp_rank)
    return min(config.num_microbatches, most)


def _item_range(items: int, num_ranks: int, rank: int) -> tuple[int, int]:
    each, rest = divmod(items, num_ranks)
    low = rank * each + min(rank, rest)
    return low, low + each + (rank < rest)


@cache
def _split_by_cost(layers: int, pp: int, layer: float, embedding: float) -> tuple[StageLayers, ...]:
    total, cost, rank = layers * layer + embedding, 0.0, 0
    counts = [0] * pp
    for _ in range(layers):
        counts[rank] += 1
        cost += layer
        if rank < pp - 1 and cost > total * (rank + 1) / pp:
            rank += 1
    return tuple(StageLayers(count, index == 0, index == pp - 1) for index, count in enumerate(counts))


# bytes of a score in its backward, beside what is kept: its gradient in 16 bits; by torch in float32 before
# and behind softmax
SCORE_BACKWARD_NBYTES = {"eager": 6, "softmax": 2}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a rank on its device, by category (see the module), in the memory of its `host` and on its
    `disk`.
    """

    weights: float
    gradients: float
    optimizer_states: float
    residuals: float
    activations: float
    block_backward: float
    logits: float
    gathered_params: float
    fragmentation: float
    driver_context: float
    host: float = 0.0
    disk: float = 0.0

    @property
    def model_states(self) -> float:
        """Bytes that do not depend on the microbatch: weights, gradients, optimizer states, residuals."""
        return self.weights + self.gradients + self.optimizer_states + self.residuals

    @property
    def allocated(self) -> float:
        """Bytes of all tensors: torch's allocated bytes."""
        return self.model_states + self.activations + self.block_backward + self.logits + self.gathered_params

    @property
    def reserved(self) -> float:
        """Bytes that the allocator has taken for them: torch's reserved bytes."""
        return self.allocated + self.fragmentation

    @property
    def total(self) -> float:
        """All bytes: the device's own figure."""
        return self.reserved + self.driver_context


@dataclass(frozen=True)
class _LayerMemory:
    """Bytes of one layer and microbatch: saved tensors, temporaries of its backward, the stage boundary."""

    saved: float
    block_backward: float
    boundary: float


def estimate_memory(
    shape: ModelShape, config: ParallelConfig, framework: FrameworkMemory = MESHWRIGHT_MEMORY
) -> MemoryEstimate:
    """Returns the memory of the rank that holds most."""
    return max(
        (memory for _, memory in memory_by_pp_rank(shape, config, framework)), key=lambda each: each.total
    )


def estimate_memory_at_most(
    shape: ModelShape, config: ParallelConfig, framework: FrameworkMemory = MESHWRIGHT_MEMORY
) -> MemoryEstimate:
    """Returns the memory of the rank that holds most if all tokens choose the experts of one rank."""
    return estimate_memory(shape, replace(config, expert_load=max_expert_load(shape, config)), framework)


def estimate_host_memory(
    shape: ModelShape,
    config: ParallelConfig,
    ranks_per_host: int,
    framework: FrameworkMemory = MESHWRIGHT_MEMORY,
) -> float:
    """Returns the bytes that the ranks of one host keep in host memory together, of the host with most.

    Ranks are placed on hosts in order: those of a pipeline stage are neighbours.
    """
    if not config.uses_host:
        return 0.0
    stages = memory_by_pp_rank(shape, config, framework, range(config.pp))
    return _most_of_a_host([kept.host for _, kept in stages], config, ranks_per_host)


def estimate_host_disk(
    shape: ModelShape,
    config: ParallelConfig,
    ranks_per_host: int,
    framework: FrameworkMemory = MESHWRIGHT_MEMORY,
) -> float:
    """Returns the bytes that the ranks of one host keep on its disk together, likewise."""
    if config.offload != "disk":
        return 0.0
    stages = memory_by_pp_rank(shape, config, framework, range(config.pp))
    return _most_of_a_host([kept.disk for _, kept in stages], config, ranks_per_host)


def _most_of_a_host(each: Sequence[float], config: ParallelConfig, ranks_per_host: int) -> float:
    """Returns the largest sum over the ranks of a host of `each`, bytes of a rank by pipeline rank."""
    per_stage = config.num_ranks // config.pp
    per_host = min(ranks_per_host or config.num_ranks, config.num_ranks)
    if per_stage >= per_host:
        return per_host * max(each)
    stages = per_host // per_stage
    return per_stage * max(sum(each[first : first + stages]) for first in range(0, config.pp, stages))


def saved_layer_nbytes(
    shape: ModelShape, config: ParallelConfig, framework: FrameworkMemory = MESHWRIGHT_MEMORY
) -> float:
    """Returns the bytes that a layer keeps of a microbatch for its backward."""
    return _layer_memory(shape, config, framework).saved


def memory_by_pp_rank(
    shape: ModelShape,
    config: ParallelConfig,
    framework: FrameworkMemory = MESHWRIGHT_MEMORY,
    pp_ranks: Iterable[int] = (),
) -> Iterator[tuple[int, MemoryEstimate]]:
    """Yields the memory of `pp_ranks` (default: those of which one holds most), each with its rank."""
    one = _layer_memory(shape, config, framework)
    for rank in pp_ranks or fullest_pp_ranks(config, framework.layer_split):
        yield rank, _rank_memory(shape, config, framework, rank, one)


def _rank_memory(
    shape: ModelShape, config: ParallelConfig, framework: FrameworkMemory, rank: int, layer: _LayerMemory
) -> MemoryEstimate:
    stage = stage_layers(shape, config, rank, framework.layer_split)
    num_stages = 2 if config.schedule_profile.is_bidirectional else 1  # stages of a rank
    local_numel = (
        num_stages * stage.layers * shape.layer_dense_numel
        + _num_tables(shape, stage) * shape.embedding_numel
    ) / config.tp
    experts = num_stages * stage.layers * local_expert_numel(shape, config)
    shard_sizes, expert_shard_sizes = (
        [1 if config.zero_stage < zero_stage else size for zero_stage in (1, 2, 3)]
        for size in (config.zero_shard_size, config.expert_shard_size)
    )
    grad_itemsize = config.grad_reduce_itemsize if framework.gradients is None else framework.gradients
    state_itemsize = framework.optimizer_states + (
        framework.sharded_optimizer_extra if config.zero_stage else 0
    )
    num_microbatches = microbatches_in_flight(config, rank)
    logits = _logits_nbytes(shape, config, framework) if stage.has_head else 0.0
    parts = ((local_numel, shard_sizes), (experts, expert_shard_sizes))
    states = (
        sum(numel * framework.weights / shards[2] for numel, shards in parts),
        sum(numel * grad_itemsize / shards[1] for numel, shards in parts),
        sum(numel * state_itemsize / shards[0] for numel, shards in parts),
    )
    kept = tier_memory(states, config, framework, _largest_group_numel(shape, config, stage))
    num_kept = num_microbatches * stage.layers
    on_host = num_kept if config.activation_offload else 0.0
    activations = (min(num_kept, NUM_LAYERS_STAYING) if on_host else num_kept) * layer.saved
    activations += num_microbatches * layer.boundary if config.pp > 1 else 0.0
    gathered = framework.fixed_buffers + kept.buffers
    gathered += _gathered_nbytes(shape, config, framework, stage, local_numel + experts, grad_itemsize)
    gathered += scratch_nbytes(config, _largest_dense_numel(shape, config, stage))
    each = framework.logits_fragmentation + (
        framework.score_fragmentation if config.attention_kernel in SCORE_BACKWARD_NBYTES else 0
    )
    freed_blocks = each * config.local_tokens(shape) * shape.vocab if stage.has_head else 0.0
    block_backward, logits, freed_blocks = (
        (0.0, logits, freed_blocks)
        if logits + freed_blocks > layer.block_backward
        else (layer.block_backward, 0.0, 0.0)
    )
    left = (kept.weights, kept.gradients, kept.optimizer_states)
    residuals = residual_nbytes(config, local_numel)
    allocated = sum(left) + residuals + activations + block_backward + logits + gathered
    always, tp_context, pp_context = framework.driver_context
    context = always + (tp_context if config.tp > 1 else 0.0) + (pp_context if config.pp > 1 else 0.0)
    fragmentation = (framework.fragmentation - 1) * allocated + freed_blocks
    return MemoryEstimate(
        *left,
        residuals,
        activations,
        block_backward,
        logits,
        gathered,
        fragmentation,
        context,
        kept.host + on_host * layer.saved,
        kept.disk,
    )


def _largest_group_numel(shape: ModelShape, config: ParallelConfig, stage: StageLayers) -> float:
    """The elements that a rank steps of its largest parameter group: of a layer, its experts, or a table."""
    if config.offload == "none":
        return 0.0
    dense, experts = (config.zero_shard_size, config.expert_shard_size) if config.zero_stage else (1, 1.0)
    largest = _largest_dense_numel(shape, config, stage) / dense
    return max(largest, local_expert_numel(shape, config) / experts)


def _largest_dense_numel(shape: ModelShape, config: ParallelConfig, stage: StageLayers) -> float:
    """The elements of the larger of a layer without experts and a table, on a tensor rank."""
    table = shape.embedding_numel if stage.has_embedding or stage.has_head else 0
    return max(shape.layer_dense_numel, table) / config.tp


def _layer_memory(shape: ModelShape, config: ParallelConfig, framework: FrameworkMemory) -> _LayerMemory:
    tokens, tp, h = config.local_tokens(shape), config.tp, shape.hidden
    unit, sequence_shards = tokens * h, tp if config.sequence_parallel else 1
    residual_itemsize = framework.residual + (0 if config.fused_norms else framework.unfused_norm_extra)
    is_unfused = config.attention_kernel in SCORE_BACKWARD_NBYTES
    groups = (1 + shape.num_kv_heads / shape.heads) / 2
    inner_nbytes = (
        tokens
        * shape.attention_dim
        * groups
        * (framework.attention_qkv + (0 if is_unfused else framework.flash_attention_extra))
    )
    inner_nbytes += tokens * shape.mlp_dim * _mlp_saved_nbytes(shape, config, framework)
    rows = shape.expert_layer_share * local_rows(shape, config) if shape.experts else 0.0
    expert_dim = shape.expert_ffn_dim / config.expert_tp
    saved = (
        residual_itemsize * unit / sequence_shards
        + framework.matmul_inputs * unit / (1 if framework.keeps_gathered_inputs else sequence_shards)
        + inner_nbytes / tp
        + rows * (2 * HALF_NBYTES * h + expert_dim * _mlp_saved_nbytes(shape, config, framework))
    )
    each = framework.eager_scores if config.attention_kernel == "eager" else framework.fused_softmax_scores
    pairs = tokens * shape.sequence * shape.heads / tp
    scores = each * pairs if is_unfused else 0.0
    input_nbytes = HALF_NBYTES * unit / sequence_shards
    boundary = HALF_NBYTES * unit if framework.full_boundary else input_nbytes
    block_backward = framework.block_backward * (
        6 * tokens * shape.mlp_dim / tp
        + 4 * unit
        + rows * (6 * expert_dim + 4 * h)
        + SCORE_BACKWARD_NBYTES.get(config.attention_kernel, 0) * pairs
    )
    if config.recompute == "layers":
        checkpointed = config.recompute_fraction * input_nbytes + (1 - config.recompute_fraction) * (
            saved + scores
        )
        return _LayerMemory(checkpointed, saved + scores + block_backward, boundary)
    if config.recompute == "operators" or (
        config.recompute == "attention" and framework.recomputes_per_operator
    ):
        # q, v, two of the MLP's, what attention gives out
        matmul_outputs = (
            HALF_NBYTES
            * tokens
            * (shape.attention_dim * (2 + shape.num_kv_heads / shape.heads) + h + shape.mlp_dim)
            / tp
        )
        return _LayerMemory(input_nbytes + matmul_outputs, saved + block_backward, boundary)
    if config.recompute == "attention":
        return _LayerMemory(saved, scores + block_backward, boundary)
    return _LayerMemory(saved + scores, block_backward, boundary)


def _mlp_saved_nbytes(shape: ModelShape, config: ParallelConfig, framework: FrameworkMemory) -> float:
    if not shape.gated:
        return framework.mlp
    return framework.gated_mlp - (HALF_NBYTES if config.compiled else 0)


def _num_tables(shape: ModelShape, stage: StageLayers) -> int:
    return (
        1 if shape.tied and stage.has_embedding and stage.has_head else stage.has_embedding + stage.has_head
    )


def _logits_nbytes(shape: ModelShape, config: ParallelConfig, framework: FrameworkMemory) -> float:
    each = (
        framework.logits
        + (framework.sharded_logits_extra if config.tp > 1 else 0)
        + (framework.waiting_logits if config.num_microbatches > 1 else 0)
    )
    return each * config.local_tokens(shape) * shape.vocab / (config.tp if framework.shards_logits else 1)


def _gathered_nbytes(
    shape: ModelShape,
    config: ParallelConfig,
    framework: FrameworkMemory,
    stage: StageLayers,
    own: float,
    sums: float,
) -> float:
    if (config.data_parallel_size == 1 and not config.shards_on_host) or config.zero_stage < 2:
        return 0.0
    layer, table = shape.layer_dense_numel / config.tp, shape.embedding_numel / config.tp
    layer += local_expert_numel(shape, config) if config.expert_shard_size > 1 else 0.0
    largest = (
        max(layer, table)
        if (stage.has_embedding or stage.has_head) and not framework.keeps_ends_gathered
        else layer
    )
    if config.zero_stage == 2:
        return sums * framework.unreduced_layers * largest
    if framework.keeps_layers_gathered and config.pp > 1:
        return (HALF_NBYTES + sums) * own
    there = HALF_NBYTES * _num_tables(shape, stage) * table if framework.keeps_ends_gathered else 0.0
    return there + (HALF_NBYTES * framework.prefetched_layers + sums * framework.unreduced_layers) * largest
