"""Offloads the optimizer states of a random plan, its gradients and weights where they are in shards, and
what blocks keep for their backward, which ranks along tp may keep in parts.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from tempfile import gettempdir

from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.gist import Gist
from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.parallel.memory.partitioned_activations import PartitionedActivations
from meshwright.parallel.memory.tiers.activation_offload import ActivationOffload
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.server.parameter_server import ParameterServer
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.strategy_interface import Strategy

ON_DISK_SHARE = 0.3  # of plans with states, or activations, that leave the device


def with_offloads(seed: str, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Returns `strategies`, in some plans with model states or activations on the host, or in parts."""
    states, activations = Random(f"{seed}/offload"), Random(f"{seed}/activations")
    if states.random() < 0.3:
        strategies = with_states_offload(states, strategies)
    if activations.random() < 0.25:
        strategies = with_activation_offload(activations, strategies)
    if activations.random() < 0.5:
        strategies = with_partitioned_activations(activations, strategies)
    return tuple(strategies)


def with_states_offload(rng: Random, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Returns `strategies` with offload in one of its modes; without it where ranks step for others."""
    if any(isinstance(each, (DataParallelMaster, ParameterServer)) for each in strategies):
        return tuple(strategies)
    modes = [Offload(prefetch=rng.choice((0, 1, 3))), Offload(step_on="host")]
    stages = [each.stage for each in strategies if isinstance(each, ZeRO) and not each.replicate_axis]
    if stages and not any(isinstance(each, Pipeline) for each in strategies):
        modes.append(Offload(("optimizer_states", "gradients"), "host"))
        if stages == [3]:
            modes.append(Offload(("optimizer_states", "gradients", "weights"), "host"))
    chosen: Strategy = rng.choice(modes)
    if rng.random() < ON_DISK_SHARE:
        chosen = DiskOffload(gettempdir(), num_buffers=rng.choice((1, 2, 3)))
        if chosen.num_buffers < 3 and any(isinstance(each, ZeRO) and each.stage == 3 for each in strategies):
            chosen = replace(chosen, what=("optimizer_states", "weights"))
    mixed = [*strategies, chosen]
    rng.shuffle(mixed)
    return tuple(mixed)


def with_activation_offload(rng: Random, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Returns `strategies` with activation offload; without it where `gist` encodes what would leave, or
    `memory_budget` drops it, and where checkpointed blocks of a model in one piece may keep nothing that can
    leave.
    """
    in_stages = any(isinstance(each, Pipeline) for each in strategies)
    checkpoints = any(isinstance(each, ActivationCheckpointing) for each in strategies)
    has_other_form = any(isinstance(each, (Gist, MemoryBudget)) for each in strategies)
    if has_other_form or (checkpoints and not in_stages):
        return tuple(strategies)
    prefetch = rng.choice((0, 1)) if in_stages else 0
    at = Random()
    at.setstate(rng.getstate())  # the draws that follow stay those of before
    folder = gettempdir() if at.random() < ON_DISK_SHARE else ""
    mixed = [*strategies, ActivationOffload(prefetch=prefetch, folder=folder)]
    rng.shuffle(mixed)
    return tuple(mixed)


def with_partitioned_activations(rng: Random, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Returns `strategies` with partitioned activations, if there are stages that are checkpointed and whole
    streams along tp.
    """
    names = {each.name for each in strategies}
    if not names.issuperset((Pipeline.name, ActivationCheckpointing.name)) or "sequence_parallel" in names:
        return tuple(strategies)
    if not any(isinstance(each, TensorParallel) for each in strategies):
        return tuple(strategies)
    mixed = [*strategies, PartitionedActivations(prefetch=rng.choice((0, 1)))]
    rng.shuffle(mixed)
    return tuple(mixed)
