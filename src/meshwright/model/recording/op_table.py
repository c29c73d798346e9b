"""Tables of torch operations by what they do to dims; names are torch's, without underscores.

    elementwise   each output element depends on the input elements at its position
    reshapes      the same elements in another shape
    dim moves     dims change places, are added or removed
    dim argument  operations with an argument that names the dims they work on

A second, smaller set holds the operations that treat each token of the residual stream [samples, tokens, ...]
by itself: elementwise arithmetic, and reductions over the last dim. For these, a property that holds for all
tokens holds for a slice of them. Any other operation is assumed to mix tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.model.recording.forward_recording import TensorRecord

_TOKENWISE_NAMES = """
    add radd iadd sub rsub isub mul rmul imul div rdiv truediv rtruediv itruediv pow rpow lerp addcmul where
    maximum minimum square sqrt rsqrt reciprocal neg abs exp log tanh sigmoid relu gelu silu softplus clamp
    clip erf dropout mish elu sin cos masked_fill to float double half bfloat16 type type_as contiguous
    clone detach
"""
TOKENWISE_OPS = frozenset(_TOKENWISE_NAMES.split())
_LAST_DIM_REDUCTIONS = frozenset(
    ("mean", "sum", "var", "std", "var_mean", "softmax", "log_softmax", "amax", "layer_norm", "rms_norm")
)
_VALUE_READS = frozenset(("item", "tolist", "bool", "int", "float", "equal", "allclose"))


def reads_values(name: str) -> bool:
    """Returns whether the operation `name`, which returns no tensor, reads values."""
    return name in _VALUE_READS


def tokenwise_problem(
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    operands: Sequence[TensorRecord],
    stream_tensors: Sequence[TensorRecord],
    result: TensorRecord,
) -> str:
    """Returns the reason why the operation `name` does not treat each token by itself; "" if it does.

    `stream_tensors` are those of its `operands` that are the residual stream or computed from it; `result` is
    the tensor that it returns.
    """
    dims = stream_tensors[0].ndim
    if name in _LAST_DIM_REDUCTIONS and operands[0].id == stream_tensors[0].id and len(stream_tensors) == 1:
        if name in ("layer_norm", "rms_norm"):
            return (
                ""
                if len(args[1] if len(args) > 1 else kwargs["normalized_shape"]) < dims - 1
                else f"takes {name} over tokens"
            )
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        over = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
        return (
            "" if dims > 2 and all(each in (-1, dims - 1) for each in over) else f"takes {name} over tokens"
        )
    if name not in TOKENWISE_OPS:
        return f"computes '{name}' with it"
    if any(tensor.ndim != result.ndim for tensor in stream_tensors):
        return f"computes '{name}' of tensors of different shapes"
    others = [tensor for tensor in operands if not any(tensor.id == each.id for each in stream_tensors)]
    if any(tensor.ndim >= result.ndim - 1 and tensor.shape[1 - result.ndim] != 1 for tensor in others):
        return f"computes '{name}' of it and of a tensor of all tokens"
    return ""


def _name_set(names: str) -> frozenset[str]:
    return frozenset(names.split())


CONSTANT_LIKE = _name_set(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty fill zero"
)
CONSTANT_FACTORIES = CONSTANT_LIKE | _name_set("zeros ones full empty scalar_tensor")
BROADCAST = _name_set("expand expand_as broadcast_to")
_COMPARISONS = _name_set(
    "eq ne lt le gt ge logical_and logical_or logical_not logical_xor isnan isinf isfinite heaviside sign sgn"
)
_BITWISE = _name_set(
    "and or xor invert iand ior ixor rand ror rxor bitwise_and bitwise_or bitwise_xor bitwise_not"
)
_ROUNDING = _name_set("floor ceil round trunc fmod remainder mod floordiv rfloordiv int long bool short byte")
_CURVES = _name_set("""
    exp2 expm1 log1p log2 log10 logit erfc tan sinh cosh atan atan2 hardtanh relu6 leaky_relu prelu celu
    selu hardswish hardsigmoid logsigmoid hardshrink softsign threshold
""")
_OTHER_ELEMENTWISE = _name_set("""
    masked_fill addcdiv nan_to_num float_power positive pos true_divide divide multiply subtract negative
    absolute copy requires_grad data real imag conj rand_like bucketize polar
""")
ELEMENTWISE = (
    TOKENWISE_OPS | CONSTANT_LIKE | _COMPARISONS | _BITWISE | _ROUNDING | _CURVES | _OTHER_ELEMENTWISE
)
ARITHMETIC = _name_set("""
    add radd iadd sub rsub isub mul rmul imul div rdiv truediv rtruediv itruediv floordiv pow rpow
    true_divide divide multiply subtract
""")
RESHAPES = _name_set("view reshape flatten unflatten view_as reshape_as ravel")
DIM_MOVES = BROADCAST | _name_set(
    "transpose permute swapaxes swapdims movedim moveaxis t T mT unsqueeze squeeze view_as_complex "
    "view_as_real"
)
_ALL_DIMS: Any = None
# Position of the argument `dim`, and its default; None: all dims.
DIM_ARGUMENT: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(_name_set("softmax log_softmax softmin glu sort argsort"), (1, -1)),
    **dict.fromkeys(
        _name_set("mean sum var std var_mean std_mean amax amin max min argmax argmin prod all any median"),
        (1, _ALL_DIMS),
    ),
    **dict.fromkeys(
        _name_set("cumsum cumprod logcumsumexp logsumexp count_nonzero flip select narrow"), (1, _ALL_DIMS)
    ),
    **dict.fromkeys(
        _name_set("gather scatter scatter_add scatter_reduce index_select index_add index_fill"),
        (1, _ALL_DIMS),
    ),
    **dict.fromkeys(_name_set("cat concat stack unbind"), (1, 0)),
    **dict.fromkeys(_name_set("chunk split split_with_sizes tensor_split"), (2, 0)),
    **dict.fromkeys(_name_set("topk diff"), (2, -1)),
    **dict.fromkeys(
        _name_set(
            "kthvalue repeat_interleave roll norm vector_norm linalg_norm linalg_vector_norm take_along_dim"
        ),
        (2, _ALL_DIMS),
    ),
    "normalize": (2, 1),
    "iter": (9, 0),
}
SPLITS = _name_set("chunk split split_with_sizes tensor_split unbind select narrow iter")
LOOKUPS = _name_set("gather index_select take_along_dim")
IDEMPOTENT_REDUCTIONS = _name_set(
    "mean amax amin max min median mode any all"
)  # of equal values, they give that value for any number of tokens
NORMS = _name_set("batch_norm instance_norm group_norm")
RECURRENT = _name_set("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell")
CONVOLUTIONS = _name_set(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d unfold fold max_pool1d avg_pool1d"
)
