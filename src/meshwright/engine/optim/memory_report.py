"""What one rank holds for the model at a moment, in bytes."""

import torch

from meshwright.engine.optim.optimizers import Optimizers
from meshwright.engine.optim.update import OptimizerUpdate
from meshwright.engine.params.flat_params import FlatParams
from meshwright.engine.runtime.state import RankState


def memory_by_category(
    state: RankState, flat_params: FlatParams, optimizers: Optimizers, update: OptimizerUpdate
) -> dict[str, int]:
    """The bytes that this rank holds for the model, by category: parameters, gradients, moments, buckets, and masters if any.

    A gradient that is a piece of a bucket counts there. Gradients exist from a backward to the optimizer's step. With
    buckets are all buffers for messages.
    """
    buckets, cut = state.buckets.values(), flat_params.memory_by_category()
    in_bucket = {
        name
        for bucket in buckets
        for name, view in bucket.views.items()
        if view.dtype == bucket.parameters[name].dtype
    }
    whole = {
        name: p for name, p in state.trained_module.parameters.items() if not flat_params.is_flattened(name)
    }
    apart = (p for name, p in whole.items() if p.requires_grad and name not in in_bucket)
    states = [held for optimizer in optimizers for held in optimizer.state.values()]
    kept = [value for held in states for value in held.values() if isinstance(value, torch.Tensor)]
    masters = {"master": cut["master"]} if cut["master"] else {}
    return masters | {
        "parameters": sum(parameter.nbytes for parameter in whole.values()) + cut["parameters"],
        "gradients": sum(parameter.nbytes for parameter in apart) + cut["gradients"],
        "moments": sum(moment.nbytes for moment in kept),
        "buckets": sum(bucket.buffer.nbytes for bucket in buckets) + cut["buffers"] + update.nbytes,
    }
