"""The bytes that one rank holds for the model, by category."""

import torch

from meshwright.engine.runtime.rank_state import RankState


def memory_by_category(state: RankState) -> dict[str, int]:
    """Returns bytes by category: parameters, gradients, optimizer_states, buckets; master and strategy_states
    if any.

    A gradient that is a view of a bucket counts there. Gradients exist from a backward to the optimizer's
    step. Buckets include all buffers for messages.
    """
    flat_params = state.flat_params
    buckets, sharded = state.buckets.values(), flat_params.memory_by_category()
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
    states = [param_state for optimizer in state.optimizers for param_state in optimizer.state.values()]
    state_tensors = [
        value for param_state in states for value in param_state.values() if isinstance(value, torch.Tensor)
    ]
    nbytes = state.strategy_tensors.nbytes
    kept = {"strategy_states": nbytes} if nbytes else {}
    masters = {"master": sharded["master"]} if sharded["master"] else {}
    return (
        masters
        | kept
        | {
            "parameters": sum(parameter.nbytes for parameter in unsharded.values()) + sharded["parameters"],
            "gradients": sum(parameter.nbytes for parameter in without_bucket) + sharded["gradients"],
            "optimizer_states": sum(state_tensor.nbytes for state_tensor in state_tensors),
            "buckets": sum(bucket.buffer.nbytes for bucket in buckets)
            + sharded["buffers"]
            + state.update.nbytes,
        }
    )
