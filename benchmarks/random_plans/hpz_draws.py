"""Gathers the weights of a random plan within hosts, where zero of stage 3 has shards over several."""

from collections.abc import Sequence
from random import Random

from meshwright.parallel.data.hierarchical_partition import HierarchicalPartition
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

RANKS_PER_HOST = 2


def with_hpz(rng: Random, mesh: Mesh, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Returns `strategies`, in most plans with hpz where nothing refuses it.

    Weights are gathered for each use, by an even number of ranks above two; their shards rest on the device.
    """
    zero = [each for each in strategies if isinstance(each, ZeRO) and each.stage == 3]
    on_host = any(isinstance(each, Offload) and "weights" in each.what for each in strategies)
    has_experts = any(each.name.startswith("expert") for each in strategies)
    if not zero or on_host or has_experts or zero[0].gather != "use" or zero[0].keep_mb:
        return tuple(strategies)
    num_shards = mesh.size(zero[0].axis) * (mesh.cp if zero[0].axis != "cp" else 1)
    if num_shards <= RANKS_PER_HOST or num_shards % RANKS_PER_HOST or rng.random() < 0.2:
        return tuple(strategies)
    mixed = [*strategies, HierarchicalPartition(RANKS_PER_HOST)]
    rng.shuffle(mixed)
    return tuple(mixed)
