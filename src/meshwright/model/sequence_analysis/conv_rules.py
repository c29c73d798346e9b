"""Rules for convolutions along the sequence, and for the padding that models add for them.

F.conv1d reads neighbours of each token; a call can be answered if these lie on other ranks (conv_call.py).
Models write:

    centered     conv1d(x, padding=(k - 1) / 2)                    as many outputs as tokens
    causal       conv1d(x, padding=k - 1)[..., :tokens]            outputs after the tokens are cut off
    causal       conv1d(F.pad(x, (k - 1, 0)))                      zeros, then tokens, go in

So there are tensors with elements around the tokens: zeros before a convolution, or unused outputs after
one. Such a tensor may be used elementwise, transposed, and cut to its tokens; any other use is reported.
"""

from dataclasses import dataclass, replace

import torch

from meshwright.model.context_parallel.conv_call import Conv1dArguments
from meshwright.model.recording.op_table import reads_values
from meshwright.model.sequence_analysis import token_rules
from meshwright.model.sequence_analysis.token_dims import indexed_dims, prime_factors
from meshwright.model.sequence_analysis.token_rules import SHARDED, TokenLayout, TokenOp
from meshwright.plan.model_spec.sequence_info import ConvSpec

PADS_TOKENS = "pads tokens"
CACHES_TOKENS = "keeps some of the tokens (copy): if that is a cache, build the model with use_cache=False"
EXTRA_CONV_OUTPUTS = "convolves tokens into more than there are, which are not cut at once: y[..., :tokens]"


@dataclass(frozen=True)
class PaddedTokens(TokenLayout):
    """Tokens along dim `-dim_from_end` with `num_before` and `num_after` elements around them; zeros if
    `is_zero_padded`.

    `origin` is the reason why the tensor cannot be used otherwise.
    """

    dim_from_end: int = 1
    num_before: int = 0
    num_after: int = 0
    is_zero_padded: bool = False


def propagate_op(op: TokenOp) -> str:
    """Notes the token layouts of the results of `op`, including padding. Returns why they are unknown; "" if
    known.
    """
    padded = {
        each: layout for each in op.operands if isinstance(layout := op.token_layouts.get(each), PaddedTokens)
    }
    if not padded:
        if op.name == "copy" and op.operands_of_kind("subset"):
            return CACHES_TOKENS
        return "" if op.name == "pad" and _propagate_pad(op) else token_rules.propagate_tokens(op)
    if not op.results and op.name != "setitem" and not reads_values(op.name):
        return ""  # only reads a shape
    tensor, layout = next(iter(padded.items()))
    if op.name == "getitem" and tensor is op.args[0]:
        return _propagate_slice(op, layout)
    if op.entry.dims == "transpose":
        return _propagate_unchanged(
            op, replace(layout, dim_from_end=_transposed_dim(op, tensor.ndim, layout.dim_from_end))
        )
    if op.entry.is_copy:
        return _propagate_unchanged(op, layout)
    is_written = any(each is op.results[0] for each in op.operands) if op.results else True
    has_same_padding = all(_has_same_padding(op, each, layout) for each in op.operands)
    if (
        op.entry.kind == "pointwise"  # random draws depend on the global position of an element
        and has_same_padding
        and not (is_written and any(each.is_zero_padded for each in padded.values()))
    ):
        return _propagate_unchanged(op, replace(layout, is_zero_padded=False))
    return f"{layout.origin} ({op.name})"


def analyze_convolution(op: TokenOp) -> tuple[str, ConvSpec]:
    """Returns why a call of F.conv1d cannot run on a shard ("" if it can), and its spec without its
    position.

    `num_tokens` of the spec is the length in the trial.
    """
    arguments, no_spec = Conv1dArguments(*op.args, **op.kwargs), ConvSpec("", "")
    layout = op.token_layouts.get(arguments.input)
    # tokens are merged into the batch dim
    is_batch_dim = arguments.input.ndim == 3 and op.token_dims(arguments.input) == (0,)
    if (
        layout is None
        or layout.kind not in ("sharded", "padded")
        or (layout.kind == "sharded" and is_batch_dim)
    ):
        return token_rules.propagate_tokens(op), no_spec
    if any(each is not None and each in op.token_layouts for each in (arguments.weight, arguments.bias)):
        return "convolves tokens with a kernel that is computed from them (conv1d)", no_spec
    padding = layout if isinstance(layout, PaddedTokens) else _without_padding(op, arguments.input)
    pad_left = padding.num_before + arguments.padding_sizes[0]
    num_extra = pad_left + padding.num_after + arguments.padding_sizes[1] - arguments.kernel_reach
    why = _unsupported_convolution(op, arguments, layout, padding)
    if not why and num_extra < 0:
        why = f"convolves tokens into fewer: {-num_extra} zeros are missing around them (conv1d)"
    if not why and pad_left > arguments.kernel_reach:
        why = "convolves tokens with more padding before them than its kernel reaches (conv1d)"
    if why:
        return why, no_spec
    for each in op.results:
        op.token_layouts[each] = (
            PaddedTokens("padded", origin=EXTRA_CONV_OUTPUTS, num_after=num_extra) if num_extra else SHARDED
        )
    options = {
        "pad_before": padding.num_before,
        "pad_after": padding.num_after,
        "num_extra_outputs": num_extra,
        "needs_grad": arguments.input.requires_grad,
    }
    tokens, width = (
        arguments.input.shape[-1] - padding.num_before - padding.num_after,
        arguments.input.shape[-2],
    )
    return "", replace(
        no_spec,
        num_tokens=tokens,
        token_numel=width,
        left_halo=pad_left,
        right_halo=arguments.kernel_reach - pad_left,
        **options,
    )


