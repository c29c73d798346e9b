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

from meshwright.model.blocks.inplace_writes import glue_write_error, written_tensor
from meshwright.model.sequence_parallel.partial_ops import SUM_OPS, partial_index, partial_sum
from meshwright.model.sequence_parallel.token_shard import TokenShard
from meshwright.model.tensors.op_tables import TOKENWISE_OPS
from meshwright.model.tensors.placeholder import PlaceholderTensor
from meshwright.model.tensors.pytree import copy_containers, named_tensors, replace_tensors, tree_tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.sequence_info import BlockSequenceInfo

GetShard = Callable[
    [int, int], TokenShard
]  # of rows that have so many tokens in the plan, and that many, it seems, now
OutputShards = Sequence[
    tuple[int, TokenShard] | None
]  # of tensors in order: along which dim they have tokens, and which of them
MASK_DIMS = 4  # rows, heads, queries, keys
METADATA_QUERIES = frozenset(
    (
        "size",
        "dim",
        "__len__",
        "numel",
        "is_floating_point",
        "is_complex",
        "element_size",
        "stride",
        "ndimension",
    )
)


class SequenceShardedTensor(torch.Tensor):
    """All tokens of `share` along dim `along`, of which `local` are here."""

    local_tensor: torch.Tensor
    sequence_dim: int
    token_shard: TokenShard

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Apart({list(self.shape)}, {self.token_shard.num_tokens} of {self.token_shard.length} along dim {self.sequence_dim})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__.strip("_")
        if func.__name__ in METADATA_QUERIES or func.__name__ == "__get__":
            return _call_without_override(func, args, kwargs)
        if (
            PlaceholderTensor in types
        ):  # a value of another part of the model, which has no numbers: what comes of it is known there
            return NotImplemented
        found = find_sharded_tensors((args, kwargs))
        into = written_tensor(func.__name__, args, kwargs)
        made = (
            None
            if into is not None and type(into) is not SequenceShardedTensor
            else _run_on_shards(name, func, args, kwargs, found)
        )
        if made is None and type(into) is SequenceShardedTensor:
            raise glue_write_error(func.__name__)
        return _run_on_gathered(func, args, kwargs, found) if made is None else made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out `func`
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        text = f"{func} takes in a tensor of which each rank has some of the tokens, below all that could bring them together"
        raise PlanError(text, fix="compute it inside of a block: Model(blocks=[...])", location="model")


def make_sharded_tensor(
    local_tensor: torch.Tensor, sequence_dim: int, token_shard: TokenShard
) -> torch.Tensor:
    """The Apart whose tokens on this rank are `local`."""
    shape = [*local_tensor.shape]
    shape[sequence_dim] = token_shard.length
    needed = local_tensor.requires_grad
    made: Any = torch.Tensor._make_wrapper_subclass(
        SequenceShardedTensor,
        shape,
        dtype=local_tensor.dtype,
        device=local_tensor.device,
        requires_grad=needed,
    )
    made.local_tensor, made.sequence_dim, made.token_shard = local_tensor, sequence_dim % local_tensor.ndim, token_shard
    return made


def find_sharded_tensors(value: Any) -> list[SequenceShardedTensor]:
    """Those among the tensors in `value`."""
    return [tensor for tensor in tree_tensors(value) if type(tensor) is SequenceShardedTensor]


def to_local_tensors(value: Any) -> Any:
    """`value` with this rank's tokens in place of every Apart."""
    found = {id(each): each.local_tensor for each in find_sharded_tensors(value)}
    return replace_tensors(value, found) if found else value


