"""Products of matrices with tokens in them: which dims are summed over, and which are paired.

x [rows, tokens, width] @ w [width, out]              tokens in one of them, not summed over: each by itself
q [.., tokens, width] @ k' [.., width, tokens]        every token with every other: attention
p [.., queries, tokens] @ v [.., tokens, width]       summed over tokens: attention too
x [rows, tokens, heads, 1, width] @ y [rows, tokens, heads, width, n]    the same tokens in both: each by itself
"""

from collections.abc import Mapping
from typing import Any

import torch

from meshwright.model.primes import has_tokens

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
