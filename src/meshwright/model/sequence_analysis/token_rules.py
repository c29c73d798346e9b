"""Rules that tell whether an operation treats each token by itself, so that a rank may run it on a sequence
shard.

A tensor in a block has tokens in one of these arrangements. A token dim is known by its size: sequences are
cut to a prime length that divides no size of the model, so every size it divides was made from tokens.

    sharded      local tokens along one dim: [samples, tokens, width], [samples * tokens, experts]
    mask         [.., tokens, tokens]             local queries, and all keys
    keys         [.., 1, tokens]                  all keys, for every query
    constant     zeros, ones, expanded tensors: the same for every token
    subset       some of the tokens: a cache may keep them, but nothing may compute with them
    padded       tokens with elements around them, for a convolution (conv_rules.py)
    from_length  a range, a triangle, part of a table: made in the block from a length

Matrix products, by their summed and paired dims:

    x [samples, tokens, width] @ w [width, out]             tokens in one operand: each by itself
    q [.., tokens, width] @ k' [.., width, tokens]          every token with every other: attention
    p [.., queries, tokens] @ v [.., tokens, width]         sum over tokens: attention too
    x [samples, tokens, heads, 1, width] @ y [samples, tokens, heads, width, n]    each by itself

Operations go by torch's names without underscores. An operation without a rule is reported.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from math import isclose, log, prod
from typing import Any, Literal

import torch

from meshwright.model.recording.op_table import Op, find_op, reads_values
from meshwright.model.sequence_analysis.token_dims import find_prime, has_tokens, keeps_dims, prime_factors
from meshwright.model.tensors.pytree import tree_tensors

ATTENDS_WITHOUT_SDPA = "computes attention scores itself"
PAIRS_TOKENS = f"{ATTENDS_WITHOUT_SDPA} ({{0}})"
SUMS_TOKENS = "sums over tokens ({0})"


def check_product(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], prime_product: int
) -> str | None:
    """Returns why the product `name` does not treat each token by itself; "" if it does, None if it is no
    known product.

    Token dims are those whose size `prime_product` marks.
    """
    op = find_op(name)
    if op.dims == "letters":
        return _check_einsum(args, prime_product)
    if op.position is None or op.dims != "product":
        return None
    first = op.position
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    left, right = given[first : first + 2]
    if name == "rmatmul":
        left, right = right, left
    if name == "linear":
        right = right.mT if right.ndim == 2 else right
    if first and any(has_tokens(size, prime_product) for size in given[0].shape) and given[0].ndim < 2:
        return f"adds a tensor of tokens along another dim ({name})"
    return _check_matmul(name, left, right, prime_product)


def _check_matmul(name: str, left: torch.Tensor, right: torch.Tensor, length: int) -> str:
    left_dims, right_dims = _token_dims_from_end(left, length), _token_dims_from_end(right, length)
    summed_dims = 1 if left.ndim else 0, 2 if right.ndim > 1 else 1
    if summed_dims[0] in left_dims or summed_dims[1] in right_dims:
        return SUMS_TOKENS.format(name)
    if left_dims and right_dims and (left_dims != right_dims or min(left_dims) < 3):
        return PAIRS_TOKENS.format(name)
    return ""


def _token_dims_from_end(tensor: torch.Tensor, length: int) -> set[int]:
    return {tensor.ndim - dim for dim, size in enumerate(tensor.shape) if has_tokens(size, length)}


def _check_einsum(args: tuple[Any, ...], length: int) -> str | None:
    """Checks a product given by letters: every token dim must keep its letter."""
    if not args or not isinstance(args[0], str):
        return None
    input_terms, _, output_term = args[0].replace(" ", "").partition("->")
    given = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    letters = set()
    for term, tensor in zip(input_terms.split(","), given, strict=True):
        leading, ellipsis, trailing = term.partition("...")
        num_spread = tensor.ndim - len(leading) - len(trailing)
        term_letters = [
            *leading,
            *(f".{num_spread - i}" for i in range(num_spread if ellipsis else 0)),
            *trailing,
        ]
        letters |= {
            letter
            for letter, size in zip(term_letters, tensor.shape, strict=True)
            if has_tokens(size, length)
        }
    if (
        any(letter not in output_term and not letter.startswith(".") for letter in letters)
        or "->" not in args[0]
    ):
        return SUMS_TOKENS.format("einsum")
    return PAIRS_TOKENS.format("einsum") if len(letters) > 1 else ""


TokenKind = Literal["sharded", "mask", "keys", "constant", "from_length", "subset", "padded"]
PARTIAL_TOKENS = "takes some of the tokens (indexing)"
MADE_IN_BLOCK = (
    "makes positions or a mask inside of the block ({0}): give them to it, or declare smaller blocks"
)


@dataclass(frozen=True)
class TokenLayout:
    """The arrangement of tokens in a tensor.

    `numel_per_token` elements follow each token within its dim; `origin` is the operation that made the
    tensor.
    """

    kind: TokenKind
    numel_per_token: int = 1
    origin: str = ""


SHARDED = TokenLayout("sharded")
TokenLayouts = MutableMapping[torch.Tensor, TokenLayout]


@dataclass(frozen=True)
class TokenOp:
    """One operation: name, arguments, results, the layouts of tensors, and the primes of the lengths."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: Sequence[torch.Tensor]
    token_layouts: TokenLayouts
    prime_product: int

    def token_dims(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Returns the token dims of `tensor`."""
        return find_token_dims(tensor, self.prime_product)

    def operands_of_kind(self, kind: TokenKind) -> list[torch.Tensor]:
        """Returns the operands with a layout of this kind."""
        return [
            each
            for each in self.operands
            if each in self.token_layouts and self.token_layouts[each].kind == kind
        ]

    @property
    def entry(self) -> Op:
        """The entry of the operation in the table."""
        return find_op(self.name)

    @property
    def operands(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return tree_tensors((self.args, dict(self.kwargs)))

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """Returns the argument at `position`, or by one of the names."""
        dims = [self.kwargs[name] for name in names if name in self.kwargs]
        return dims[0] if dims else self.args[position] if len(self.args) > position else default


def find_token_dims(tensor: torch.Tensor, prime_product: int) -> tuple[int, ...]:
    """Returns the dims of `tensor` whose size `prime_product` marks (token_dims.py)."""
    return tuple(dim for dim, size in enumerate(tensor.shape) if has_tokens(size, prime_product))


def propagate_tokens(op: TokenOp) -> str:
    """Notes the layouts of the results of `op`. Returns why it does not treat each token by itself; "" if it
    does.
    """
    if not op.results and op.name != "setitem" and not reads_values(op.name):
        return ""  # only reads a shape
    untracked = [each for each in op.operands if each not in op.token_layouts and op.token_dims(each)]
    if untracked:
        return (
            f"computes '{op.name}' with tokens that were not among its inputs: from an attribute, or made "
            f"by code that was not traced"
        )
    for each in op.operands_of_kind("subset"):
        return op.token_layouts[each].origin
    sharded, mask_operands = (
        op.operands_of_kind("sharded"),
        op.operands_of_kind("mask") + op.operands_of_kind("keys"),
    )
    if not sharded and not mask_operands:
        _propagate_without_tokens(op)
        return ""
    for each in op.operands_of_kind("from_length"):
        return MADE_IN_BLOCK.format(op.token_layouts[each].origin)
    if not op.results and op.name != "setitem":
        return f"reads values of tokens ({op.name})"
    reason, numel_per_token = (
        _check_masks(op, sharded)
        if mask_operands
        else ("", 1)
        if not sharded
        else _check_sharded(op, sharded)
    )
    if reason == PARTIAL_TOKENS and op.name != "setitem":
        op.token_layouts.update({each: TokenLayout("subset", origin=reason) for each in op.results})
        return ""
    if reason:
        return reason
    for each in [*op.results, *op.args[:1]] if op.name == "setitem" else op.results:
        dims = op.token_dims(each)
        if mask_operands and dims:
            op.token_layouts[each] = TokenLayout("mask" if len(dims) > 1 else "keys")
        elif len(dims) > 1:
            return f"pairs tokens with tokens ({op.name})"
        elif dims:
            op.token_layouts[each] = TokenLayout("sharded", numel_per_token)
    return ""


def _propagate_without_tokens(op: TokenOp) -> None:
    """Notes the layouts of results made from no token: constant, or made from the length."""
    leading = [op.token_layouts[each] for each in op.operands if each in op.token_layouts]
    from_length = [each for each in leading if each.kind == "from_length"]
    entry = op.entry
    is_constant = entry.is_constant_tensor or (entry.dims == "broadcast" and not leading)
    keeps_constants = entry.is_elementwise or entry.dims == "reshape" or entry.moves_dims
    is_constant = is_constant or (bool(leading) and not from_length and keeps_constants)
    if (
        op.name == "setitem"
        and leading
        and not keeps_dims(op.args[1], op.token_dims(op.args[0]), op.args[0].ndim)
    ):
        op.token_layouts[op.args[0]] = TokenLayout("from_length", origin=op.name)
    for each in op.results:
        if op.token_dims(each) and is_constant:
            op.token_layouts[each] = TokenLayout("constant")
        elif (
            leading
            and not from_length
            and not op.token_dims(each)
            and (entry.is_split or op.name == "getitem")
        ):
            # a view that may be written in place
            op.token_layouts[each] = TokenLayout("subset", origin=PARTIAL_TOKENS)
        # a sum of ones depends on the length
        elif (
            op.token_dims(each)
            or from_length
            or (leading and not entry.is_constant_tensor and not entry.is_idempotent)
        ):
            op.token_layouts[each] = TokenLayout(
                "from_length", origin=from_length[0].origin if from_length else op.name
            )


def _check_masks(op: TokenOp, sharded: Sequence[torch.Tensor]) -> tuple[str, int]:
    if sharded:
        reason = check_product(op.name, op.args, op.kwargs, op.prime_product)
        return reason or f"computes '{op.name}' of tokens and of a mask", 1
    keeps_masks = op.entry.is_elementwise or op.entry.dims in ("reshape", "broadcast", "ones")
    if not keeps_masks and op.name != "getitem":
        return f"computes '{op.name}' with a mask", 1
    if op.name == "getitem" and not keeps_dims(op.args[1], op.token_dims(op.args[0]), op.args[0].ndim):
        return "cuts its mask to the number of its own tokens", 1
    for each in op.results:
        dims, last = op.token_dims(each), each.ndim - 1
        is_mask = dims in ((last - 1, last), (last,)) and all(
            each.shape[dim] in prime_factors(op.prime_product) for dim in dims
        )
        if not is_mask:
            return f"transposes its mask ({op.name})", 1
    return "", 1


def _check_sharded(op: TokenOp, sharded: Sequence[torch.Tensor]) -> tuple[str, int]:
    """Returns why the operation does not treat each token by itself, and the elements per token of its
    results.
    """
    name, entry, numel_per_token = op.name, op.entry, op.token_layouts[sharded[0]].numel_per_token
    if entry.dims == "reshape":
        return _check_view(op, sharded[0])
    if entry.is_elementwise:
        return _check_length_arithmetic(op) or _check_aligned(op), numel_per_token
    if name == "squeeze" and len(op.args) + len(op.kwargs) == 1:
        return "squeezes whatever has size 1, which may be the tokens of a rank", numel_per_token
    if entry.moves_dims or name == "one_hot":
        return "", numel_per_token
    if entry.dims == "table":
        return (
            "looks up in a table of tokens"
            if any(op.argument(1, "weight") is each for each in sharded)
            else ""
        ), numel_per_token
    if entry.dims == "trailing":
        reduced_dims = len(op.argument(1, "normalized_shape"))
        return (
            f"takes {name} over tokens"
            if op.token_dims(sharded[0])[0] >= sharded[0].ndim - reduced_dims
            else ""
        ), numel_per_token
    if name in ("getitem", "setitem"):
        return _check_indexing(op), op.token_layouts[sharded[0]].numel_per_token
    if entry.dim is not None:
        return _check_reduction(op, sharded, *entry.dim), numel_per_token
    if name == "pad":
        padding = list(op.argument(1, "pad"))
        dim = sharded[0].ndim - 1 - op.token_dims(sharded[0])[0]
        return ("pads tokens" if any(padding[2 * dim : 2 * dim + 2]) else ""), numel_per_token
    if name in ("repeat", "tile"):
        dim = -_dim_from_end(op, sharded[0])
        return (
            "repeats tokens" if op.results[0].shape[dim] != sharded[0].shape[dim] else ""
        ), numel_per_token
    if entry.dims in ("window", "batch"):
        batched = op.token_dims(sharded[0]) == (0,) and name != "batch_norm"
        return ("" if batched else f"computes '{name}' along tokens"), numel_per_token
    if entry.dims == "steps":
        return f"carries a state from token to token ({name})", 1
    if name == "multi_head_attention_forward":
        return PAIRS_TOKENS.format("nn.MultiheadAttention"), 1
    reason = check_product(name, op.args, op.kwargs, op.prime_product)
    return (
        f"computes '{name}' with tokens, which has no rule" if reason is None else reason
    ), numel_per_token


def _dim_from_end(op: TokenOp, tensor: torch.Tensor) -> int:
    return tensor.ndim - op.token_dims(tensor)[0]


def _check_aligned(op: TokenOp, given: Sequence[torch.Tensor] | None = None) -> str:
    sharded = [each for each in op.operands if op.token_dims(each)] if given is None else given
    positions = {(_dim_from_end(op, each), each.shape[op.token_dims(each)[0]]) for each in sharded}
    numel_per_token = {
        op.token_layouts[each].numel_per_token for each in sharded if op.token_layouts[each].kind == "sharded"
    }
    return f"pairs tokens with tokens ({op.name})" if len(positions) > 1 or len(numel_per_token) > 1 else ""


def _check_length_arithmetic(op: TokenOp) -> str:
    """Returns why a number among the arguments is the length, or computed from it."""
    length_values = [
        made for n in prime_factors(op.prime_product) for made in (n, 1 / n, n**0.5, n**-0.5, log(n))
    ]
    numbers = [each for each in (*op.args, *op.kwargs.values()) if type(each) in (int, float)]
    uses_length = bool(op.entry.arithmetic) and any(
        isclose(each, number) for each in numbers for number in length_values
    )
    return f"computes with the number of tokens ({op.name})" if uses_length else ""


def _check_view(op: TokenOp, tensor: torch.Tensor) -> tuple[str, int]:
    """A view keeps tokens separate if the elements of each stay together in one dim."""
    (dim,), made = op.token_dims(tensor), op.results[0]
    numel_behind = op.token_layouts[tensor].numel_per_token * prod(tensor.shape[dim + 1 :])
    dims = op.token_dims(made)
    if len(dims) == 1:
        trailing = prod(made.shape[dims[0] + 1 :])
        sharded = find_prime(tensor.shape[dim], op.prime_product)
        if (
            sharded
            and numel_behind % trailing == 0
            and made.shape[dims[0]] % (sharded * (numel_behind // trailing)) == 0
        ):
            return "", numel_behind // trailing
    return f"moves elements between tokens ({op.name})", 1


def _check_reduction(op: TokenOp, sharded: Sequence[torch.Tensor], place: int, default: Any) -> str:
    # concatenation with an empty key cache
    if op.entry.dims == "join" and sum(each.numel() > 0 for each in op.operands) == 1:
        return ""
    first = op.argument(0, "input", "tensors")
    # indexes a table with values from tokens
    if isinstance(first, torch.Tensor) and first not in op.token_layouts:
        is_lookup = op.entry.kind == "lookup"
        return _check_aligned(op, sharded) if is_lookup else f"sums tokens in a table ({op.name})"
    reduced_dims = op.argument(place, "dim", "dims", "axis", default=default)
    if isinstance(reduced_dims, torch.Tensor):  # torch.max(x, y): elementwise
        return _check_aligned(op)
    reduced_dims = tuple(reduced_dims) if isinstance(reduced_dims, (tuple, list)) else (reduced_dims,)
    if op.name == "flip" and not isinstance(op.argument(1, "dims"), (tuple, list)):
        reduced_dims = op.args[1:]
    ndim = sharded[0].ndim + (op.entry.dims == "stack")
    (dim,) = op.token_dims(sharded[0])
    if op.entry.dims == "stack":
        return _check_aligned(op)
    # x.var(False): over all dims
    if not reduced_dims or any(
        each is None or type(each) is bool or each % ndim == dim for each in reduced_dims
    ):
        return "splits along the tokens" if op.entry.is_split else f"takes {op.name} over tokens"
    return _check_aligned(op)


def _check_indexing(op: TokenOp) -> str:
    """Returns why indexing mixes tokens: a table may be indexed with tokens, tokens themselves may not be
    picked.
    """
    tensor, index = op.args[0], op.args[1]
    if tensor not in op.token_layouts or op.token_layouts[tensor].kind == "constant":
        if op.name == "setitem" and tensor not in op.token_layouts:
            return "writes tokens into a table"
        if op.name == "setitem" and not keeps_dims(index, op.token_dims(tensor), tensor.ndim):
            return "writes into some of the tokens"
        return _check_aligned(op, [each for each in tree_tensors((index,)) if each in op.token_layouts])
    if tree_tensors((index,)):
        return f"takes tokens by an index ({op.name})"
    if not keeps_dims(index, op.token_dims(tensor), tensor.ndim, tensor.shape[op.token_dims(tensor)[0]]):
        return PARTIAL_TOKENS
    return ""
