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

from meshwright.model.sequence_analysis.token_dims import factors, has_tokens, plain, prime_in
from meshwright.model.tensors.op_tables import (
    APART,
    ARITHMETIC,
    BROADCAST,
    CONSTANT,
    CONVOLUTIONS,
    DIMS,
    ELEMENTWISE,
    LOOKUPS,
    MOVES,
    NORMS,
    RECURRENT,
    SAME,
    VIEWS,
    reads,
)
from meshwright.model.tensors.pytree import tensors

_PRODUCTS = {"matmul": 0, "mm": 0, "bmm": 0, "mv": 0, "rmatmul": 0, "addmm": 1, "baddbmm": 1, "linear": 0}
ATTENDS = "attends by itself"
PAIRS = f"{ATTENDS} ({{0}})"
SUMS = "sums over tokens ({0})"


def contracts(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], length: int) -> str | None:
    """Why the product `name` does not treat each token by itself; "": it does, None: it is no product that is known.

    Tokens are along dims whose size `length` tells (model/primes.py).
    """
    if name == "einsum":
        return _einsum(args, length)
    if name not in _PRODUCTS:
        return None
    first = _PRODUCTS[name]
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    left, right = given[first : first + 2]
    if name == "rmatmul":
        left, right = right, left
    if name == "linear":
        right = right.mT if right.ndim == 2 else right
    if first and any(has_tokens(size, length) for size in given[0].shape) and given[0].ndim < 2:
        return f"adds a tensor of tokens along another dim ({name})"
    return _product(name, left, right, length)


def _product(name: str, left: torch.Tensor, right: torch.Tensor, length: int) -> str:
    """Of [.., m, k] @ [.., k, n]."""
    mine, theirs = _behind(left, length), _behind(right, length)
    summed = 1 if left.ndim else 0, 2 if right.ndim > 1 else 1
    if summed[0] in mine or summed[1] in theirs:
        return SUMS.format(name)
    if mine and theirs and (mine != theirs or min(mine) < 3):
        return PAIRS.format(name)
    return ""


def _behind(tensor: torch.Tensor, length: int) -> set[int]:
    """The dims of tokens, counted from behind."""
    return {tensor.ndim - dim for dim, size in enumerate(tensor.shape) if has_tokens(size, length)}


def _einsum(args: tuple[Any, ...], length: int) -> str | None:
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
        letters |= {letter for letter, size in zip(named, tensor.shape, strict=True) if has_tokens(size, length)}
    if any(letter not in gives and not letter.startswith(".") for letter in letters) or "->" not in args[0]:
        return SUMS.format("einsum")
    return PAIRS.format("einsum") if len(letters) > 1 else ""


Kind = Literal["own", "mask", "keys", "same", "made", "part", "around"]
PART = "takes some of the tokens (indexing)"
MADE_INSIDE = "makes positions or a mask inside of the block ({0}): give them to it, or declare smaller blocks"


@dataclass(frozen=True)
class Along:
    """How a tensor has tokens. `behind`: so many elements behind each within that dim; `made`: by which operation."""

    kind: Kind
    behind: int = 1
    made: str = ""


OWN = Along("own")
JOINS = ("cat", "concat")
Held = MutableMapping[torch.Tensor, Along]


@dataclass(frozen=True)
class Step:
    """One operation: its name, what it was given and has made, how tensors have tokens, and how many there are."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: Sequence[torch.Tensor]
    held: Held
    length: int

    def dims(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Those of `tensor` that have to do with tokens."""
        return token_dims(tensor, self.length)

    def of(self, kind: Kind) -> list[torch.Tensor]:
        """What it was given of a `kind`."""
        return [each for each in self.given if each in self.held and self.held[each].kind == kind]

    @property
    def given(self) -> list[torch.Tensor]:
        """The tensors that it was given."""
        return tensors((self.args, dict(self.kwargs)))

    def argument(self, place: int, *names: str, default: Any = None) -> Any:
        """What was given at a place, or by one of the names."""
        found = [self.kwargs[name] for name in names if name in self.kwargs]
        return found[0] if found else self.args[place] if len(self.args) > place else default


def token_dims(tensor: torch.Tensor, length: int) -> tuple[int, ...]:
    """The dims of `tensor` whose size `length`, a prime or several (model/primes.py), tells."""
    return tuple(dim for dim, size in enumerate(tensor.shape) if has_tokens(size, length))


