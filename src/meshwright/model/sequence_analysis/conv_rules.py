"""Convolutions over tokens, and what models put around tokens for them: which of it a rank can do that has some of the tokens.

F.conv1d takes in neighbours of each token, and is answered where those are on other ranks (model/convolve.py). Models write:

    even         conv1d(x, padding=(k - 1) / 2)                    as many tokens come out as go in
    causal       conv1d(x, padding=k - 1)[..., :tokens]            what is behind the tokens is cut off
    causal       conv1d(F.pad(x, (k - 1, 0)))                      zeros, then tokens, go in

So there are tensors with something around the tokens: zeros, before a convolution, or what nobody will use, behind one. Such a
tensor may be computed with element by element, be turned round, and be cut to its tokens; whatever else is done with it is named.
"""

from dataclasses import dataclass, replace

import torch

from meshwright.model.sequence_analysis import token_rules
from meshwright.model.sequence_analysis.token_dims import indexed_dims, prime_factors
from meshwright.model.sequence_analysis.token_rules import SHARDED, TokenLayout, TokenOp
from meshwright.model.sequence_parallel.conv_call import Conv1dArguments
from meshwright.model.tensors.op_tables import CONSTANT_LIKE, ELEMENTWISE, reads_values
from meshwright.plan.model_spec.sequence_info import ConvSpec

PADS_TOKENS = "pads tokens"
CACHES_TOKENS = "keeps some of the tokens (copy): build the model with use_cache=False, if that is a cache"
EXTRA_CONV_OUTPUTS = "convolves tokens into more than there are, which are not cut at once: y[..., :tokens]"
_COPIES = frozenset(
    ("contiguous", "clone", "detach", "to", "type", "type_as", "float", "double", "half", "bfloat16")
)
_TRANSPOSES = frozenset(("transpose", "swapaxes", "swapdims", "permute", "mT"))
_ELEMENTWISE = (
    ELEMENTWISE - CONSTANT_LIKE - {"dropout", "rand_like"}
)  # those draw by the place of an element among all


@dataclass(frozen=True)
class PaddedTokens(TokenLayout):
    """Tokens along the dim that is number `back` from behind, with so many elements `before` and `after` them; zeros, if `empty`.

    `made` says why that cannot be computed with.
    """

    dim_from_end: int = 1
    num_before: int = 0
    num_after: int = 0
    is_zero_padded: bool = False


def propagate_op(op: TokenOp) -> str:
    """Note in `step.held` how what it has made has tokens, with whatever stands around them. Returns why nobody knows."""
    found = {
        each: known for each in op.operands if isinstance(known := op.token_layouts.get(each), PaddedTokens)
    }
    if not found:
        if op.name == "copy" and op.operands_of_kind("subset"):
            return CACHES_TOKENS
        return "" if op.name == "pad" and _propagate_pad(op) else token_rules.propagate_tokens(op)
    if not op.results and op.name != "setitem" and not reads_values(op.name):
        return ""  # it asks for a shape
    tensor, known = next(iter(found.items()))
    if op.name == "getitem" and tensor is op.args[0]:
        return _propagate_slice(op, known)
    if op.name in _TRANSPOSES:
        return _propagate_unchanged(
            op, replace(known, dim_from_end=_transposed_dim(op, tensor.ndim, known.dim_from_end))
        )
    if op.name in _COPIES:
        return _propagate_unchanged(op, known)
    written = any(each is op.results[0] for each in op.operands) if op.results else True
    beside = all(_has_same_padding(op, each, known) for each in op.operands)
    if (
        op.name in _ELEMENTWISE
        and beside
        and not (written and any(each.is_zero_padded for each in found.values()))
    ):
        return _propagate_unchanged(op, replace(known, is_zero_padded=False))
    return f"{known.origin} ({op.name})"


def analyze_convolution(op: TokenOp) -> tuple[str, ConvSpec]:
    """Why a call of F.conv1d cannot be answered; "": it can. With what is to be known of it, but for where it is.

    Its `tokens` are as many as there are in the trial.
    """
    given, nothing = Conv1dArguments(*op.args, **op.kwargs), ConvSpec("", "")
    known = op.token_layouts.get(given.input)
    alone = given.input.ndim == 3 and op.token_dims(given.input) == (0,)  # each token is a row of its own
    if known is None or known.kind not in ("sharded", "padded") or (known.kind == "sharded" and alone):
        return token_rules.propagate_tokens(op), nothing
    if any(each is not None and each in op.token_layouts for each in (given.weight, given.bias)):
        return "convolves tokens with a kernel that is made of them (conv1d)", nothing
    frame = known if isinstance(known, PaddedTokens) else _without_padding(op, given.input)
    left = frame.num_before + given.padding_sizes[0]
    behind = left + frame.num_after + given.padding_sizes[1] - given.kernel_reach
    why = _unsupported_convolution(op, given, known, frame)
    if not why and behind < 0:
        why = f"convolves tokens into fewer: {-behind} zeros are missing around them (conv1d)"
    if not why and left > given.kernel_reach:
        why = "convolves tokens of which more stand behind than its kernel reaches over (conv1d)"
    if why:
        return why, nothing
    for each in op.results:
        op.token_layouts[each] = (
            PaddedTokens("padded", origin=EXTRA_CONV_OUTPUTS, num_after=behind) if behind else SHARDED
        )
    said = {
        "pad_before": frame.num_before,
        "pad_after": frame.num_after,
        "num_extra_outputs": behind,
        "needs_grad": given.input.requires_grad,
    }
    tokens, width = given.input.shape[-1] - frame.num_before - frame.num_after, given.input.shape[-2]
    return "", replace(
        nothing,
        num_tokens=tokens,
        token_numel=width,
        left_halo=left,
        right_halo=given.kernel_reach - left,
        **said,
    )


