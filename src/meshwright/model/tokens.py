"""Operations that treat each token of a stream by itself: what of them holds for all tokens holds for a slice.

    element by element    arithmetic with what has no tokens of its own, or with the stream itself
    over the last dim     means, norms
    none of these         whatever moves, joins or reads: it may be harmless, and nobody knows

The stream is [rows, tokens, ...]. Operations go by torch's names, less underscores.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from meshwright.model.values import storage_of

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
