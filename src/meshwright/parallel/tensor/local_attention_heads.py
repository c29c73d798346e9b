"""Single heads on a rank: local head counts, per-head inputs, and shared key/value heads.

Why it works: a head of attention needs its own query, one key and one value, and nothing of other heads.
Several query heads may share a key (grouped query; one key for all: multi-query). With at most as many ranks
as keys, whole groups are sharded. With more, single query heads are, and the weights of keys and values stay
replicated: each rank multiplies with the rows of the heads that its own query heads use, and the gradients
are summed, because a rank's gradient is that of its rows alone.

    4 ranks, 6 query heads in 2 groups      q  | 0 1 | 2 3 | 4 | 5 |        rows of k  | 0 | 0 1 | 1 | 1 |

    size attributes     while a module computes, it has the rank's number of heads, not the model's
    per-head inputs     a bias per head that a block takes is sliced to the rank's heads

    one rank computes k = x W_k[rows], dW_k = sum over ranks of (x^T dk placed at rows)

Cost: with replicated keys, their weights, gradients and optimizer states on every rank, and one all_reduce
of each gradient per microbatch (2 (t-1)/t of its bytes). A rank whose heads use several keys computes each
key as often as it uses it. A packed weight of queries, keys and values is replicated as one.
Limits: at most as many ranks as query heads. In a tensor with a head dim, the batch is dim 0 and heads are
dim 1.
Paper: Ainslie et al. 2023, "GQA: training generalized multi-query transformer models from multi-head
checkpoints", arXiv 2305.13245 (section 2.2, on sharding of keys and values); Shazeer 2019, arXiv 1911.02150
(multi-query).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.model.tensor_parallel.split_proposal import (
    local_size_attributes,
    slice_dims,
    take_local_heads,
)
from meshwright.parallel.tensor.sharded_layer import (
    ComputeFn,
    LayerSharding,
    LayerShardings,
    ParamTensors,
    layer_key,
)
from meshwright.plan.model_spec.param_dim_split import DimRanges
from meshwright.plan.model_spec.tensor_parallel_layers import PerHeadInput, SizeAttribute
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.strategy_interface import Runtime


def shared_kv_shardings(
    sharding: ShardingPlan, axis: str, layer_shardings: LayerShardings
) -> dict[str, LayerSharding]:
    """Returns the shardings of replicated colwise layers by name: those whose outputs several ranks share."""
    ranks = sharding.mesh.size(axis)
    layers = dict.fromkeys(
        layer
        for weight in (param_sharding.param for param_sharding in sharding.param_shardings)
        for layer in weight.layers
        if weight.role == "colwise"
        and (cut := weight.split_of_side("out")) is not None
        and cut.overlaps(ranks)
    )
    return {
        layer_key(name): replace(
            layer_shardings.get(layer_key(name), layer_shardings["colwise"]),
            weight_sides={},
            shared_param_axes=(axis,),
        )
        for name in layers
    }


def with_kv_row_selection(view: RankView, axis: str, layer_shardings: LayerShardings) -> LayerShardings:
    """Returns `layer_shardings`, with replicated layers computing only the rows that this rank needs."""
    index, ranks = view.coordinate[axis], view.plan.mesh.size(axis)
    named = {
        name: param_sharding.param
        for param_sharding in view.param_shardings
        for name in param_sharding.param.names
    }
    spans: dict[str, dict[str, DimRanges]] = {}
    for name, weight in named.items():
        layer, _, leaf = name.rpartition(".")
        cut = weight.split_of_side("out")
        if (
            layer_key(layer) in layer_shardings
            and weight.role == "colwise"
            and cut is not None
            and cut.overlaps(ranks)
        ):
            spans.setdefault(layer_key(layer), {})[leaf] = cut.dim_ranges(index, ranks)
    return {
        **layer_shardings,
        **{
            name: replace(
                layer_shardings[name], compute=partial(_select_rows, each, layer_shardings[name].compute)
            )
            for name, each in spans.items()
        },
    }


def bind_local_heads(runtime: Runtime, *axes: str) -> None:
    """Patches modules to use this rank's head counts, and blocks to take its per-head inputs; heads are
    sharded along `axes`.
    """
    view, patches = runtime.state.plan.view, runtime.state.patches
    index, ranks = view.plan.mesh.index(view.coordinate, axes), view.plan.mesh.group_size(axes)
    numbers: dict[str, list[SizeAttribute]] = {}
    for number in view.model_spec.size_attributes:
        numbers.setdefault(number.module, []).append(number)
    for name, each in numbers.items():
        patches.replace_forward(name, partial(_forward_with_local_numbers, each, index, ranks, {}))
    for portion in view.model_spec.per_head_inputs:
        patches.wrap_forward(portion.block, partial(_forward_with_portion, portion, index, ranks))


def _select_rows(
    spans: Mapping[str, DimRanges],
    compute: ComputeFn,
    runtime: Runtime,
    module: nn.Module,
    held: ParamTensors,
    x: torch.Tensor,
) -> Any:
    rows = {
        leaf: slice_dims(held[leaf], (span,)) for leaf, span in spans.items() if held.get(leaf) is not None
    }
    return compute(runtime, module, {**held, **rows}, x)


def _forward_with_local_numbers(
    numbers: Sequence[SizeAttribute],
    index: int,
    ranks: int,
    values: dict[str, Any],
    holder: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not values:
        values.update(local_size_attributes(holder, numbers, index, ranks))
    with _local_numbers_set(holder, values):
        return type(holder).forward(holder, *args, **kwargs)


@contextmanager
def _local_numbers_set(holder: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    held = vars(
        holder
    )  # past nn.Module.__setattr__, which takes a microsecond to find that a number is no parameter
    before = {name: held[name] for name in values}
    held.update(values)
    try:
        yield
    finally:
        held.update(before)


def _forward_with_portion(
    portion: PerHeadInput, index: int, ranks: int, inner: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    args, kwargs = take_local_heads(portion, index, ranks, args, kwargs)
    return inner(*args, **kwargs)
