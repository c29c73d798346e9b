"""A tensor of which this rank has some of the tokens, and which looks to glue as if it had all.

Blocks run on the tokens that a rank has. Between blocks the model's own forward goes on computing, and what it asks there for
(a length, positions, a mask) must be what it would be on one device:

    hidden = model.embed(ids)               block: this rank's tokens in, an Apart out
    hidden.shape                            [2, 4096, 64], though 1024 tokens are here
    positions = arange(hidden.shape[1])     all of them: sliced where a block takes them in
    hidden = hidden + table(positions)      token by token: an Apart again
    hidden[:, 0]                            needs all tokens: they are brought together, and backward hands out what comes back

What treats each token by itself is in `model/tokens.py`. Gradients are summands everywhere: of what all ranks have alike, such as
a table of positions, each adds what its own tokens give.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from meshwright.model.blocks.inplace_writes import refused, written
from meshwright.model.sequence_parallel.partial_ops import SUMS, picked, summed
from meshwright.model.sequence_parallel.token_shard import Share
from meshwright.model.tensors.op_tables import BY_ELEMENT
from meshwright.model.tensors.placeholder import Foreign
from meshwright.model.tensors.pytree import copied, named, swap, tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.sequence_info import Passing

Shares = Callable[[int, int], Share]  # of rows that have so many tokens in the plan, and that many, it seems, now
Told = Sequence[tuple[int, Share] | None]  # of tensors in order: along which dim they have tokens, and which of them
MASK_DIMS = 4  # rows, heads, queries, keys
ASKED = frozenset(("size", "dim", "__len__", "numel", "is_floating_point", "is_complex", "element_size", "stride", "ndimension"))


class Apart(torch.Tensor):
    """All tokens of `share` along dim `along`, of which `local` are here."""

    local: torch.Tensor
    along: int
    share: Share

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Apart({list(self.shape)}, {self.share.count} of {self.share.length} along dim {self.along})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__.strip("_")
        if func.__name__ in ASKED or func.__name__ == "__get__":
            return _natively(func, args, kwargs)
        if Foreign in types:  # a value of another part of the model, which has no numbers: what comes of it is known there
            return NotImplemented
        found = aparts((args, kwargs))
        into = written(func.__name__, args, kwargs)
        made = None if into is not None and type(into) is not Apart else _by_token(name, func, args, kwargs, found)
        if made is None and type(into) is Apart:
            raise refused(func.__name__)
        return _brought(func, args, kwargs, found) if made is None else made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out `func`
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        text = f"{func} takes in a tensor of which each rank has some of the tokens, below all that could bring them together"
        raise PlanError(text, fix="compute it inside of a block: Model(blocks=[...])", where="model")


def apart(local: torch.Tensor, along: int, share: Share) -> torch.Tensor:
    """The Apart whose tokens on this rank are `local`."""
    shape = [*local.shape]
    shape[along] = share.length
    needed = local.requires_grad
    made: Any = torch.Tensor._make_wrapper_subclass(Apart, shape, dtype=local.dtype, device=local.device, requires_grad=needed)
    made.local, made.along, made.share = local, along % local.ndim, share
    return made


def aparts(value: Any) -> list[Apart]:
    """Those among the tensors in `value`."""
    return [tensor for tensor in tensors(value) if type(tensor) is Apart]


def locals_of(value: Any) -> Any:
    """`value` with this rank's tokens in place of every Apart."""
    found = {id(each): each.local for each in aparts(value)}
    return swap(value, found) if found else value


def taken(value: Any, passing: Passing, shares: Shares) -> Any:
    """What the visit of `passing`, all of it said, is given, `value`, as it runs on this rank's tokens.

    Of a tensor that has tokens along two dims, such as a mask, the second stays whole. Raises PlanError for another length, and
    for a tensor with tokens that the visit was not given in the trial run.
    """
    slots = zip(passing.slots, passing.takes, passing.takes_of, strict=True)
    known = {slot: (dims, planned) for slot, dims, planned in slots}
    found, mine, new, alike = dict[int, torch.Tensor](), list[Share](), list[torch.Tensor](), list[torch.Tensor]()
    for slot, tensor in named(value):
        dims, planned = known.get(slot, (None, 0))
        if type(tensor) is Apart:  # without dims it is a row of a mask: it has all keys
            if dims:
                mine.append(_share_of(tensor, tensor.along, shares, planned, passing.visit))
            if dims != ():
                found[id(tensor)] = tensor.local
            elif id(tensor) not in found:
                found[id(tensor)] = tensor.share.bring(tensor.local, tensor.along)
        elif dims is None:
            new.append(tensor)
        elif dims:
            mine.append(_share_of(tensor, dims[0], shares, planned, passing.visit))
            found[id(tensor)] = (mine[-1].of_mask if len(dims) > 1 else mine[-1].of)(tensor, dims[0])
        elif tensor.ndim > 1 and tensor.shape[-2] == 1:
            alike.append(tensor)
    for share, tensor in product(set(mine), alike):
        share.of_mask(tensor, None)
    for tensor in new:
        share = _as_mask(tensor, mine, passing.visit)
        if share is not None:
            found[id(tensor)] = share.of_mask(tensor, 2)
    return swap(copied(value), found) if found else value