def followed(step: Step) -> str:
    """Note in `step.held` how what it has made has tokens. Returns why it does not treat each by itself; "": it does."""
    if not step.made and step.name != "setitem" and not reads(step.name):
        return ""  # it asks for a shape
    lost = [each for each in step.given if each not in step.held and step.dims(each)]
    if lost:
        return f"computes '{step.name}' with tokens that it was not given: put into an attribute, or made by code out of sight"
    for each in step.of("part"):
        return step.held[each].made
    own, masks = step.of("own"), step.of("mask") + step.of("keys")
    if not own and not masks:
        _apart(step)
        return ""
    for each in step.of("made"):
        return MADE_INSIDE.format(step.held[each].made)
    if not step.made and step.name != "setitem":
        return f"reads values of tokens ({step.name})"
    why, behind = _on_masks(step, own) if masks else ("", 1) if not own else _on_own(step, own)
    if why == PART and step.name != "setitem":
        step.held.update({each: Along("part", made=why) for each in step.made})
        return ""
    if why:
        return why
    for each in [*step.made, *step.args[:1]] if step.name == "setitem" else step.made:
        dims = step.dims(each)
        if masks and dims:
            step.held[each] = Along("mask" if len(dims) > 1 else "keys")
        elif len(dims) > 1:
            return f"pairs tokens with tokens ({step.name})"
        elif dims:
            step.held[each] = Along("own", behind)
    return ""


def _apart(step: Step) -> None:
    """What is made of no token of the block's: the same for each, or from the length."""
    before = [step.held[each] for each in step.given if each in step.held]
    tall = [each for each in before if each.kind == "made"]
    constant = step.name in CONSTANT or (step.name in BROADCAST and not before)
    constant = constant or (bool(before) and not tall and step.name in ELEMENTWISE | VIEWS | MOVES)
    if step.name == "setitem" and before and not plain(step.args[1], step.dims(step.args[0]), step.args[0].ndim):
        step.held[step.args[0]] = Along("made", made=step.name)
    for each in step.made:
        if step.dims(each) and constant:
            step.held[each] = Along("same")
        elif before and not tall and not step.dims(each) and step.name in APART | {"getitem"}:
            step.held[each] = Along("part", made=PART)  # a view, into which somebody may write
        elif step.dims(each) or tall or (before and step.name not in CONSTANT | SAME):  # a sum of ones tells how many there are
            step.held[each] = Along("made", made=tall[0].made if tall else step.name)


def _on_masks(step: Step, own: Sequence[torch.Tensor]) -> tuple[str, int]:
    """Why masks are not masks any more."""
    if own:
        why = contracts(step.name, step.args, step.kwargs, step.length)
        return why or f"computes '{step.name}' of tokens and of a mask", 1
    if step.name not in ELEMENTWISE | VIEWS | BROADCAST | {"getitem", "unsqueeze", "squeeze"}:
        return f"computes '{step.name}' with a mask", 1
    if step.name == "getitem" and not plain(step.args[1], step.dims(step.args[0]), step.args[0].ndim):
        return "cuts its mask to the number of its own tokens", 1
    for each in step.made:
        dims, last = step.dims(each), each.ndim - 1
        known = dims in ((last - 1, last), (last,)) and all(each.shape[dim] in factors(step.length) for dim in dims)
        if not known:
            return f"turns its mask round ({step.name})", 1
    return "", 1


def _on_own(step: Step, own: Sequence[torch.Tensor]) -> tuple[str, int]:
    """Why the operation does not treat each token by itself, and how many elements stand behind each in what it makes."""
    name, behind = step.name, step.held[own[0]].behind
    if name in VIEWS:
        return _viewed(step, own[0])
    if name in ELEMENTWISE:
        return _counted(step) or _aligned(step), behind
    if name == "squeeze" and len(step.args) + len(step.kwargs) == 1:
        return "squeezes whatever has size 1, which may be the tokens of a rank", behind
    if name in MOVES or name == "one_hot":
        return "", behind
    if name == "embedding":
        return ("looks up in a table of tokens" if any(step.argument(1, "weight") is each for each in own) else ""), behind
    if name in ("layer_norm", "rms_norm"):
        over = len(step.argument(1, "normalized_shape"))
        return (f"takes {name} over tokens" if step.dims(own[0])[0] >= own[0].ndim - over else ""), behind
    if name in ("getitem", "setitem"):
        return _indexed(step), step.held[own[0]].behind
    if name in DIMS:
        return _over(step, own), behind
    if name == "pad":
        padded = list(step.argument(1, "pad"))
        dim = own[0].ndim - 1 - step.dims(own[0])[0]
        return ("pads tokens" if any(padded[2 * dim : 2 * dim + 2]) else ""), behind
    if name in ("repeat", "tile"):
        back = -_back(step, own[0])
        return ("repeats tokens" if step.made[0].shape[back] != own[0].shape[back] else ""), behind
    if name in CONVOLUTIONS | NORMS:
        batched = step.dims(own[0]) == (0,) and name != "batch_norm"
        return ("" if batched else f"computes '{name}' along tokens"), behind
    if name in RECURRENT:
        return f"carries a state from token to token ({name})", 1
    if name == "multi_head_attention_forward":
        return PAIRS.format("nn.MultiheadAttention"), 1
    why = contracts(name, step.args, step.kwargs, step.length)
    return (f"computes '{name}' with tokens, of which nothing is known" if why is None else why), behind


