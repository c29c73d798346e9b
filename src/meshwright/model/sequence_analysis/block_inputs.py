"""What a block of a trial takes in: which tensors have tokens, of which rows, and what it is given in their place.

apart                     what a block has given out, tokens along a dim that is known
plain                     made by glue of rows that every rank has read: a dim is known by its size
the first that attends    of a model that is not given rows of tokens: [rows, tokens, width] begins them
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshwright.model.sequence_analysis.lengths import Sizes
from meshwright.model.sequence_analysis.token_rules import MADE_INSIDE, OWN, Along, Held, token_dims
from meshwright.model.sequence_parallel.attention_call import Attention, mask_of, parts
from meshwright.model.sequence_parallel.sharded_activation import Apart, aparts
from meshwright.model.tensors.grad_alias import another
from meshwright.model.tensors.pytree import leaves, tensors
from meshwright.plan.model_spec.sequence_info import Attend, Mask

TOLD = "is told how many tokens there are: a rank has some of them, and their shape tells"


@dataclass
class Visit:
    """A visit that runs: which modules are under way within, and what keeps it from running on some of the tokens."""

    name: str
    modules: list[tuple[str, nn.Module]]
    mixes: str = ""
    attends: bool = False
    idle: bool = False  # it attends to something that has no tokens
    called: list[str] = field(default_factory=list)  # the modules that have been left
    aside: int = 0  # how many experts are under way: what they do is their own
    leaks: bool = False  # tokens go round what it gives out
    rows: dict[str, int] = field(default_factory=dict)  # of how many tokens what modules within are called with
    read: bool = False  # it computes with tokens that it was given, and does not only ask for shapes
    known: frozenset[int] = frozenset()  # by identity, the masks that it is given of which every rank has all


@dataclass
class Takes:
    """For each tensor that a visit takes in, which dims are tokens, and how many in the plan; `new` by identity, `why` not."""

    dims: list[tuple[int, ...]] = field(default_factory=list)
    of: list[int] = field(default_factory=list)
    new: dict[int, torch.Tensor] = field(default_factory=dict)
    why: str = ""
    known: set[int] = field(default_factory=set)  # of `new`, by identity: masks of all queries and heads, made by glue

    @property
    def some(self) -> bool:
        """Whether any of it has to do with tokens."""
        return bool(self.new)


def taken_in(value: Any, sizes: Sizes, held: Held, *, begins: bool) -> Takes:
    """What a visit takes in that is given `value`; with `begins`, tokens begin there where it is given none."""
    found, counts = Takes(), _counts(value, sizes, begins=begins)
    known = {*map(sizes.in_glue, sizes.planned)} - sizes.within.keys() | counts
    if any(type(each) is int and each in known for each in leaves(value)):
        found.why = TOLD
    for tensor in tensors(value):
        local = tensor.local if type(tensor) is Apart else tensor
        local = sizes.inward(local, _dims(tensor, local, counts, sizes))
        dims, last = token_dims(local, sizes.product), local.ndim - 1
        if dims == (last,) and last > 1 and local.shape[-2] == 1:  # a row of keys for every query, all of them
            along, dims = Along("keys"), ()
        else:
            along = OWN if len(dims) == 1 else Along("mask")
        if (len(dims) > 1 and dims != (last - 1, last)) or any(local.shape[dim] not in sizes.planned for dim in dims):
            found.why = found.why or f"takes in a tensor of shape {shape_of(local, sizes)}, whose tokens cannot be told apart"
        found.dims.append(dims)
        found.of.append(sizes.planned_in(local.shape[dims[0]]) if dims else 0)
        if dims or along.kind == "keys":
            found.new[id(tensor)] = found.new.get(id(tensor), another(local))
            held[found.new[id(tensor)]] = along
            by_head = local.ndim > 2 and local.shape[-3] > 1  # ranks may have some of them
            if along.kind != "own" and not by_head and type(tensor) is not Apart and not tensor.requires_grad:
                found.known.add(id(found.new[id(tensor)]))
    return found


def _counts(value: Any, sizes: Sizes, *, begins: bool) -> set[int]:
    """How many tokens glue sees of those that began within, and are taken in here."""
    given = aparts(value)
    plain = [each for each in tensors(value) if type(each) is not Apart and each.is_floating_point()]
    if begins and not given and not any(token_dims(each, sizes.product) for each in plain):
        rows = [each.shape[1] for each in plain if each.ndim == 3 and each.shape[0] == sizes.batch and each.shape[1] > 1]
        for count in rows[:1]:
            sizes.begin(count)
            return {count}
    return {each.share.length for each in given if each.share.length in sizes.within}


def _dims(tensor: torch.Tensor, local: torch.Tensor, counts: set[int], sizes: Sizes) -> list[int]:
    """Which dims of a tensor are tokens that began within, by their number in glue."""
    found = [dim for dim, size in enumerate(local.shape) if size in counts and (dim or size != sizes.batch)]
    if local.ndim == 3 and type(tensor) is Apart:
        return [dim for dim in found if dim == tensor.along]
    if local.ndim == 3 and local.is_floating_point() and local.shape[0] == sizes.batch:
        return [dim for dim in found if dim == 1]  # the width may be as large
    return found


def shape_of(tensor: torch.Tensor, sizes: Sizes) -> str:
    """The shape of a tensor in a block, in words."""
    words = []
    for size in tensor.shape:
        prime = next((each for each in sizes.planned if size and size % each == 0), 0)
        many = size // prime if prime else size
        word = "rows" if many == sizes.batch else str(many)
        words.append(word if not prime else "tokens" if many == 1 else f"{word} * tokens")
    return f"[{', '.join(words)}]"


def attended(visit: Visit, given: Attention, held: Held, sizes: Sizes, *, declared: bool) -> Attend | str:
    """A call of attention within a visit; or why it is none by tokens. `declared`: whoever calls says that it is causal."""
    for each in (given.query, given.key, given.value):
        along, dims = held.get(each), token_dims(each, sizes.product)
        if along is None or along.kind != "own" or dims != (each.ndim - 2,) or each.shape[-2] not in sizes.planned:
            return "attends to something else than its own tokens"
    if given.key.shape[-2] != given.value.shape[-2]:
        return "attends to keys and values of unlike rows"
    mask = None if given.attn_mask is None else held.get(given.attn_mask)
    if mask is not None and mask.kind not in ("mask", "keys"):
        return MADE_INSIDE.format(mask.made) if mask.made else "attends with a mask that has tokens in one dim alone"
    return Attend(
        visit.name,
        heads=given.query.shape[-3] if given.query.ndim > 3 else 1,
        groups=given.key.shape[-3] if given.key.ndim > 3 else 1,
        width=given.query.shape[-1],
        values=given.value.shape[-1],
        queries=sizes.planned[given.query.shape[-2]],
        keys=sizes.planned[given.key.shape[-2]],
        causal=given.is_causal or (given.attn_mask is not None and declared),
        masked=given.attn_mask is not None,
        needed=any(each.requires_grad for each in given.tensors),
        mask=_mask_of(given.attn_mask, visit.known),
        learns=(given.query.requires_grad, given.key.requires_grad, given.value.requires_grad),
    )


def _mask_of(mask: torch.Tensor | None, known: Collection[int]) -> Mask | None:
    """What the plan needs to know of a mask; of a bias less one of those that are `known`, what it needs to know of the bias."""
    made = None if mask is None else parts(mask)
    if made is not None and id(made[1]) in known:
        return mask_of(made[0])
    found = mask_of(mask)
    return replace(found, known=True) if found is not None and id(mask) in known else found


def plain(given: Attention, sizes: Sizes) -> bool:
    """Whether a call of attention has nothing to do with tokens that are dealt."""
    return not any(token_dims(each, sizes.product) for each in given.tensors)


def called(visit: Visit, name: str, args: tuple[Any, ...], sizes: Sizes) -> None:
    """Note in `visit` that a module within is called: with tokens of which row, where those are some."""
    first = args[0] if args else None
    if isinstance(first, torch.Tensor) and name not in visit.rows:
        found = {sizes.planned_in(first.shape[dim]) for dim in token_dims(first, sizes.product)} - {0}
        visit.rows |= {name: min(found)} if len(found) == 1 else {}
