"""Flops and saved activations of each shardable layer call, from a trial.

    norm   [ q k v -> attention -> o ]   add   norm   [ gate up -> act, times -> down ]   add
    full     a pair: sharded             full           a pair                           full

A pair counts everything from the first of its colwise layers to the end of its rowwise layer, except its
inputs; any other layer counts only itself. The rowwise layer's call carries what does not belong to one of
the colwise layers.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.model.recording.forward_recording import (
    AtenOp,
    BlockStart,
    ModuleEnd,
    ModuleStart,
    Recording,
    TensorRecord,
)
from meshwright.model.tensor_parallel.layer_pairs import LayerUse
from meshwright.model.trial.op_counter import count_flops
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall

SavedStorage = tuple[int, int, float]  # (time, storage, number of elements)


@dataclass(frozen=True)
class LayerCosts:
    """One call of a layer: its begin and end as indices of events, total flops at either, and its input's
    storage.
    """

    name: str
    begin: int
    end: int
    flops_before: int
    flops_after: int
    input_storage: int


class LayerRanges:
    """The calls of the layers with roles in a recorded forward; a time is the index of an event.

    `use_times` are the ends of those that are uses. `block_flops` are the flops of each block call and of
    what runs until the next one.
    """

    def __init__(self, recording: Recording, use_times: Collection[int]) -> None:
        self._ranges: dict[int, LayerCosts] = {}
        self.block_flops: list[int] = []
        roles, total_flops, num_uses = recording.layer_roles, 0, 0
        open_layers: list[tuple[int, int]] = []
        for time, event in enumerate(recording.events):
            match event:
                case AtenOp():
                    flops = count_flops(event)
                    total_flops += flops
                    if self.block_flops:
                        self.block_flops[-1] += flops
                case BlockStart():
                    self.block_flops.append(0)
                case ModuleStart(name=name) if name in roles:
                    open_layers.append((time, total_flops))
                case ModuleEnd(name=name, args=args) if name in roles:
                    begin, flops_before = open_layers.pop()
                    storage = args[0].storage if args and isinstance(args[0], TensorRecord) else 0
                    # a use that is not recorded gives its number to the next one
                    self._ranges[num_uses] = LayerCosts(name, begin, time, flops_before, total_flops, storage)
                    num_uses += time in use_times

    def ranged_calls(
        self, calls: Sequence[LayerCall], uses: Sequence[LayerUse]
    ) -> list[tuple[LayerCall, LayerCosts | None]]:
        """Returns `calls`, some of `uses` in order, each with its range; None if it is not known."""
        remaining_uses, found = iter(enumerate(uses)), list[tuple[LayerCall, LayerCosts | None]]()
        for call in calls:
            number = next(
                (
                    i
                    for i, use in remaining_uses
                    if (use.name, use.block_call) == (call.name, call.block_call)
                ),
                -1,
            )
            found.append((call, self._ranges.get(number)))
        return found

    def add_costs(
        self, calls: Sequence[LayerCall], uses: Sequence[LayerUse], saved: Iterable[SavedStorage], batch: int
    ) -> tuple[LayerCall, ...]:
        """Returns `calls`, some of `uses` in order, with flops and saved elements per sample of `batch`
        samples.
        """
        ranged_calls = self.ranged_calls(calls, uses)
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
            saved_numel = sum(numel for time, _, numel in saved_inside if begin <= time <= layer_range.end)
            costed_calls.append(replace(call, flops=flops // batch, saved_numel=round(saved_numel) // batch))
        return tuple(costed_calls)
