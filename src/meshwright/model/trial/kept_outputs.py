"""Finds in a recorded forward what matrix products and attention return, for checkpointed block calls that
keep it, and the products that a rerun need not compute.

    matmul       mm, addmm, bmm, baddbmm, linear, convolution
    attention    fused kernels: the output, and the log-sum-exp, which is in float32 at least

Storages count once. Outputs of the block call itself are none of them, because they are held anyway, and no
storages into which it writes: what was returned is lost then, and runs again. Nor is what nothing reads.
What lies between a colwise and a rowwise layer is sharded with the rowwise layer, as in layer_costs.py; what
the rowwise layer returns is a summand on each rank, as large as the sum.

    [norm] [gate up] [silu, times] [down] [add]        a product is unread where autograd saves nothing behind
                            saved ^  ^ unread          it, and Python reads no value: torch's early stop
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from meshwright.model.recording.forward_recording import (
    AtenOp,
    FunctionCall,
    ModuleEnd,
    ModuleStart,
    Recording,
    SavedTensor,
    TensorRecord,
)
from meshwright.model.recording.op_table import find_op
from meshwright.model.trial.layer_costs import LayerCosts
from meshwright.model.trial.op_counter import count_flops
from meshwright.plan.model_spec.op_sizes_and_memory import KeptOutputs, UnreadProduct
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall

aten = torch.ops.aten
# The kernels of one kind of operation, of which a rank runs those that its device has.
KEPT_KERNELS: Mapping[str, frozenset[Any]] = MappingProxyType(
    {
        "matmul": frozenset((aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.linear, aten.convolution)),
        "attention": frozenset(
            (
                aten._scaled_dot_product_flash_attention_for_cpu,
                aten._scaled_dot_product_flash_attention,
                aten._scaled_dot_product_efficient_attention,
                aten._scaled_dot_product_cudnn_attention,
                aten._scaled_dot_product_fused_attention_overrideable,
                aten._flash_attention_forward,
                aten._efficient_attention_forward,
            )
        ),
    }
)
LINEAR_KERNELS = frozenset((aten.mm, aten.addmm))  # of one product, whose sizes are those of its operands
RangedCalls = Sequence[tuple[LayerCall, LayerCosts | None]]


@dataclass(frozen=True)
class OutputStorage:
    """A storage that an operation `op` of `block_call` has made at the event `when`: its elements and the
    operations, of all samples.
    """

    when: int
    block_call: str
    op: str
    numel: int
    is_wide: bool
    is_saved: bool
    flops: int


def op_of_kernel(packet: Any) -> str:
    """Returns the kind of operation of an overload packet of torch; "" if it is of none."""
    return next((op for op, kernels in KEPT_KERNELS.items() if packet in kernels), "")


def output_storages(recording: Recording, unread: Container[int] = ()) -> list[OutputStorage]:
    """Returns what matrix products and attention have made in the block calls of a recording, in order, but
    for the events `unread`.
    """
    saved = {event.tensor.storage for event in recording.events if type(event) is SavedTensor}
    seen, found = {*recording.boundaries.kept_storages, *_overwritten(recording)}, list[OutputStorage]()
    for when, event in enumerate(recording.events):
        if type(event) is not AtenOp or not event.block_call or when in unread:
            continue
        op = op_of_kernel(event.packet)
        for index, made in enumerate(event.outputs if op else ()):
            if made.storage in seen or not made.dtype.is_floating_point:
                continue
            seen.add(made.storage)
            found.append(
                OutputStorage(
                    when,
                    event.block_call,
                    op,
                    made.storage_nbytes // made.dtype.itemsize,
                    op == "attention" and index > 0,
                    made.storage in saved,
                    0 if index else count_flops(event),
                )
            )
    return found


def _overwritten(recording: Recording) -> Iterator[int]:
    """Yields the storages into which operations write."""
    for event in recording.events:
        if type(event) is not AtenOp:
            continue
        schema = event.overload._schema
        if schema.is_mutable:
            given = {
                **dict(zip((each.name for each in schema.arguments), event.args, strict=False)),
                **event.kwargs,
            }
            written = (each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write)
            yield from (given[name].storage for name in written if isinstance(given.get(name), TensorRecord))


def kept_outputs(
    storages: Iterable[OutputStorage], ranged_calls: RangedCalls, batch: int
) -> tuple[KeptOutputs, ...]:
    """Returns `storages`, of `batch` samples, per sample, block call, kind of operation and layer.

    `ranged_calls` are the calls of layers that can be sharded, each with its time.
    """
    shardings = _Shardings(ranged_calls)
    groups: dict[tuple[str, str, str, bool], list[OutputStorage]] = {}
    for each in storages:
        groups.setdefault((each.block_call, each.op, *shardings.at(each.when)), []).append(each)

    def per_sample(group: Sequence[OutputStorage], *, wide: bool, saved: bool) -> int:
        chosen = (each for each in group if each.is_wide == wide and (each.is_saved or not saved))
        return sum(each.numel for each in chosen) // batch

    return tuple(
        KeptOutputs(
            block_call,
            op,
            per_sample(group, wide=False, saved=False),
            per_sample(group, wide=False, saved=True),
            per_sample(group, wide=True, saved=False),
            per_sample(group, wide=True, saved=True),
            sum(each.flops for each in group) // batch,
            layer,
            is_sum,
        )
        for (block_call, op, layer, is_sum), group in groups.items()
    )


def unread_products(recording: Recording) -> dict[int, UnreadProduct]:
    """Returns the last products of block calls that no backward reads, by the index of their event: a layer
    without submodules that computes one product there.
    """
    open_modules, products, parents = [""], dict[tuple[str, str], list[tuple[int, AtenOp]]](), set[str]()
    last_read = dict[str, int]()
    for when, event in enumerate(recording.events):
        match event:
            case ModuleStart():
                parents.add(open_modules[-1])
                open_modules.append(event.name)
            case ModuleEnd():
                open_modules.pop()
            case SavedTensor():
                last_read[event.block_call] = when
            case FunctionCall() if find_op(event.name).kind == "read":
                last_read[event.block_call] = when
            case AtenOp() if op_of_kernel(event.packet) and event.block_call:
                products.setdefault((event.block_call, open_modules[-1]), []).append((when, event))
    return {
        made[0][0]: UnreadProduct(block_call, layer, count_flops(made[0][1]) // recording.num_samples)
        for (block_call, layer), made in products.items()
        if len(made) == 1 and layer and layer not in parents and made[0][1].packet in LINEAR_KERNELS
        if made[0][0] > last_read.get(block_call, len(recording.events))
    }


class _Shardings:
    """By the time at which a tensor is made, the layer with which it is sharded, and whether it is a sum."""

    def __init__(self, ranged_calls: RangedCalls) -> None:
        self._own: list[tuple[int, int, str, bool]] = []  # begin, end, layer, is a sum
        self._pairs: list[tuple[int, int, str]] = []
        begin, block_call = -1, ""
        for call, costs in ranged_calls:
            if costs is None:
                continue
            self._own.append((costs.begin, costs.end, call.name, call.role == "rowwise"))
            if call.role == "colwise" and (begin < 0 or call.block_call != block_call):
                begin, block_call = costs.begin, call.block_call
            elif call.role == "rowwise" and begin >= 0:
                self._pairs.append((begin, costs.end, call.name))
                begin = -1

    def at(self, when: int) -> tuple[str, bool]:
        """Returns the layer ("": none), and whether what is made is a sum in which it ends."""
        for begin, end, layer, is_sum in self._own:
            if begin <= when <= end:
                return layer, is_sum
        return next((layer for begin, end, layer in self._pairs if begin <= when <= end), ""), False