def _back(step: Step, tensor: torch.Tensor) -> int:
    """Where the tokens of `tensor` stand, counted from behind."""
    return tensor.ndim - step.dims(tensor)[0]


def _aligned(step: Step, given: Sequence[torch.Tensor] | None = None) -> str:
    """Why what is given does not have the same tokens along the same dim."""
    own = [each for each in step.given if step.dims(each)] if given is None else given
    places = {(_back(step, each), each.shape[step.dims(each)[0]]) for each in own}
    behind = {step.held[each].behind for each in own if step.held[each].kind == "own"}
    return f"pairs tokens with tokens ({step.name})" if len(places) > 1 or len(behind) > 1 else ""


def _counted(step: Step) -> str:
    """Whether a number that it computes with is how many tokens there are, or what people make of that."""
    made_of = [made for n in factors(step.length) for made in (n, 1 / n, n**0.5, n**-0.5, log(n))]
    numbers = [each for each in (*step.args, *step.kwargs.values()) if type(each) in (int, float)]
    counted = step.name in ARITHMETIC and any(isclose(each, number) for each in numbers for number in made_of)
    return f"computes with the number of tokens ({step.name})" if counted else ""


def _viewed(step: Step, tensor: torch.Tensor) -> tuple[str, int]:
    """A view keeps tokens apart where as many elements lie behind each in one of its dims."""
    (dim,), made = step.dims(tensor), step.made[0]
    inner = step.held[tensor].behind * prod(tensor.shape[dim + 1 :])
    found = step.dims(made)
    if len(found) == 1:
        after = prod(made.shape[found[0] + 1 :])
        own = prime_in(tensor.shape[dim], step.length)
        if own and inner % after == 0 and made.shape[found[0]] % (own * (inner // after)) == 0:
            return "", inner // after
    return f"moves elements from token to token ({step.name})", 1


def _over(step: Step, own: Sequence[torch.Tensor]) -> str:
    """Why an operation over dims does not leave tokens alone."""
    if step.name in JOINS and sum(each.numel() > 0 for each in step.given) == 1:  # with an empty cache of keys
        return ""
    place, default = DIMS[step.name]
    first = step.argument(0, "input", "tensors")
    if isinstance(first, torch.Tensor) and first not in step.held:  # rows of a table, by what tokens say
        return _aligned(step, own) if step.name in LOOKUPS else f"adds tokens up in a table ({step.name})"
    over = step.argument(place, "dim", "dims", "axis", default=default)
    if isinstance(over, torch.Tensor):  # the larger one of two
        return _aligned(step)
    over = tuple(over) if isinstance(over, (tuple, list)) else (over,)
    if step.name == "flip" and not isinstance(step.argument(1, "dims"), (tuple, list)):
        over = step.args[1:]
    ndim = own[0].ndim + (step.name == "stack")
    (dim,) = step.dims(own[0])
    if step.name == "stack":
        return _aligned(step)
    if not over or any(each is None or type(each) is bool or each % ndim == dim for each in over):  # x.var(False): over all
        return "takes tokens apart" if step.name in APART else f"takes {step.name} over tokens"
    return _aligned(step)


def _indexed(step: Step) -> str:
    """Why indexing does not leave tokens alone: those of a table may be looked up, tokens themselves may not."""
    tensor, index = step.args[0], step.args[1]
    if tensor not in step.held or step.held[tensor].kind == "same":
        if step.name == "setitem" and tensor not in step.held:
            return "writes tokens into a table"
        if step.name == "setitem" and not plain(index, step.dims(tensor), tensor.ndim):
            return "writes into some of the tokens"
        return _aligned(step, [each for each in tensors((index,)) if each in step.held])
    if tensors((index,)):
        return f"takes tokens by an index ({step.name})"
    if not plain(index, step.dims(tensor), tensor.ndim, tensor.shape[step.dims(tensor)[0]]):
        return PART
    return ""