def own_of(value: Any, passing: Passing, shares: Shares) -> Any:
    """What a visit gives out, `value`: of one that every rank runs `whole`, this rank's tokens."""
    if not passing.whole:
        return value
    told = zip(tensors(value), passing.gives, passing.gives_of, strict=True)
    found = {
        id(each): _share_of(each, dims[0], shares, planned, passing.visit).of(each, dims[0])
        for each, dims, planned in told
        if dims
    }
    return swap(value, found)


def _share_of(tensor: torch.Tensor, dim: int, shares: Shares, planned: int, visit: str) -> Share:
    """Which tokens of `tensor` this rank has, where they are along `dim`."""
    count = tensor.shape[dim] if dim < tensor.ndim else 0
    share = shares(planned, count)
    if share.length != count:
        text = f"it is given a tensor of shape {list(tensor.shape)}, and in the trial run dim {dim} of that was tokens"
        raise PlanError(f"{text}: there are {share.length}", fix="give each row as many tokens", where=visit)
    return share


def _as_mask(tensor: torch.Tensor, mine: Sequence[Share], visit: str) -> Share | None:
    """Whose rows are those of a tensor that was not there in the trial run: a batch may need a mask that another does not.

    `mine` are the tokens of what the visit was given besides.
    """
    if tensor.ndim == MASK_DIMS and len({*tensor.shape[-2:]}) == 1 and tensor.shape[-1] > 1:
        rows = next((share for share in mine if share.length == tensor.shape[-1]), None)
        if rows is not None:
            return rows
    if any(share.length in tensor.shape for share in mine):
        text = f"it is given a tensor of shape {list(tensor.shape)}, which was not there in the trial run"
        raise PlanError(text, fix="make the plan from an example batch that has all that later ones have", where=visit)
    return None


def given(value: Any, told: Told) -> Any:
    """What a block gives out, `value`, as glue shall see it: the n-th tensor in it has the tokens `told[n]`."""
    found = {}
    for tensor, known in zip(tensors(value), told, strict=False):
        if known is not None and type(tensor) is not Apart:
            found[id(tensor)] = apart(tensor, *known)
    return swap(value, found) if found else value


def _by_token(name: str, func: Any, args: Any, kwargs: Any, found: Sequence[Apart]) -> Any:
    """What `func` makes of tokens, each by itself; None where it does not."""
    first = found[0]
    if name == "getitem":
        view = _picked(args)
        return picked(*args) if view is None and type(args[0]) is Apart and not aparts(args[1]) else view
    if name in SUMS and args and type(args[0]) is Apart:
        return summed(name, *args, **kwargs)
    if name in ("view", "reshape") and _same_form(*args):
        return apart(first.local, first.along, first.share)
    if name not in BY_ELEMENT or any(each.share != first.share for each in found):
        return None
    behind = {each.ndim - each.along for each in found}
    if len(behind) != 1:
        return None
    (back,) = behind
    mine = {id(each): each.local for each in found}
    for tensor in tensors((args, kwargs)):
        if type(tensor) is not Apart and tensor.ndim >= back and tensor.shape[-back] == first.share.length > 1:
            mine[id(tensor)] = first.share.of(tensor, tensor.ndim - back)
    args, kwargs = swap((args, dict(kwargs)), mine)
    made = func(*args, **kwargs)
    return apart(made, made.ndim - back, first.share) if isinstance(made, torch.Tensor) else made


def _picked(args: tuple[Any, ...]) -> Any:
    """A view that leaves the tokens alone; None for any other."""
    tensor, index = args
    if type(tensor) is not Apart:
        return None
    index = index if isinstance(index, tuple) else (index,)
    if not all(each is None or each is Ellipsis or type(each) in (slice, int) for each in index):
        return None
    if Ellipsis in index:
        at, named = index.index(Ellipsis), sum(each is not None and each is not Ellipsis for each in index)
        index = (*index[:at], *[slice(None)] * (tensor.ndim - named), *index[at + 1 :])
    dim, made, along, mine = 0, 0, None, list[Any]()  # the dim that is looked at, and how many have been made
    for each in index:
        if each is not None and dim == tensor.along:
            if type(each) is int or not _all(each, tensor.share.length):
                return None
            along, each = made, slice(None)
        mine.append(each)
        dim, made = dim + (each is not None), made + (type(each) is not int)
    along = made + tensor.along - dim if along is None else along
    return apart(tensor.local[tuple(mine)], along, tensor.share)


def _same_form(tensor: torch.Tensor, *sizes: Any) -> bool:
    """Whether `sizes` are those that the tensor has."""
    asked = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    return len(asked) == tensor.ndim and all(size in (-1, own) for size, own in zip(asked, tensor.shape, strict=True))


def _all(piece: slice, length: int) -> bool:
    return range(length)[piece] == range(length)


def _brought(func: Any, args: Any, kwargs: Any, found: Sequence[Apart]) -> Any:
    """What `func` makes of all tokens."""
    whole = {id(each): each.share.bring(each.local, each.along) for each in found}
    args, kwargs = swap((args, dict(kwargs)), whole)
    return func(*args, **kwargs)


def _natively(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
