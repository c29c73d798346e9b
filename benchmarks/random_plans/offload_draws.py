"""Offloads the optimizer states of a random plan, and its gradients and weights where they are in shards."""

from collections.abc import Sequence
from random import Random
from tempfile import gettempdir

from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.disk_offload import DiskOffload
from meshwright.parallel.memory.offload import Offload
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.strategy_interface import Strategy


def with_offload(rng: Random, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Returns `strategies` with offload in one of its modes; without it beside data_parallel_master."""
    if any(isinstance(each, DataParallelMaster) for each in strategies):
        return tuple(strategies)
    modes = [Offload(prefetch=rng.choice((0, 1, 3))), Offload(step_on="host")]
    stages = [each.stage for each in strategies if isinstance(each, ZeRO) and not each.replicate_axis]
    if stages and not any(isinstance(each, Pipeline) for each in strategies):
        modes.append(Offload(("optimizer_states", "gradients"), "host"))
        if stages == [3]:
            modes.append(Offload(("optimizer_states", "gradients", "weights"), "host"))
    chosen: Strategy = rng.choice(modes)
    if rng.random() < 0.3:
        chosen = DiskOffload(gettempdir(), num_buffers=rng.choice((1, 2, 3)))
    mixed = [*strategies, chosen]
    rng.shuffle(mixed)
    return tuple(mixed)
