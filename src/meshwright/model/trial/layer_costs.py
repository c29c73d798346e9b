"""Flops and saved activations of each shardable layer call, from a trial.

    norm   [ q k v -> attention -> o ]   add   norm   [ gate up -> act, times -> down ]   add
    full     a pair: sharded             full           a pair                           full

A pair counts everything from the first of its colwise layers to the end of its rowwise layer, except its
inputs; any other layer counts only itself. The rowwise layer's call carries what does not belong to one of
the colwise layers.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from meshwright.model.tensor_parallel.layer_pairs import LayerUse
from meshwright.model.tensors.pytree import storage_id
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall

SavedStorage = tuple[int, int, float]  # (clock, storage id, number of elements)


@dataclass(frozen=True)
class LayerCosts:
    """One call of a layer: its begin and end on the clock, total flops at either, and its input's storage."""

    name: str
    begin: int
    end: int
    flops_before: int
    flops_after: int
    input_storage: int


class LayerCostRecorder:
    """Records when layers run; `total_flops()` and `num_uses()` count flops and layer uses so far."""

    def __init__(self, total_flops: Callable[[], int], num_uses: Callable[[], int]) -> None:
        self.clock = 0
        self._total_flops, self._num_uses = total_flops, num_uses
        self._open: list[tuple[int, int]] = []
        self._ranges: dict[int, LayerCosts] = {}

    def attach_hooks(self, module: nn.Module, layers: Iterable[str]) -> list[RemovableHandle]:
        """Adds hooks to `layers` of `module`; recording ends when the returned handles are removed."""
        handles = []
        for name in layers:
            layer = module.get_submodule(name)
            handles.append(layer.register_forward_pre_hook(self._begin))
            handles.append(layer.register_forward_hook(partial(self._end, name)))
        return handles

    def add_costs(
        self, calls: Sequence[LayerCall], uses: Sequence[LayerUse], saved: Iterable[SavedStorage], batch: int
    ) -> tuple[LayerCall, ...]:
        """Returns `calls`, some of `uses` in order, with flops and saved elements per sample of `batch`
        samples.
        """
        remaining_uses, ranged_calls = iter(enumerate(uses)), []
        for call in calls:
            number = next(
                (
                    i
                    for i, use in remaining_uses
                    if (use.name, use.block_call) == (call.name, call.block_call)
                ),
                -1,
            )
            ranged_calls.append((call, self._ranges.get(number)))
        input_storages = {
            layer_range.input_storage
            for call, layer_range in ranged_calls
            if layer_range is not None and call.role != "rowwise"
        }
        saved_inside = [each for each in saved if each[1] not in input_storages]
        costed_calls: list[LayerCall] = []
        colwise_ranges: list[LayerCosts] = []
        for call, layer_range in ranged_calls:
            if layer_range is None or call.role == "between_pair":  # its cost is part of the pair around it
                costed_calls.append(call)
                continue
            begin, flops = layer_range.begin, layer_range.flops_after - layer_range.flops_before
            if call.role == "colwise":
                colwise_ranges = (
                    [*colwise_ranges, layer_range]
                    if not costed_calls or costed_calls[-1].block_call == call.block_call
                    else [layer_range]
                )
                costed_calls.append(replace(call, flops=flops // batch))
                continue
            if call.role == "rowwise" and colwise_ranges:
                begin = colwise_ranges[0].begin
                flops = (
                    layer_range.flops_after
                    - colwise_ranges[0].flops_before
                    - sum(each.flops_after - each.flops_before for each in colwise_ranges)
                )
                colwise_ranges = []
            saved_numel = sum(numel for clock, _, numel in saved_inside if begin <= clock <= layer_range.end)
            costed_calls.append(replace(call, flops=flops // batch, saved_numel=round(saved_numel) // batch))
        return tuple(costed_calls)

    def _begin(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        self.clock += 1
        self._open.append((self.clock, self._total_flops()))

    def _end(self, name: str, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        begin, flops_before = self._open.pop()
        input_storage = storage_id(args[0]) if args and isinstance(args[0], torch.Tensor) else 0
        # a use that is not recorded gives its number to the next one
        self._ranges[self._num_uses()] = LayerCosts(
            name, begin, self.clock, flops_before, self._total_flops(), input_storage
        )
        self.clock += 1