def _without_padding(step: TokenOp, tensor: torch.Tensor) -> PaddedTokens:
    """Tokens with nothing around them."""
    return PaddedTokens("padded", dim_from_end=tensor.ndim - step.token_dims(tensor)[0], is_zero_padded=True)


def _unsupported_convolution(
    step: TokenOp, given: Conv1dArguments, known: TokenLayout, frame: PaddedTokens
) -> str:
    """Why a convolution is not over tokens, or is none that is known."""
    if frame.dim_from_end == 2:
        return "sums over tokens (conv1d)"
    tokens = given.input.shape[-1] - frame.num_before - frame.num_after
    if (
        frame.dim_from_end != 1
        or known.numel_per_token != 1
        or tokens not in prime_factors(step.prime_product)
    ):
        return "computes 'conv1d' along tokens"
    if not frame.is_zero_padded:
        return f"{frame.origin} (conv1d)"
    return f"convolves tokens in steps of {given.stride_size} (conv1d)" if given.stride_size != 1 else ""


def _propagate_pad(step: TokenOp) -> bool:
    """Whether zeros are put around tokens."""
    tensor = step.argument(0, "input")
    known = step.token_layouts.get(tensor)
    if known is None or known.kind != "sharded" or known.numel_per_token != 1:
        return False
    back = _without_padding(step, tensor).dim_from_end
    pads = list(step.argument(1, "pad"))[2 * back - 2 : 2 * back]
    mode, value = step.argument(2, "mode", default="constant"), step.argument(3, "value")
    if (
        not any(pads)
        or min(pads) < 0
        or mode != "constant"
        or value
        or tensor.shape[-back] not in prime_factors(step.prime_product)
    ):
        return False
    for each in step.results:
        step.token_layouts[each] = PaddedTokens(
            "padded",
            origin=PADS_TOKENS,
            dim_from_end=back,
            num_before=pads[0],
            num_after=pads[1],
            is_zero_padded=True,
        )
    return True


def _propagate_slice(step: TokenOp, known: PaddedTokens) -> str:
    """What stands around tokens is cut off, or left alone."""
    tensor, index = step.args[:2]
    parts = index if isinstance(index, tuple) else (index,)
    at, size = tensor.ndim - known.dim_from_end, tensor.shape[-known.dim_from_end]
    own = range(size)[known.num_before : size - known.num_after]
    if not all(each is None or each is Ellipsis or type(each) in (slice, int) for each in parts):
        return f"{known.origin} ({step.name})"
    taken = [range(size)[each] for dim, each in indexed_dims(parts, tensor.ndim) if dim == at]
    if taken == [own]:
        step.token_layouts.update(dict.fromkeys(step.results, SHARDED))
        return ""
    if taken in ([], [range(size)]) and not any(each is None or type(each) is int for each in parts):
        return _propagate_unchanged(step, known)
    return f"{known.origin} ({step.name})"


def _propagate_unchanged(step: TokenOp, known: PaddedTokens) -> str:
    """What is made has as much around its tokens."""
    size = next(
        each.shape[-was.dim_from_end]
        for each in step.operands
        if isinstance(was := step.token_layouts.get(each), PaddedTokens)
    )
    if any(
        each.ndim < known.dim_from_end or each.shape[-known.dim_from_end] != size for each in step.results
    ):
        return f"{known.origin} ({step.name})"
    step.token_layouts.update(dict.fromkeys(step.results, known))
    return ""


def _transposed_dim(step: TokenOp, ndim: int, back: int) -> int:
    """Where tokens stand behind a change of dims, counted from behind."""
    at = ndim - back
    if step.name == "permute":
        said = step.argument(1, "dims")
        order = said if isinstance(said, (tuple, list)) else step.args[1:]
        return ndim - [each % ndim for each in order].index(at)
    dims = (
        (-2, -1)
        if step.name == "mT"
        else [step.argument(place, f"dim{place - 1}", f"axis{place - 1}") for place in (1, 2)]
    )
    one, two = (each % ndim for each in dims)
    return ndim - (two if at == one else one if at == two else at)


def _has_same_padding(step: TokenOp, each: torch.Tensor, known: PaddedTokens) -> bool:
    """Whether `each` has as much around its tokens, at the same place, or none at all."""
    mine = step.token_layouts.get(each)
    if isinstance(mine, PaddedTokens):
        return (mine.dim_from_end, mine.num_before, mine.num_after) == (
            known.dim_from_end,
            known.num_before,
            known.num_after,
        )
    return (
        mine is None
        and not step.token_dims(each)
        and (each.ndim < known.dim_from_end or each.shape[-known.dim_from_end] == 1)
    )
