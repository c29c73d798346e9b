"""Torch's operations by what they do to dims, for who follows one dim through a block. Names are less underscores.

elementwise    each element by itself, or beside those at its place        views    the same elements in another form
moves          dims change places, come or go                              over     they say which dims they go over

Operations that treat each token of a stream by itself: what of them holds for all tokens holds for a slice.

    element by element    arithmetic with what has no tokens of its own, or with the stream itself
    over the last dim     means, norms
    none of these         whatever moves, joins or reads: it may be harmless, and nobody knows

The stream is [rows, tokens, ...]. Operations go by torch's names, less underscores.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from meshwright.model.tensors.pytree import storage_of

_ARITHMETIC = """
    add radd iadd sub rsub isub mul rmul imul div rdiv truediv rtruediv itruediv pow rpow lerp addcmul where maximum minimum
    square sqrt rsqrt reciprocal neg abs exp log tanh sigmoid relu gelu silu softplus clamp clip erf dropout mish elu sin cos
    masked_fill to float double half bfloat16 type type_as contiguous clone detach
"""
BY_ELEMENT = frozenset(_ARITHMETIC.split())
_OVER_LAST = frozenset(("mean", "sum", "var", "std", "var_mean", "softmax", "log_softmax", "amax", "layer_norm", "rms_norm"))
_READS = frozenset(("item", "tolist", "bool", "int", "float", "equal", "allclose"))


def reads(name: str) -> bool:
    """Whether the operation `name`, which gives no tensor, looks at values."""
    return name in _READS


def alone(
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    operands: Sequence[torch.Tensor],
    carried: Sequence[torch.Tensor],
    made: torch.Tensor,
) -> str:
    """Why the operation `name` does not treat each token by itself; empty: it does.

    Of its `operands`, those that are `carried` are the stream, or made of it; it has `made` a tensor.
    """
    dims = carried[0].ndim
    if name in _OVER_LAST and operands[0] is carried[0] and len(carried) == 1:
        if name in ("layer_norm", "rms_norm"):
            return "" if len(args[1] if len(args) > 1 else kwargs["normalized_shape"]) < dims - 1 else f"takes {name} over tokens"
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        over = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
        return "" if dims > 2 and all(each in (-1, dims - 1) for each in over) else f"takes {name} over tokens"
    if name not in BY_ELEMENT:
        return f"computes '{name}' with it"
    if any(tensor.ndim != made.ndim for tensor in carried):
        return f"computes '{name}' of tensors of several forms"
    others = [tensor for tensor in operands if not any(tensor is each for each in carried)]
    if any(tensor.ndim >= made.ndim - 1 and tensor.shape[1 - made.ndim] != 1 for tensor in others):
        return f"computes '{name}' of it and of a tensor of all tokens"
    return ""


def all_of(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether `view` is `tensor`, all of it and in its form."""
    same = storage_of(view) == storage_of(tensor) and view.storage_offset() == tensor.storage_offset()
    return same and view.shape == tensor.shape and view.stride() == tensor.stride()


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


ALIKE = _names("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty fill zero")
CONSTANT = ALIKE | _names("zeros ones full empty scalar_tensor")
BROADCAST = _names("expand expand_as broadcast_to")
_COMPARED = _names("eq ne lt le gt ge logical_and logical_or logical_not logical_xor isnan isinf isfinite heaviside sign sgn")
_BITS = _names("and or xor invert iand ior ixor rand ror rxor bitwise_and bitwise_or bitwise_xor bitwise_not")
_ROUNDED = _names("floor ceil round trunc fmod remainder mod floordiv rfloordiv int long bool short byte")
_CURVES = _names("""
    exp2 expm1 log1p log2 log10 logit erfc tan sinh cosh atan atan2 hardtanh relu6 leaky_relu prelu celu selu hardswish
    hardsigmoid logsigmoid hardshrink softsign threshold
""")
_OTHERS = _names("""
    masked_fill addcdiv nan_to_num float_power positive pos true_divide divide multiply subtract negative absolute copy
    requires_grad data real imag conj rand_like bucketize polar
""")
ELEMENTWISE = BY_ELEMENT | ALIKE | _COMPARED | _BITS | _ROUNDED | _CURVES | _OTHERS
ARITHMETIC = _names("""
    add radd iadd sub rsub isub mul rmul imul div rdiv truediv rtruediv itruediv floordiv pow rpow true_divide divide multiply
    subtract
""")
VIEWS = _names("view reshape flatten unflatten view_as reshape_as ravel")
MOVES = BROADCAST | _names(
    "transpose permute swapaxes swapdims movedim moveaxis t T mT unsqueeze squeeze view_as_complex view_as_real"
)
_ALL: Any = None
# The place of `dim` among what is given, and what it is where nothing is said; None: all dims.
DIMS: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(_names("softmax log_softmax softmin glu sort argsort"), (1, -1)),
    **dict.fromkeys(_names("mean sum var std var_mean std_mean amax amin max min argmax argmin prod all any median"), (1, _ALL)),
    **dict.fromkeys(_names("cumsum cumprod logcumsumexp logsumexp count_nonzero flip select narrow"), (1, _ALL)),
    **dict.fromkeys(_names("gather scatter scatter_add scatter_reduce index_select index_add index_fill"), (1, _ALL)),
    **dict.fromkeys(_names("cat concat stack unbind"), (1, 0)),
    **dict.fromkeys(_names("chunk split split_with_sizes tensor_split"), (2, 0)),
    **dict.fromkeys(_names("topk diff"), (2, -1)),
    **dict.fromkeys(
        _names("kthvalue repeat_interleave roll norm vector_norm linalg_norm linalg_vector_norm take_along_dim"), (2, _ALL)
    ),
    "normalize": (2, 1),
    "iter": (9, 0),
}
APART = _names("chunk split split_with_sizes tensor_split unbind select narrow iter")
LOOKUPS = _names("gather index_select take_along_dim")
SAME = _names("mean amax amin max min median mode any all")  # of what is the same for every token, the same for any number
NORMS = _names("batch_norm instance_norm group_norm")
RECURRENT = _names("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell")
CONVOLUTIONS = _names("conv1d conv2d conv3d conv_transpose1d conv_transpose2d unfold fold max_pool1d avg_pool1d")
