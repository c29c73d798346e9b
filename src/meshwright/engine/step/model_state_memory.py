"""The bytes that one rank holds for the model in a memory tier, by category."""

import torch

from meshwright.engine.runtime.rank_state import RankState
from meshwright.plan.hardware.memory_tiers import MemoryTier


def memory_by_category(state: RankState, tier: MemoryTier = "device") -> dict[str, int]:
    """Returns bytes in `tier` by category: parameters, gradients, optimizer_states, buckets; master and
    strategy_states if any.

    A gradient that is a view of a bucket counts there. Gradients exist from a backward to the optimizer's
    step. Buckets include all buffers for messages.
    """
    flat_params, tiers = state.flat_params, state.plan.sharding.tiers
    sharded, state_nbytes = flat_params.memory_by_category(), 0
    if tiers.optimizer_states == tier:
        kept_states = (each for optimizer in state.optimizers for each in optimizer.state.values())
        values = (value for each in kept_states for value in each.values())
        state_nbytes = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
    else:
        sharded["master"] = 0
    update_nbytes = state.update.nbytes if tiers.step == tier else 0
    each_flat = flat_params.by_param_group.values()
    remote = sum(each.shard.nbytes for each in each_flat if each.shard_is_remote)
    if tier == "disk":
        kept = {
            "parameters": remote if tiers.weights == "disk" else 0,
            "master": sharded["master"],
            "optimizer_states": state_nbytes,
        }
        nbytes = 0 if state.disk is None else state.disk.nbytes
        return {"gradients": 0, **kept, "buckets": nbytes - sum(kept.values())}
    if tier == "host":
        masters, remote = flat_params.master_weights, remote if tiers.weights == "host" else 0
        grads = [each.gradient for each in each_flat if tiers.gradients == "host"]
        return {
            "parameters": sum(each.rounded_nbytes for each in each_flat) + masters.rounded_nbytes + remote,
            "gradients": sum(each.host_gradient_nbytes for each in each_flat)
            + masters.host_gradient_nbytes
            + sum(grad.nbytes for grad in grads if grad is not None),
            "master": sharded["master"],
            "optimizer_states": state_nbytes,
            "buckets": update_nbytes
            + state.offloaded.nbytes
            + (0 if state.disk is None else state.disk.host_nbytes),
        }
    buckets = state.buckets.values()
    in_bucket = {
        name
        for bucket in buckets
        for name, view in bucket.views.items()
        if view.dtype == bucket.parameters[name].dtype
    }
    unsharded = {
        name: p for name, p in state.trained_module.parameters.items() if not flat_params.is_flattened(name)
    }
    without_bucket = (p for name, p in unsharded.items() if p.requires_grad and name not in in_bucket)
    nbytes = state.strategy_tensors.nbytes
    kept = {"strategy_states": nbytes} if nbytes else {}
    masters = {"master": sharded["master"]} if sharded["master"] else {}
    return (
        masters
        | kept
        | {
            "parameters": sum(parameter.nbytes for parameter in unsharded.values()) + sharded["parameters"],
            "gradients": sum(parameter.nbytes for parameter in without_bucket) + sharded["gradients"],
            "optimizer_states": state_nbytes,
            "buckets": sum(bucket.buffer.nbytes for bucket in buckets) + sharded["buffers"] + update_nbytes,
        }
    )
