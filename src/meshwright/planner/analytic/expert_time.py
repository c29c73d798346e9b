"""Seconds of the experts of a layer: what they compute, and the rows that travel to them.

    rows per rank        R = T k / s      T tokens of a microbatch on a rank, k chosen experts, s tensor ranks
                                          that share the tokens, or have different experts of the same ones;
                                          times the load of the busiest rank
    matmuls              3 grouped matmuls (2 without a gate) of R rows, in tiles of 128 per expert; never
                         faster than reading the matrices of all E / ep local experts
    around them          sorting, weighting and adding rows passes through memory
    sent per trip        T / s x (n - 1) p rows,  p = 1 - C(E - E / ep, k) / C(E, k),  n of the ep ranks with
                         other tokens: a token goes once to each of them that has one of its experts
                         (parallel/expert/expert_parallel.py)
    trips                2 forward, 2 backward, all exposed unless the code overlaps them

The transfer takes the longer of what stays on a host, at the rate of links, and what leaves it, at that of
the network. Slices of experts along tp add a sum: of T rows, or of the k T rows under sequence parallelism.
So do different experts along tp (`ep_tp`): a sum of T rows, and nothing is sent along it.

A step ends with its busiest rank. EXPERT_LOAD, 1.6, is its tokens over the mean of all ranks. It is fitted
to two pairs of published runs (Megatron-MoE-ModelZoo, Qwen3-235B on 256 H100): with the router's own choice
they took 1.21 and 1.15 times as long as with a forced balance, which loads from 1.5 to 1.7 explain. A router
that balances well has less; one that does not has no limit but `max_expert_load`.

Papers: D. Lepikhin et al. 2020, arXiv 2006.16668, section 3.2; T. Gale et al. 2022, "MegaBlocks", arXiv
2211.15841 (grouped matmuls); D. Liu et al. 2025, "MoE Parallel Folding", arXiv 2504.14960.
"""

from math import exp, lgamma, log2

from meshwright.planner.analytic.layer_time import PassTime
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.machine.machine import Machine
from meshwright.planner.machine.roofline import (
    HALF_NBYTES,
    MATMUL_TILE,
    all_gather_seconds,
    matmul_seconds,
    memory_op_seconds,
)

CHOICE_NBYTES = 8  # of a chosen expert in a row that travels: its index and its weight
ROW_KERNELS = 12  # kernels around the experts in a forward


def expert_load(shape: ModelShape, config: ParallelConfig) -> float:
    """Returns the tokens of the busiest rank along ep, over the mean."""
    return min(config.expert_load, max_expert_load(shape, config)) if config.ep > 1 else 1.0


