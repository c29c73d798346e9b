"""Finds the tokens that a block puts into a side channel, such as the logits of its router.

    the block     hidden [samples, tokens, width]
    the router    hidden.view(-1, width) --> linear --> logits [samples * tokens, experts]      captured

A rank has the logits of its own tokens. Glue sees the captured tensors of a block as it sees its outputs:
with all tokens. Where samples and tokens are merged into one dim, that takes the order of the rows, which
only the reshape says that has merged them: the graph is followed back to it.

Limits: a tensor without a graph, and rows that were permuted since, are not followed.
"""

from collections.abc import Sequence
from typing import Any

import torch

from meshwright.model.hf.captured_outputs import CaptureMark
from meshwright.model.sequence_analysis.token_rules import TokenLayout, TokenLayouts, find_token_dims
from meshwright.model.sequence_analysis.trial_lengths import TrialLengths
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.plan.model_spec.sequence_info import CapturedTokens

RESHAPES = ("ViewBackward0", "UnsafeViewBackward0")
# backwards of operations whose result has the rows of its operands, in their order
ROWWISE = frozenset(
    f"{name}Backward0"
    for name in (
        *("Mm", "Addmm", "Mul", "Add", "Sub", "Div", "Softmax", "LogSoftmax", "ToCopy", "Clone", "Alias"),
        *("Sigmoid", "Tanh", "Relu", "Silu", "Gelu", "NativeDropout", "NativeLayerNorm", "FusedRmsNorm"),
    )
)


def find_captured_tokens(
    side_channels: Sequence[CaptureMark], token_layouts: TokenLayouts, trial_lengths: TrialLengths
) -> tuple[list[CapturedTokens | None], tuple[str, ...]]:
    """Returns the tokens of each tensor that a block has put into `side_channels` (None: it has none), and
    the channels in which a tensor has tokens that are not known to be those of a rank alone.

    Forgets the layouts of these tensors: they are no longer inside the block.
    """
    captured, leaks = list[CapturedTokens | None](), dict[str, None]()
    for mark in side_channels:
        for tensor in tree_tensors(mark.added_tensors):
            layout = token_layouts.pop(tensor, None)
            captured.append(_local_tokens(tensor, layout, trial_lengths))
            if captured[-1] is None and find_token_dims(tensor, trial_lengths.prime_product):
                leaks[mark.channel] = None
    return captured, tuple(leaks)


def _local_tokens(
    tensor: torch.Tensor, layout: TokenLayout | None, trial_lengths: TrialLengths
) -> CapturedTokens | None:
    dims = find_token_dims(tensor, trial_lengths.prime_product)
    if len(dims) != 1 or layout is None or layout.kind != "sharded":
        return None
    (dim,) = dims
    length = trial_lengths.planned_length(tensor.shape[dim])
    if length not in trial_lengths.input_lengths:
        return None
    if tensor.shape[dim] in trial_lengths.planned_lengths:
        return CapturedTokens(dim, length)
    if dim == 0 and _rows_are_by_sample(tensor, trial_lengths.num_samples):
        return CapturedTokens(dim, length, is_merged=True)
    return None


def _rows_are_by_sample(tensor: torch.Tensor, num_samples: int) -> bool:
    """Returns whether the rows of `tensor` are those of the first sample, then those of the second, and so
    on.
    """
    num_rows = tensor.shape[0]
    pending, is_known = [tensor.grad_fn], False
    while pending:
        node: Any = pending.pop()
        if node is not None and node.name() in RESHAPES:
            sizes = node._saved_self_sym_sizes
            if sizes[:1] == (num_rows,):
                pending += _operands(node, num_rows)
            elif sizes[:2] == (num_samples, num_rows // num_samples):
                is_known = True
            else:
                return False
        elif node is not None and node.name() in ROWWISE:
            pending += _operands(node, num_rows)
        else:
            return False
    return is_known


def _operands(node: Any, num_rows: int) -> list[Any]:
    """Returns the nodes behind `node` whose results have `num_rows` rows; others are weights."""
    behind = [source for source, _ in node.next_functions if source is not None]
    return [each for each in behind if "_input_metadata" in dir(each) and _num_rows(each) == num_rows]


def _num_rows(node: Any) -> int:
    shape = node._input_metadata[0].shape
    return shape[0] if len(shape) else 0