def _without_padding(op: TokenOp, tensor: torch.Tensor) -> PaddedTokens:
    return PaddedTokens("padded", dim_from_end=tensor.ndim - op.token_dims(tensor)[0], is_zero_padded=True)


def _unsupported_convolution(
    op: TokenOp, arguments: Conv1dArguments, layout: TokenLayout, padding: PaddedTokens
) -> str:
    if padding.dim_from_end == 2:
        return "sums over tokens (conv1d)"
    tokens = arguments.input.shape[-1] - padding.num_before - padding.num_after
    if (
        padding.dim_from_end != 1
        or layout.numel_per_token != 1
        or tokens not in prime_factors(op.prime_product)
    ):
        return "computes 'conv1d' along tokens"
    if not padding.is_zero_padded:
        return f"{padding.origin} (conv1d)"
    return (
        f"convolves tokens in steps of {arguments.stride_size} (conv1d)" if arguments.stride_size != 1 else ""
    )


def _propagate_pad(op: TokenOp) -> bool:
    """Whether the call pads tokens with zeros; notes the layout of the result."""
    tensor = op.argument(0, "input")
    layout = op.token_layouts.get(tensor)
    if layout is None or layout.kind != "sharded" or layout.numel_per_token != 1:
        return False
    dim_from_end = _without_padding(op, tensor).dim_from_end
    pads = list(op.argument(1, "pad"))[2 * dim_from_end - 2 : 2 * dim_from_end]
    mode, value = op.argument(2, "mode", default="constant"), op.argument(3, "value")
    if (
        not any(pads)
        or min(pads) < 0
        or mode != "constant"
        or value
        or tensor.shape[-dim_from_end] not in prime_factors(op.prime_product)
    ):
        return False
    for each in op.results:
        op.token_layouts[each] = PaddedTokens(
            "padded",
            origin=PADS_TOKENS,
            dim_from_end=dim_from_end,
            num_before=pads[0],
            num_after=pads[1],
            is_zero_padded=True,
        )
    return True


def _propagate_slice(op: TokenOp, layout: PaddedTokens) -> str:
    tensor, index = op.args[:2]
    entries = index if isinstance(index, tuple) else (index,)
    sequence_dim, size = tensor.ndim - layout.dim_from_end, tensor.shape[-layout.dim_from_end]
    token_range = range(size)[layout.num_before : size - layout.num_after]
    if not all(each is None or each is Ellipsis or type(each) in (slice, int) for each in entries):
        return f"{layout.origin} ({op.name})"
    ranges = [range(size)[each] for dim, each in indexed_dims(entries, tensor.ndim) if dim == sequence_dim]
    if ranges == [token_range]:
        op.token_layouts.update(dict.fromkeys(op.results, SHARDED))
        return ""
    if ranges in ([], [range(size)]) and not any(each is None or type(each) is int for each in entries):
        return _propagate_unchanged(op, layout)
    return f"{layout.origin} ({op.name})"


def _propagate_unchanged(op: TokenOp, layout: PaddedTokens) -> str:
    size = next(
        each.shape[-was.dim_from_end]
        for each in op.operands
        if isinstance(was := op.token_layouts.get(each), PaddedTokens)
    )
    if any(
        each.ndim < layout.dim_from_end or each.shape[-layout.dim_from_end] != size for each in op.results
    ):
        return f"{layout.origin} ({op.name})"
    op.token_layouts.update(dict.fromkeys(op.results, layout))
    return ""


def _transposed_dim(op: TokenOp, ndim: int, dim_from_end: int) -> int:
    """Returns the sequence dim after a change of dims, counted from the end."""
    dim = ndim - dim_from_end
    if op.name == "permute":
        options = op.argument(1, "dims")
        dims_order = options if isinstance(options, (tuple, list)) else op.args[1:]
        return ndim - [each % ndim for each in dims_order].index(dim)
    dims = (
        (-2, -1)
        if op.name == "mT"
        else [op.argument(place, f"dim{place - 1}", f"axis{place - 1}") for place in (1, 2)]
    )
    first_dim, second_dim = (each % ndim for each in dims)
    return ndim - (second_dim if dim == first_dim else first_dim if dim == second_dim else dim)


def _has_same_padding(op: TokenOp, each: torch.Tensor, layout: PaddedTokens) -> bool:
    """Whether `each` has the same padding at the same dim, or no tokens."""
    own_layout = op.token_layouts.get(each)
    if isinstance(own_layout, PaddedTokens):
        return (own_layout.dim_from_end, own_layout.num_before, own_layout.num_after) == (
            layout.dim_from_end,
            layout.num_before,
            layout.num_after,
        )
    return (
        own_layout is None
        and not op.token_dims(each)
        and (each.ndim < layout.dim_from_end or each.shape[-layout.dim_from_end] == 1)
    )