def shard_block_inputs(value: Any, sequence_info: BlockSequenceInfo, get_shard: GetShard) -> Any:
    """What the visit of `passing`, all of it said, is given, `value`, as it runs on this rank's tokens.

    Of a tensor that has tokens along two dims, such as a mask, the second stays whole. Raises PlanError for another length, and
    for a tensor with tokens that the visit was not given in the trial run.
    """
    slots = zip(
        sequence_info.arg_paths, sequence_info.input_token_dims, sequence_info.input_num_tokens, strict=True
    )
    known = {slot: (dims, planned) for slot, dims, planned in slots}
    found, mine, new, alike = (
        dict[int, torch.Tensor](),
        list[TokenShard](),
        list[torch.Tensor](),
        list[torch.Tensor](),
    )
    for slot, tensor in named_tensors(value):
        dims, planned = known.get(slot, (None, 0))
        if type(tensor) is SequenceShardedTensor:  # without dims it is a row of a mask: it has all keys
            if dims:
                mine.append(
                    _shard_of_dim(tensor, tensor.sequence_dim, get_shard, planned, sequence_info.block_call)
                )
            if dims != ():
                found[id(tensor)] = tensor.local_tensor
            elif id(tensor) not in found:
                found[id(tensor)] = tensor.token_shard.gather(tensor.local_tensor, tensor.sequence_dim)
        elif dims is None:
            new.append(tensor)
        elif dims:
            mine.append(_shard_of_dim(tensor, dims[0], get_shard, planned, sequence_info.block_call))
            found[id(tensor)] = (mine[-1].take_mask if len(dims) > 1 else mine[-1].take_padded)(
                tensor, dims[0]
            )
        elif tensor.ndim > 1 and tensor.shape[-2] == 1:
            alike.append(tensor)
    for share, tensor in product(set(mine), alike):
        share.take_mask(tensor, None)
    for tensor in new:
        share = _shard_of_new_tensor(tensor, mine, sequence_info.block_call)
        if share is not None:
            found[id(tensor)] = share.take_mask(tensor, 2)
    return replace_tensors(copy_containers(value), found) if found else value


def shard_block_outputs(value: Any, sequence_info: BlockSequenceInfo, get_shard: GetShard) -> Any:
    """What a visit gives out, `value`: of one that every rank runs `whole`, this rank's tokens."""
    if not sequence_info.is_replicated:
        return value
    told = zip(
        tree_tensors(value), sequence_info.output_token_dims, sequence_info.output_num_tokens, strict=True
    )
    found = {
        id(each): _shard_of_dim(each, dims[0], get_shard, planned, sequence_info.block_call).take_padded(
            each, dims[0]
        )
        for each, dims, planned in told
        if dims
    }
    return replace_tensors(value, found)


def _shard_of_dim(tensor: torch.Tensor, dim: int, shares: GetShard, planned: int, visit: str) -> TokenShard:
    """Which tokens of `tensor` this rank has, where they are along `dim`."""
    count = tensor.shape[dim] if dim < tensor.ndim else 0
    share = shares(planned, count)
    if share.length != count:
        text = f"it is given a tensor of shape {list(tensor.shape)}, and in the trial run dim {dim} of that was tokens"
        raise PlanError(
            f"{text}: there are {share.length}", fix="give each row as many tokens", location=visit
        )
    return share


def _shard_of_new_tensor(tensor: torch.Tensor, mine: Sequence[TokenShard], visit: str) -> TokenShard | None:
    """Whose rows are those of a tensor that was not there in the trial run: a batch may need a mask that another does not.

    `mine` are the tokens of what the visit was given besides.
    """
    if tensor.ndim == MASK_DIMS and len({*tensor.shape[-2:]}) == 1 and tensor.shape[-1] > 1:
        rows = next((share for share in mine if share.length == tensor.shape[-1]), None)
        if rows is not None:
            return rows
    if any(share.length in tensor.shape for share in mine):
        text = f"it is given a tensor of shape {list(tensor.shape)}, which was not there in the trial run"
        raise PlanError(
            text, fix="make the plan from an example batch that has all that later ones have", location=visit
        )
    return None


