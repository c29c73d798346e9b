"""Builds the module that a rank trains, and its stateless dropout."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.engine.runtime.rank_state import TrainedModule
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.analysis.forward_graph_trace import get_forward_graphs
from meshwright.model.rng.stateless_rng import StatelessRNG
from meshwright.model.tensors.float64_mode import batch_in_float64
from meshwright.model.tensors.lazy_mapping import LazyTensors
from meshwright.plan.plan import Plan


def make_trained_module(
    analyzed: AnalyzedModel,
    device: torch.device,
    dtype: torch.dtype,
    fake: FakeTensorMode | None = None,
    plan: Plan | None = None,
) -> TrainedModule:
    """Returns the model on `device` with initial values, or on fake tensors of the mode `fake`.

    With `plan`, parameters that are stored in flat parameters or in shards get neither memory nor values
    here, so that a rank with a shard never holds the full parameter. A parameter with a master copy starts
    from its value before rounding.
    """
    empty: set[str] = set()
    masters, master_dtype = set(), dtype
    if plan is not None and fake is None:
        sharded = (each for each in plan.sharding.param_shardings if each.flat_shard_axes or each.sliced_dims)
        empty = {each.param.name for each in sharded}
        master_dtype = getattr(torch, plan.job.precision.effective.master)
        masters = {param.name for param in plan.model_spec.trainable} if master_dtype != dtype else set()
    module, blocks, parameters = analyzed.make_module(device, dtype, fake, empty)
    example = batch_in_float64(analyzed.example) if dtype == torch.float64 else analyzed.example

    def value(name: str, rows: range | None = None) -> torch.Tensor:
        return analyzed.deferred_init.initial_value(name, master_dtype, device, rows)

    return TrainedModule(
        module,
        blocks,
        parameters,
        analyzed.model_spec,
        example,
        LazyTensors(empty | masters, value, value),
        get_forward_graphs(analyzed, dtype, device.type),
        analyzed.shard_check,
    )


def make_stateless_rng(analyzed: AnalyzedModel, plan: Plan) -> StatelessRNG | None:
    """Returns the stateless dropout of this model; None when its training draws no random numbers."""
    return StatelessRNG(plan.job.train.seed, analyzed.draw_sites) if analyzed.model_spec.has_dropout else None
