"""What operations do with tokens: whether each is treated by itself, so that a rank may run on some of them.

A tensor within a block has tokens in one of these ways. A dim is known by its size: rows are cut to a prime number of tokens that
divides no size of the model, so whatever that number divides was made from the tokens.

    own     [rows, tokens, width], [rows, heads, tokens, width], [rows * tokens, experts]    this rank's, along one dim
    mask    [.., tokens, tokens]                                                   own queries, and all keys behind them
    keys    [.., 1, tokens]                                                        all keys, for whatever query
    same    zeros, ones, what is expanded: the same for every token
    part    some of the tokens: a cache may keep them, and nobody may compute with them
    around  tokens with something before and behind them, for a convolution (model/around.py)
    made    a range, a triangle, a part of a table: made within the block from a length, so on a rank it would be another

Operations go by torch's names, less underscores. One that is not known here is named as what it is: nobody knows.

Products of matrices with tokens in them: which dims are summed over, and which are paired.

x [rows, tokens, width] @ w [width, out]              tokens in one of them, not summed over: each by itself
q [.., tokens, width] @ k' [.., width, tokens]        every token with every other: attention
p [.., queries, tokens] @ v [.., tokens, width]       summed over tokens: attention too
x [rows, tokens, heads, 1, width] @ y [rows, tokens, heads, width, n]    the same tokens in both: each by itself
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from math import isclose, log, prod
from typing import Any, Literal

import torch

from meshwright.model.sequence_analysis.token_dims import find_prime, has_tokens, keeps_dims, prime_factors
from meshwright.model.tensors.op_tables import (
    ARITHMETIC,
    BROADCAST,
    CONSTANT_FACTORIES,
    CONVOLUTIONS,
    DIM_ARGUMENT,
    DIM_MOVES,
    ELEMENTWISE,
    IDEMPOTENT_REDUCTIONS,
    LOOKUPS,
    NORMS,
    RECURRENT,
    RESHAPES,
    SPLITS,
    reads_values,
)
from meshwright.model.tensors.pytree import tree_tensors

_FIRST_FACTOR = {"matmul": 0, "mm": 0, "bmm": 0, "mv": 0, "rmatmul": 0, "addmm": 1, "baddbmm": 1, "linear": 0}
ATTENDS_WITHOUT_SDPA = "attends by itself"
PAIRS_TOKENS = f"{ATTENDS_WITHOUT_SDPA} ({{0}})"
SUMS_TOKENS = "sums over tokens ({0})"


def check_product(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], prime_product: int
) -> str | None:
    """Why the product `name` does not treat each token by itself; "": it does, None: it is no product that is known.

    Tokens are along dims whose size `length` tells (model/primes.py).
    """
    if name == "einsum":
        return _check_einsum(args, prime_product)
    if name not in _FIRST_FACTOR:
        return None
    first = _FIRST_FACTOR[name]
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
    """Of [.., m, k] @ [.., k, n]."""
    mine, theirs = _token_dims_from_end(left, length), _token_dims_from_end(right, length)
    summed = 1 if left.ndim else 0, 2 if right.ndim > 1 else 1
    if summed[0] in mine or summed[1] in theirs:
        return SUMS_TOKENS.format(name)
    if mine and theirs and (mine != theirs or min(mine) < 3):
        return PAIRS_TOKENS.format(name)
    return ""


def _token_dims_from_end(tensor: torch.Tensor, length: int) -> set[int]:
    """The dims of tokens, counted from behind."""
    return {tensor.ndim - dim for dim, size in enumerate(tensor.shape) if has_tokens(size, length)}


def _check_einsum(args: tuple[Any, ...], length: int) -> str | None:
    """Of a product by letters: tokens have one, and what is made has that too."""
    if not args or not isinstance(args[0], str):
        return None
    takes, _, gives = args[0].replace(" ", "").partition("->")
    given = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    letters = set()
    for word, tensor in zip(takes.split(","), given, strict=True):
        before, dots, after = word.partition("...")
        spread = tensor.ndim - len(before) - len(after)
        named = [*before, *(f".{spread - i}" for i in range(spread if dots else 0)), *after]
        letters |= {
            letter for letter, size in zip(named, tensor.shape, strict=True) if has_tokens(size, length)
        }
    if any(letter not in gives and not letter.startswith(".") for letter in letters) or "->" not in args[0]:
        return SUMS_TOKENS.format("einsum")
    return PAIRS_TOKENS.format("einsum") if len(letters) > 1 else ""


TokenKind = Literal["sharded", "mask", "keys", "constant", "from_length", "subset", "padded"]
PARTIAL_TOKENS = "takes some of the tokens (indexing)"
MADE_IN_BLOCK = (
    "makes positions or a mask inside of the block ({0}): give them to it, or declare smaller blocks"
)


@dataclass(frozen=True)
class TokenLayout:
    """How a tensor has tokens. `behind`: so many elements behind each within that dim; `made`: by which operation."""

    kind: TokenKind
    numel_per_token: int = 1
    origin: str = ""


SHARDED = TokenLayout("sharded")
CAT_OPS = ("cat", "concat")
TokenLayouts = MutableMapping[torch.Tensor, TokenLayout]


@dataclass(frozen=True)
class TokenOp:
    """One operation: its name, what it was given and has made, how tensors have tokens, and how many there are."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: Sequence[torch.Tensor]
    token_layouts: TokenLayouts
    prime_product: int

    def token_dims(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Those of `tensor` that have to do with tokens."""
        return find_token_dims(tensor, self.prime_product)

    def operands_of_kind(self, kind: TokenKind) -> list[torch.Tensor]:
        """What it was given of a `kind`."""
        return [
            each
            for each in self.operands
            if each in self.token_layouts and self.token_layouts[each].kind == kind
        ]

    @property
    def operands(self) -> list[torch.Tensor]:
        """The tensors that it was given."""
        return tree_tensors((self.args, dict(self.kwargs)))

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """What was given at a place, or by one of the names."""
        found = [self.kwargs[name] for name in names if name in self.kwargs]
        return found[0] if found else self.args[position] if len(self.args) > position else default


def find_token_dims(tensor: torch.Tensor, prime_product: int) -> tuple[int, ...]:
    """The dims of `tensor` whose size `length`, a prime or several (model/primes.py), tells."""
    return tuple(dim for dim, size in enumerate(tensor.shape) if has_tokens(size, prime_product))


def propagate_tokens(op: TokenOp) -> str:
    """Note in `step.held` how what it has made has tokens. Returns why it does not treat each by itself; "": it does."""
    if not op.results and op.name != "setitem" and not reads_values(op.name):
        return ""  # it asks for a shape
    lost = [each for each in op.operands if each not in op.token_layouts and op.token_dims(each)]
    if lost:
        return f"computes '{op.name}' with tokens that it was not given: put into an attribute, or made by code out of sight"
    for each in op.operands_of_kind("subset"):
        return op.token_layouts[each].origin
    own, masks = op.operands_of_kind("sharded"), op.operands_of_kind("mask") + op.operands_of_kind("keys")
    if not own and not masks:
        _propagate_without_tokens(op)
        return ""
    for each in op.operands_of_kind("from_length"):
        return MADE_IN_BLOCK.format(op.token_layouts[each].origin)
    if not op.results and op.name != "setitem":
        return f"reads values of tokens ({op.name})"
    why, behind = _check_masks(op, own) if masks else ("", 1) if not own else _check_sharded(op, own)
    if why == PARTIAL_TOKENS and op.name != "setitem":
        op.token_layouts.update({each: TokenLayout("subset", origin=why) for each in op.results})
        return ""
    if why:
        return why
    for each in [*op.results, *op.args[:1]] if op.name == "setitem" else op.results:
        dims = op.token_dims(each)
        if masks and dims:
            op.token_layouts[each] = TokenLayout("mask" if len(dims) > 1 else "keys")
        elif len(dims) > 1:
            return f"pairs tokens with tokens ({op.name})"
        elif dims:
            op.token_layouts[each] = TokenLayout("sharded", behind)
    return ""


def _propagate_without_tokens(step: TokenOp) -> None:
    """What is made of no token of the block's: the same for each, or from the length."""
    before = [step.token_layouts[each] for each in step.operands if each in step.token_layouts]
    tall = [each for each in before if each.kind == "from_length"]
    constant = step.name in CONSTANT_FACTORIES or (step.name in BROADCAST and not before)
    constant = constant or (bool(before) and not tall and step.name in ELEMENTWISE | RESHAPES | DIM_MOVES)
    if (
        step.name == "setitem"
        and before
        and not keeps_dims(step.args[1], step.token_dims(step.args[0]), step.args[0].ndim)
    ):
        step.token_layouts[step.args[0]] = TokenLayout("from_length", origin=step.name)
    for each in step.results:
        if step.token_dims(each) and constant:
            step.token_layouts[each] = TokenLayout("constant")
        elif before and not tall and not step.token_dims(each) and step.name in SPLITS | {"getitem"}:
            step.token_layouts[each] = TokenLayout(
                "subset", origin=PARTIAL_TOKENS
            )  # a view, into which somebody may write
        elif (
            step.token_dims(each)
            or tall
            or (before and step.name not in CONSTANT_FACTORIES | IDEMPOTENT_REDUCTIONS)
        ):  # a sum of ones tells how many there are
            step.token_layouts[each] = TokenLayout("from_length", origin=tall[0].origin if tall else step.name)


def _check_masks(step: TokenOp, own: Sequence[torch.Tensor]) -> tuple[str, int]:
    """Why masks are not masks any more."""
    if own:
        why = check_product(step.name, step.args, step.kwargs, step.prime_product)
        return why or f"computes '{step.name}' of tokens and of a mask", 1
    if step.name not in ELEMENTWISE | RESHAPES | BROADCAST | {"getitem", "unsqueeze", "squeeze"}:
        return f"computes '{step.name}' with a mask", 1
    if step.name == "getitem" and not keeps_dims(
        step.args[1], step.token_dims(step.args[0]), step.args[0].ndim
    ):
        return "cuts its mask to the number of its own tokens", 1
    for each in step.results:
        dims, last = step.token_dims(each), each.ndim - 1
        known = dims in ((last - 1, last), (last,)) and all(
            each.shape[dim] in prime_factors(step.prime_product) for dim in dims
        )
        if not known:
            return f"turns its mask round ({step.name})", 1
    return "", 1


def _check_sharded(step: TokenOp, own: Sequence[torch.Tensor]) -> tuple[str, int]:
    """Why the operation does not treat each token by itself, and how many elements stand behind each in what it makes."""
    name, behind = step.name, step.token_layouts[own[0]].numel_per_token
    if name in RESHAPES:
        return _check_view(step, own[0])
    if name in ELEMENTWISE:
        return _check_length_arithmetic(step) or _check_aligned(step), behind
    if name == "squeeze" and len(step.args) + len(step.kwargs) == 1:
        return "squeezes whatever has size 1, which may be the tokens of a rank", behind
    if name in DIM_MOVES or name == "one_hot":
        return "", behind
    if name == "embedding":
        return (
            "looks up in a table of tokens" if any(step.argument(1, "weight") is each for each in own) else ""
        ), behind
    if name in ("layer_norm", "rms_norm"):
        over = len(step.argument(1, "normalized_shape"))
        return (
            f"takes {name} over tokens" if step.token_dims(own[0])[0] >= own[0].ndim - over else ""
        ), behind
    if name in ("getitem", "setitem"):
        return _check_indexing(step), step.token_layouts[own[0]].numel_per_token
    if name in DIM_ARGUMENT:
        return _check_reduction(step, own), behind
    if name == "pad":
        padded = list(step.argument(1, "pad"))
        dim = own[0].ndim - 1 - step.token_dims(own[0])[0]
        return ("pads tokens" if any(padded[2 * dim : 2 * dim + 2]) else ""), behind
    if name in ("repeat", "tile"):
        back = -_dim_from_end(step, own[0])
        return ("repeats tokens" if step.results[0].shape[back] != own[0].shape[back] else ""), behind
    if name in CONVOLUTIONS | NORMS:
        batched = step.token_dims(own[0]) == (0,) and name != "batch_norm"
        return ("" if batched else f"computes '{name}' along tokens"), behind
    if name in RECURRENT:
        return f"carries a state from token to token ({name})", 1
    if name == "multi_head_attention_forward":
        return PAIRS_TOKENS.format("nn.MultiheadAttention"), 1
    why = check_product(name, step.args, step.kwargs, step.prime_product)
    return (f"computes '{name}' with tokens, of which nothing is known" if why is None else why), behind


def _dim_from_end(step: TokenOp, tensor: torch.Tensor) -> int:
    """Where the tokens of `tensor` stand, counted from behind."""
    return tensor.ndim - step.token_dims(tensor)[0]


def _check_aligned(step: TokenOp, given: Sequence[torch.Tensor] | None = None) -> str:
    """Why what is given does not have the same tokens along the same dim."""
    own = [each for each in step.operands if step.token_dims(each)] if given is None else given
    places = {(_dim_from_end(step, each), each.shape[step.token_dims(each)[0]]) for each in own}
    behind = {
        step.token_layouts[each].numel_per_token for each in own if step.token_layouts[each].kind == "sharded"
    }
    return f"pairs tokens with tokens ({step.name})" if len(places) > 1 or len(behind) > 1 else ""


def _check_length_arithmetic(step: TokenOp) -> str:
    """Whether a number that it computes with is how many tokens there are, or what people make of that."""
    made_of = [
        made for n in prime_factors(step.prime_product) for made in (n, 1 / n, n**0.5, n**-0.5, log(n))
    ]
    numbers = [each for each in (*step.args, *step.kwargs.values()) if type(each) in (int, float)]
    counted = step.name in ARITHMETIC and any(isclose(each, number) for each in numbers for number in made_of)
    return f"computes with the number of tokens ({step.name})" if counted else ""


def _check_view(step: TokenOp, tensor: torch.Tensor) -> tuple[str, int]:
    """A view keeps tokens apart where as many elements lie behind each in one of its dims."""
    (dim,), made = step.token_dims(tensor), step.results[0]
    inner = step.token_layouts[tensor].numel_per_token * prod(tensor.shape[dim + 1 :])
    found = step.token_dims(made)
    if len(found) == 1:
        after = prod(made.shape[found[0] + 1 :])
        own = find_prime(tensor.shape[dim], step.prime_product)
        if own and inner % after == 0 and made.shape[found[0]] % (own * (inner // after)) == 0:
            return "", inner // after
    return f"moves elements from token to token ({step.name})", 1


def _check_reduction(step: TokenOp, own: Sequence[torch.Tensor]) -> str:
    """Why an operation over dims does not leave tokens alone."""
    if (
        step.name in CAT_OPS and sum(each.numel() > 0 for each in step.operands) == 1
    ):  # with an empty cache of keys
        return ""
    place, default = DIM_ARGUMENT[step.name]
    first = step.argument(0, "input", "tensors")
    if (
        isinstance(first, torch.Tensor) and first not in step.token_layouts
    ):  # rows of a table, by what tokens say
        return (
            _check_aligned(step, own) if step.name in LOOKUPS else f"adds tokens up in a table ({step.name})"
        )
    over = step.argument(place, "dim", "dims", "axis", default=default)
    if isinstance(over, torch.Tensor):  # the larger one of two
        return _check_aligned(step)
    over = tuple(over) if isinstance(over, (tuple, list)) else (over,)
    if step.name == "flip" and not isinstance(step.argument(1, "dims"), (tuple, list)):
        over = step.args[1:]
    ndim = own[0].ndim + (step.name == "stack")
    (dim,) = step.token_dims(own[0])
    if step.name == "stack":
        return _check_aligned(step)
    if not over or any(
        each is None or type(each) is bool or each % ndim == dim for each in over
    ):  # x.var(False): over all
        return "takes tokens apart" if step.name in SPLITS else f"takes {step.name} over tokens"
    return _check_aligned(step)


def _check_indexing(step: TokenOp) -> str:
    """Why indexing does not leave tokens alone: those of a table may be looked up, tokens themselves may not."""
    tensor, index = step.args[0], step.args[1]
    if tensor not in step.token_layouts or step.token_layouts[tensor].kind == "constant":
        if step.name == "setitem" and tensor not in step.token_layouts:
            return "writes tokens into a table"
        if step.name == "setitem" and not keeps_dims(index, step.token_dims(tensor), tensor.ndim):
            return "writes into some of the tokens"
        return _check_aligned(step, [each for each in tree_tensors((index,)) if each in step.token_layouts])
    if tree_tensors((index,)):
        return f"takes tokens by an index ({step.name})"
    if not keeps_dims(index, step.token_dims(tensor), tensor.ndim, tensor.shape[step.token_dims(tensor)[0]]):
        return PARTIAL_TOKENS
    return ""