def wrap_block_outputs(value: Any, output_shards: OutputShards) -> Any:
    """What a block gives out, `value`, as glue shall see it: the n-th tensor in it has the tokens `told[n]`."""
    found = {}
    for tensor, known in zip(tree_tensors(value), output_shards, strict=False):
        if known is not None and type(tensor) is not SequenceShardedTensor:
            found[id(tensor)] = make_sharded_tensor(tensor, *known)
    return replace_tensors(value, found) if found else value


def _run_on_shards(
    name: str, func: Any, args: Any, kwargs: Any, found: Sequence[SequenceShardedTensor]
) -> Any:
    """What `func` makes of tokens, each by itself; None where it does not."""
    first = found[0]
    if name == "getitem":
        view = _index_other_dims(args)
        return (
            partial_index(*args)
            if view is None and type(args[0]) is SequenceShardedTensor and not find_sharded_tensors(args[1])
            else view
        )
    if name in SUM_OPS and args and type(args[0]) is SequenceShardedTensor:
        return partial_sum(name, *args, **kwargs)
    if name in ("view", "reshape") and _has_same_shape(*args):
        return make_sharded_tensor(first.local_tensor, first.sequence_dim, first.token_shard)
    if name not in TOKENWISE_OPS or any(each.token_shard != first.token_shard for each in found):
        return None
    behind = {each.ndim - each.sequence_dim for each in found}
    if len(behind) != 1:
        return None
    (back,) = behind
    mine = {id(each): each.local_tensor for each in found}
    for tensor in tree_tensors((args, kwargs)):
        if (
            type(tensor) is not SequenceShardedTensor
            and tensor.ndim >= back
            and tensor.shape[-back] == first.token_shard.length > 1
        ):
            mine[id(tensor)] = first.token_shard.take_padded(tensor, tensor.ndim - back)
    args, kwargs = replace_tensors((args, dict(kwargs)), mine)
    made = func(*args, **kwargs)
    return (
        make_sharded_tensor(made, made.ndim - back, first.token_shard)
        if isinstance(made, torch.Tensor)
        else made
    )


def _index_other_dims(args: tuple[Any, ...]) -> Any:
    """A view that leaves the tokens alone; None for any other."""
    tensor, index = args
    if type(tensor) is not SequenceShardedTensor:
        return None
    index = index if isinstance(index, tuple) else (index,)
    if not all(each is None or each is Ellipsis or type(each) in (slice, int) for each in index):
        return None
    if Ellipsis in index:
        at, named = index.index(Ellipsis), sum(each is not None and each is not Ellipsis for each in index)
        index = (*index[:at], *[slice(None)] * (tensor.ndim - named), *index[at + 1 :])
    dim, made, along, mine = 0, 0, None, list[Any]()  # the dim that is looked at, and how many have been made
    for each in index:
        if each is not None and dim == tensor.sequence_dim:
            if type(each) is int or not _takes_all(each, tensor.token_shard.length):
                return None
            along, each = made, slice(None)
        mine.append(each)
        dim, made = dim + (each is not None), made + (type(each) is not int)
    along = made + tensor.sequence_dim - dim if along is None else along
    return make_sharded_tensor(tensor.local_tensor[tuple(mine)], along, tensor.token_shard)


def _has_same_shape(tensor: torch.Tensor, *sizes: Any) -> bool:
    """Whether `sizes` are those that the tensor has."""
    asked = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    return len(asked) == tensor.ndim and all(
        size in (-1, own) for size, own in zip(asked, tensor.shape, strict=True)
    )


def _takes_all(piece: slice, length: int) -> bool:
    return range(length)[piece] == range(length)


def _run_on_gathered(func: Any, args: Any, kwargs: Any, found: Sequence[SequenceShardedTensor]) -> Any:
    """What `func` makes of all tokens."""
    whole = {id(each): each.token_shard.gather(each.local_tensor, each.sequence_dim) for each in found}
    args, kwargs = replace_tensors((args, dict(kwargs)), whole)
    return func(*args, **kwargs)


def _call_without_override(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
