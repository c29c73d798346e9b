"""How much of a visit is done by layers that can be divided: operations, and what is kept of them for backward.

    norm   [ q k v -> attend -> o ]   add   norm   [ gate up -> act, times -> down ]   add
    whole    a pair: shared out       whole         a pair                            whole

Of a pair that is all between the first of its columns layers and the end of its rows layer, but for what goes in; of any other
layer what it does itself. The call of the rows layer has what does not belong to one of the columns layers.
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
from meshwright.plan.model_spec.layer_calls import LayerCall

SavedStorage = tuple[int, int, float]  # when, in which storage, how many elements


@dataclass(frozen=True)
class LayerRange:
    """One call of a layer: from when to when, operations until either, and the storage that it took in."""

    name: str
    begin: int
    end: int
    flops_before: int
    flops_after: int
    input_storage: int


class LayerRangeRecorder:
    """Notes when layers run; `flops()` tells the operations so far, `count()` how many uses of layers have been noted."""

    def __init__(self, total_flops: Callable[[], int], num_uses: Callable[[], int]) -> None:
        self.clock = 0
        self._total_flops, self._num_uses = total_flops, num_uses
        self._open: list[tuple[int, int]] = []
        self._ranges: dict[int, LayerRange] = {}

    def attach_hooks(self, module: nn.Module, layers: Iterable[str]) -> list[RemovableHandle]:
        """Watch `layers` of `module` until the handles are removed."""
        handles = []
        for name in layers:
            layer = module.get_submodule(name)
            handles.append(layer.register_forward_pre_hook(self._begin))
            handles.append(layer.register_forward_hook(partial(self._end, name)))
        return handles

    def add_costs(
        self, calls: Sequence[LayerCall], uses: Sequence[LayerUse], saved: Iterable[SavedStorage], batch: int
    ) -> tuple[LayerCall, ...]:
        """`calls`, some of `uses` in their order, with operations and what is kept per sample; `batch` samples were run."""
        left, found = iter(enumerate(uses)), []
        for call in calls:
            number = next(
                (i for i, use in left if (use.name, use.block_call) == (call.name, call.block_call)), -1
            )
            found.append((call, self._ranges.get(number)))
        given = {stretch.given for call, stretch in found if stretch is not None and call.role != "rows"}
        own = [each for each in saved if each[1] not in given]
        shares: list[LayerCall] = []
        waiting: list[LayerRange] = []
        for call, stretch in found:
            if stretch is None or call.role == "inside":  # what stands between others counts as theirs
                shares.append(call)
                continue
            begin, flops = stretch.begin, stretch.num_after - stretch.before
            if call.role == "columns":
                waiting = (
                    [*waiting, stretch] if not shares or shares[-1].block_call == call.visit else [stretch]
                )
                shares.append(replace(call, flops=flops // batch))
                continue
            if call.role == "rows" and waiting:
                begin = waiting[0].begin
                flops = (
                    stretch.num_after
                    - waiting[0].flops_before
                    - sum(each.flops_after - each.flops_before for each in waiting)
                )
                waiting = []
            inside = sum(numel for when, _, numel in own if begin <= when <= stretch.end)
            shares.append(replace(call, flops=flops // batch, inside=round(inside) // batch))
        return tuple(shares)

    def _begin(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        self.clock += 1
        self._open.append((self.clock, self._total_flops()))

    def _end(self, name: str, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        begin, before = self._open.pop()
        given = storage_id(args[0]) if args and isinstance(args[0], torch.Tensor) else 0
        self._ranges[self._num_uses()] = LayerRange(
            name, begin, self.clock, before, self._total_flops(), given
        )  # an unnoted use leaves its place
        self.clock += 1
