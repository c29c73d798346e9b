"""Gathers the weights of a random plan of zero stage 3 within hosts, as codes, or both."""

from dataclasses import replace
from random import Random

from benchmarks.random_plans.compression_draws import with_compression
from benchmarks.random_plans.random_draws import MAX_RANKS, Draw
from meshwright.parallel.compression.quantized_weights import QuantizedWeights
from meshwright.parallel.data.hierarchical_partition import HierarchicalPartition
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.plan.strategy_interface import Strategy

NUM_SHARDS = 4  # along the axis of zero: the smallest number of hosts of several ranks


def with_zero_plus_plus(rng: Random, drawn: Draw) -> Draw | None:
    """Returns `drawn` with shards over `NUM_SHARDS` ranks and techniques of ZeRO++; None where it has no zero
    of stage 3, or would have too many ranks.
    """
    zero = [each for each in drawn.strategies if isinstance(each, ZeRO) and each.stage == 3]
    if not zero:
        return None
    mesh = replace(drawn.mesh, **{zero[0].axis: NUM_SHARDS})
    if mesh.world_size > MAX_RANKS:
        return None
    sizes = [2] if zero[0].axis == "cp" or mesh.cp == 1 else [2, 2, 4]
    on_host = any(isinstance(each, Offload) and "weights" in each.what for each in drawn.strategies)
    chosen: list[Strategy] = [
        *([HierarchicalPartition(rng.choice(sizes))] if rng.random() < 0.7 and not on_host else []),
        *([QuantizedWeights()] if rng.random() < 0.7 else []),
    ]
    others = [each for each in drawn.strategies if not isinstance(each, HierarchicalPartition)]
    mixed = [*others, *(chosen or [QuantizedWeights()])]
    rng.shuffle(mixed)
    strategies = with_compression(rng, mixed) if rng.random() < 0.3 else tuple(mixed)
    return replace(drawn, mesh=mesh, strategies=strategies, guard=False)
