"""Finds rowwise layers whose outputs end in one sum, by following them through a recorded forward while they
are only added to.

    h = norm(x);  a = attention(h);  m = mlp(h);  y = x + a + m        a and m are summands of one sum: y
    a = attention(norm(x));  y = x + a;  m = mlp(norm(y));  z = y + m  a is read before m exists: two sums

A tensor carries the layer outputs that it contains as summands, each once; an addition joins those of its
operands. Any other reader (another operation, the end of the block, a tensor kept elsewhere) reads all of
them at once. Outputs that are never read separately may share one all-reduce: one layer adds its output to
the other's and returns zeros.

Limits: additions of equal shapes and dtypes with factor one, with gradients on; layers called once per
forward. Code that reads an output only in some steps, and not in the trial, sees zeros.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from meshwright.model.recording.forward_recording import (
    AtenOp,
    ModuleEnd,
    ModuleStart,
    Recording,
    TensorFreed,
    TensorRecord,
)
from meshwright.model.recording.op_table import find_op
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall

aten: Any = torch.ops.aten
ADD_OPS = (aten.add.Tensor, aten.add_.Tensor)
SummandIds = frozenset[int]


class FusedAllReduces:
    """Follows the outputs of `layers` through the additions of a recorded forward, to the ends of its blocks,
    and marks those that end in one sum (`mark_calls`).
    """

    def __init__(self, recording: Recording, layers: Iterable[str]) -> None:
        # layer, and index of the block call in which it ran
        self._uses: list[tuple[str, int]] = []
        # by tensor that is alive: the layer uses that it contains as summands, and its storage
        self._summands: dict[int, tuple[SummandIds, int]] = {}
        self._read_together: dict[SummandIds, None] = {}  # sets of summands that were read together, in order
        self._num_open_blocks, self._block = 0, 0
        self._follow_forward(recording, frozenset(layers))

    def _follow_forward(self, recording: Recording, layers: frozenset[str]) -> None:
        blocks = frozenset(recording.blocks)
        for event in recording.events:
            match event:
                case AtenOp():
                    if self._summands:
                        self._follow(event)
                case TensorFreed(id=tensor):
                    self._summands.pop(tensor, None)
                case ModuleStart(name=name) if name in blocks:
                    self._num_open_blocks += 1
                    self._block += self._num_open_blocks == 1
                case ModuleEnd(name=name):
                    if name in layers:
                        self._leave_layer(event)
                    if name in blocks:
                        self._end_block()

    def mark_calls(self, calls: Sequence[LayerCall]) -> tuple[LayerCall, ...]:
        """Returns `calls` with the number of the sum for those that end in one."""
        names = [name for name, _ in self._uses]
        layers_by_reads: dict[tuple[int, SummandIds], list[str]] = {}
        for index, (name, block) in enumerate(self._uses):
            reads = frozenset(
                number for number, summands in enumerate(self._read_together) if index in summands
            )
            is_single_call = names.count(name) == sum(call.name == name for call in calls) == 1
            if is_single_call and reads:
                layers_by_reads.setdefault((block, reads), []).append(name)
        joint_layers = [layers for layers in layers_by_reads.values() if len(layers) > 1]
        numbers = {name: number for number, layers in enumerate(joint_layers, 1) for name in layers}
        return tuple(replace(call, sum_id=numbers.get(call.name, 0)) for call in calls)

    def _follow(self, op: AtenOp) -> None:
        inputs = [tensor for tensor in op.inputs if tensor.id in self._summands]
        entry = find_op(op.packet.__name__)
        if not inputs or entry.kind == "metadata":
            return
        # these keep the summands if the shape stays
        keeps_summands = entry.dims == "reshape" or (entry.is_copy and not entry.cuts_graph)
        summands, out = [self._summands[tensor.id][0] for tensor in inputs], op.results
        is_followed = op.grad_enabled and all(_same_shape_and_dtype(tensor, out) for tensor in inputs)
        if (
            is_followed
            and op.overload in ADD_OPS
            and op.kwargs.get("alpha", 1) == 1
            and self._adds(op, summands)
        ):
            self._summands[out.id] = frozenset().union(*summands), out.storage
        elif is_followed and keeps_summands:
            self._summands[out.id] = summands[0], out.storage
        else:
            self._read_together |= dict.fromkeys(summands)

    def _adds(self, op: AtenOp, summands: Sequence[SummandIds]) -> bool:
        """Whether every summand occurs once in the result, and nothing else holds the tensor that is
        written.
        """
        if len(frozenset().union(*summands)) < sum(map(len, summands)):
            return False
        if op.overload is aten.add.Tensor:
            return True
        written = op.args[0]
        others = (storage for tensor, (_, storage) in self._summands.items() if tensor != written.id)
        return written.id in self._summands and written.storage not in others

    def _leave_layer(self, end: ModuleEnd) -> None:
        out = end.own_results
        if isinstance(out, TensorRecord) and end.grad_enabled and self._num_open_blocks:
            self._summands[out.id] = frozenset({len(self._uses)}), out.storage
            self._uses.append((end.name, self._block))

    def _end_block(self) -> None:
        """Ends a block: everything still carried counts as read."""
        self._num_open_blocks -= 1
        if not self._num_open_blocks:
            self._read_together |= dict.fromkeys(summands for summands, _ in self._summands.values())
            self._summands = {}


def _same_shape_and_dtype(tensor: TensorRecord, out: object) -> bool:
    return isinstance(out, TensorRecord) and out.shape == tensor.shape and out.dtype == tensor.dtype