def max_expert_load(shape: ModelShape, config: ParallelConfig) -> float:
    """Returns the load of a rank whose experts all tokens choose, as far as k experts are there."""
    if not shape.experts or config.ep == 1:
        return 1.0
    return config.ep * min(shape.top_k, -(-shape.experts // config.ep)) / shape.top_k


def local_rows(shape: ModelShape, config: ParallelConfig) -> float:
    """Returns the rows (token and expert) of a microbatch on the busiest rank, of a layer with experts."""
    shards = config.token_shards * config.ep_tp
    return config.local_tokens(shape) * shape.top_k / shards * expert_load(shape, config)


def local_expert_numel(shape: ModelShape, config: ParallelConfig) -> float:
    """Returns the elements of the experts of a layer on a rank."""
    return shape.layer_expert_numel / (config.ep * config.expert_tp)


def expert_compute(shape: ModelShape, config: ParallelConfig, machine: Machine) -> PassTime:
    """Returns what the router and the experts of a layer compute for one microbatch on one rank."""
    if not shape.experts:
        return PassTime()
    rates, costs, rows = machine.rates, config.expert_costs, local_rows(shape, config)
    h, f, local = shape.hidden, shape.expert_ffn_dim / config.expert_tp, shape.experts / config.ep
    each = rows / local
    padding = (each + MATMUL_TILE[0] / 2) / each
    weights_s = forward = inputs = 0.0
    for out_dim, in_dim in ((shape.num_up_projections * f, h), (h, f)):
        read_s = HALF_NBYTES * local * out_dim * in_dim / (machine.device.memory_rate * rates.memory)
        scale = padding / costs.matmul
        forward += max(read_s, scale * matmul_seconds(machine, rows, out_dim, in_dim, config.dtype))
        inputs += max(read_s, scale * matmul_seconds(machine, rows, in_dim, out_dim, config.dtype))
        gradient_s = matmul_seconds(machine, local * out_dim, in_dim, each, config.dtype)
        weights_s += max(read_s, gradient_s / costs.matmul)
    tokens = config.local_tokens(shape) / config.token_shards
    router_s = matmul_seconds(machine, tokens, shape.experts, h)
    inner = 1.5 * (shape.num_up_projections + 1) * f * rates.inner_passes * (0.7 if config.compiled else 1.0)
    memory_s = memory_op_seconds(machine, HALF_NBYTES * rows * (costs.row_passes * h + inner), ROW_KERNELS)
    memory_s += _cast_seconds(config, machine, rows * (h + f))
    share = shape.expert_layer_share
    return PassTime(
        share * (forward + router_s + memory_s),
        share * (inputs + weights_s + 2 * router_s + 2 * memory_s),
        share * weights_s,
    )


def _cast_seconds(config: ParallelConfig, machine: Machine, elements: float) -> float:
    if not config.dtype.startswith("float8") and config.dtype != "float4":
        return 0.0
    passes = machine.rates.cast_passes
    passes *= machine.rates.rowwise_cast_factor if config.dtype == "float8_rowwise" else 1.0
    return passes * 4 * elements / (machine.device.memory_rate * machine.rates.memory)


def expert_dispatch(shape: ModelShape, config: ParallelConfig, machine: Machine) -> PassTime:
    """Returns the exposed time in which the rows of a layer travel to their experts and back."""
    if not shape.experts or config.ep * config.expert_tp == 1:
        return PassTime()
    tokens = config.local_tokens(shape) / config.token_shards * expert_load(shape, config)
    row_nbytes = HALF_NBYTES * shape.hidden
    there_s = _trip_s(shape, config, machine, tokens * (row_nbytes + CHOICE_NBYTES * shape.top_k))
    back_s = _trip_s(shape, config, machine, tokens * row_nbytes)
    sliced = local_rows(shape, config) if config.sequence_parallel else 0.0
    slices_s = 2 * all_gather_seconds(
        machine, HALF_NBYTES * sliced * shape.hidden, config.expert_tp, config.tp_stride, config.num_ranks
    )
    seconds = shape.expert_layer_share * (config.expert_costs.exposed * (there_s + back_s) + slices_s)
    return PassTime(seconds, seconds)


def _trip_s(shape: ModelShape, config: ParallelConfig, machine: Machine, nbytes: float) -> float:
    """Returns the seconds of one trip; `nbytes`: what is sent if each token goes to one other rank."""
    ranks = config.ep_dispatch
    if ranks == 1:
        return 0.0
    stride = config.expert_tp if config.sequence_parallel else config.dp_stride
    per_host = min(ranks, max(1.0, machine.devices_per_host // stride))
    hosts, costs = ranks / per_host, config.expert_costs
    copies = shape.top_k / config.ep if costs.sends_per_expert else _reached_share(shape, config.ep)
    inside = (ranks - 1 if costs.sends_per_host else per_host - 1) * copies
    outside = (ranks - per_host) * copies
    if costs.sends_per_host:
        outside = (hosts - 1) * _reached_share(shape, hosts * config.ep_tp)
    latency_s = machine.rates.latency_s * log2(ranks) * (2 if hosts > 1 else 1)
    if hosts <= 1:
        return nbytes * inside / machine.link_rate + latency_s
    # neighbouring hosts: their messages do not reach the levels of the fabric that all hosts share
    rate = machine.nic_rate(hosts)
    return nbytes * max(inside / machine.link_rate, outside / rate) + latency_s


def _reached_share(shape: ModelShape, groups: float) -> float:
    """Returns the chance that a token has an expert in one of `groups` equal groups of experts."""
    rest = shape.experts - shape.experts / groups
    if rest < shape.top_k:
        return 1.0
    return 1 - exp(_log_choose(rest, shape.top_k) - _log_choose(shape.experts, shape.top_k))


def _log_choose(many: float, few: float) -> float:
    return lgamma(many + 1) - lgamma(few + 1) - lgamma(many - few + 1)
