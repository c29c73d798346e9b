"""Follows tensors with a size that depends on values, such as the tokens that a router gives to one expert.

    rows, place = torch.where(experts == 3)      n rows: a number that no plan knows
    up(x[rows])                                  n rows
    out.index_add_(0, rows, ...)                 as many rows as `out` has

The bytes that ranks send are planned. A layer that is given so many rows is computed in full on every rank.
"""

import torch

from meshwright.model.recording.forward_recording import AtenOp, TensorRecord, tensor_records
from meshwright.model.recording.op_table import find_op


class ValueDependentSizes:
    """Knows, of the tensors in the operations that it read, those with a size that depends on values."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # by tensor

    def has_such_rows(self, tensor: TensorRecord) -> bool:
        """Returns whether a dim of `tensor`, other than the last one, depends on values."""
        return self._sizes.get(tensor.id) in tensor.shape[:-1]

    def read_op(self, op: AtenOp) -> None:
        """Follows one operation."""
        if torch.Tag.dynamic_output_shape in op.overload.tags and _depends_on_values(op):
            for result in op.outputs:
                self._sizes[result.id] = result.shape[0]
            return
        if not self._sizes:
            return
        name = op.packet.__name__
        by_first = find_op(name).kind == "update" or name.endswith("_")
        operands = tensor_records(op.args[:1]) if by_first else op.inputs
        sizes = {self._sizes[each.id] for each in operands if each.id in self._sizes}
        for result in op.outputs if sizes else ():
            if found := sizes.intersection(result.shape):
                self._sizes[result.id] = found.pop()


def _depends_on_values(op: AtenOp) -> bool:
    if op.packet is not torch.ops.aten.index:
        return True
    return any(each.dtype in (torch.bool, torch.uint8) for each in tensor_records(op.args[1:]))
