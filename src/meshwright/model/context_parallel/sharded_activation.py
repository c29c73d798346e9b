"""A tensor of which this rank holds a sequence shard, and which glue sees at full length.

Blocks run on the tokens of a rank. Between blocks the model's own forward continues, and what it asks for
there (a length, positions, a mask) must be what it would be on one device:

    hidden = model.embed(ids)               block: local tokens in, a SequenceShardedTensor out
    hidden.shape                            [2, 4096, 64], with 1024 local tokens
    positions = arange(hidden.shape[1])     all of them: sliced where a block takes them
    hidden = hidden + table(positions)      per token: a SequenceShardedTensor again
    hidden[:, 0]                            needs other ranks' tokens: all-gather, reduce-scatter in backward

recording/op_table.py lists the operations that treat each token by itself. Gradients are summands: a tensor
that all ranks hold, such as a table of positions, gets from each rank the gradient of its own tokens.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from meshwright.model.blocks.inplace_writes_in_glue import glue_write_error, written_tensor
from meshwright.model.context_parallel.partial_sum_ops import SUM_OPS, partial_index, partial_sum
from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.model.recording.op_table import find_op
from meshwright.model.tensors.placeholder import PlaceholderTensor
from meshwright.model.tensors.pytree import copy_containers, named_tensors, replace_tensors, tree_tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.sequence_info import BlockSequenceInfo

# (planned length, actual length) -> shard
GetShard = Callable[[int, int], TokenShard]
# for each tensor: its sequence dim and shard
OutputShards = Sequence[tuple[int, TokenShard] | None]
MASK_DIMS = 4  # [samples, heads, queries, keys]


class SequenceShardedTensor(torch.Tensor):
    """A tensor of full size along `sequence_dim`, of which this rank holds `local_tensor`, the tokens of
    `token_shard`.
    """

    local_tensor: torch.Tensor
    sequence_dim: int
    token_shard: TokenShard

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return (
            f"SequenceShardedTensor({list(self.shape)}, {self.token_shard.num_tokens} of "
            f"{self.token_shard.length} along dim "
            f"{self.sequence_dim})"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__.strip("_")
        if find_op(func.__name__).kind == "metadata" or func.__name__ == "__get__":
            return _call_without_override(func, args, kwargs)
        # a placeholder of another stage has no data and computes its result itself
        if PlaceholderTensor in types:
            return NotImplemented
        sharded = find_sharded_tensors((args, kwargs))
        written = written_tensor(func.__name__, args, kwargs)
        result = (
            None
            if written is not None and type(written) is not SequenceShardedTensor
            else _run_on_shards(name, func, args, kwargs, sharded)
        )
        if result is None and type(written) is SequenceShardedTensor:
            raise glue_write_error(func.__name__)
        return _run_on_gathered(func, args, kwargs, sharded) if result is None else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out `func`
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        text = (
            f"{func} takes a tensor of which each rank has some of the tokens, where the "
            f"tokens cannot be gathered"
        )
        raise PlanError(text, fix="compute it inside a block: Model(blocks=[...])", location="model")


def make_sharded_tensor(
    local_tensor: torch.Tensor, sequence_dim: int, token_shard: TokenShard
) -> torch.Tensor:
    """Returns the SequenceShardedTensor whose tokens on this rank are `local_tensor`."""
    shape = [*local_tensor.shape]
    shape[sequence_dim] = token_shard.length
    needed = local_tensor.requires_grad
    result: Any = torch.Tensor._make_wrapper_subclass(
        SequenceShardedTensor,
        shape,
        dtype=local_tensor.dtype,
        device=local_tensor.device,
        requires_grad=needed,
    )
    result.local_tensor, result.sequence_dim, result.token_shard = (
        local_tensor,
        sequence_dim % local_tensor.ndim,
        token_shard,
    )
    return result


def find_sharded_tensors(value: Any) -> list[SequenceShardedTensor]:
    """Returns the SequenceShardedTensors in `value`."""
    return [tensor for tensor in tree_tensors(value) if type(tensor) is SequenceShardedTensor]


def to_local_tensors(value: Any) -> Any:
    """Returns `value` with the local tensor in place of every SequenceShardedTensor."""
    sharded = {id(entry): entry.local_tensor for entry in find_sharded_tensors(value)}
    return replace_tensors(value, sharded) if sharded else value


def shard_block_inputs(value: Any, sequence_info: BlockSequenceInfo, get_shard: GetShard) -> Any:
    """Returns `value`, the inputs of a block call, as it runs on the tokens of this rank.

    A tensor with two token dims, such as a mask, keeps the second one in full. Raises PlanError for another
    length, and for a tensor with tokens that was no input in the trial.
    """
    inputs = zip(
        sequence_info.arg_paths, sequence_info.input_token_dims, sequence_info.input_num_tokens, strict=True
    )
    input_specs = {slot: (dims, planned_length) for slot, dims, planned_length in inputs}
    sharded, shards, unknown_tensors, shared_masks = (
        dict[int, torch.Tensor](),
        list[TokenShard](),
        list[torch.Tensor](),
        list[torch.Tensor](),
    )
    for slot, tensor in named_tensors(value):
        dims, planned_length = input_specs.get(slot, (None, 0))
        if type(tensor) is SequenceShardedTensor:  # without dims it is a mask row over all keys
            if dims:
                shards.append(
                    _shard_of_dim(
                        tensor, tensor.sequence_dim, get_shard, planned_length, sequence_info.block_call
                    )
                )
            if dims != ():
                sharded[id(tensor)] = tensor.local_tensor
            elif id(tensor) not in sharded:
                sharded[id(tensor)] = tensor.token_shard.gather(tensor.local_tensor, tensor.sequence_dim)
        elif dims is None:
            unknown_tensors.append(tensor)
        elif dims:
            shards.append(_shard_of_dim(tensor, dims[0], get_shard, planned_length, sequence_info.block_call))
            sharded[id(tensor)] = (shards[-1].take_mask if len(dims) > 1 else shards[-1].take_padded)(
                tensor, dims[0]
            )
        elif tensor.ndim > 1 and tensor.shape[-2] == 1:
            shared_masks.append(tensor)
    for shard, tensor in product(set(shards), shared_masks):
        shard.take_mask(tensor, None)
    for tensor in unknown_tensors:
        shard = _shard_of_new_tensor(tensor, shards, sequence_info.block_call)
        if shard is not None:
            sharded[id(tensor)] = shard.take_mask(tensor, 2)
    return replace_tensors(copy_containers(value), sharded) if sharded else value


def shard_block_outputs(value: Any, sequence_info: BlockSequenceInfo, get_shard: GetShard) -> Any:
    """Returns the outputs of a block call on this rank's tokens; those of a replicated call are sliced."""
    if not sequence_info.is_replicated:
        return value
    outputs = zip(
        tree_tensors(value), sequence_info.output_token_dims, sequence_info.output_num_tokens, strict=True
    )
    sharded = {
        id(entry): _shard_of_dim(
            entry, dims[0], get_shard, planned_length, sequence_info.block_call
        ).take_padded(entry, dims[0])
        for entry, dims, planned_length in outputs
        if dims
    }
    return replace_tensors(value, sharded)


def _shard_of_dim(
    tensor: torch.Tensor, dim: int, shares: GetShard, planned_length: int, block_call: str
) -> TokenShard:
    length = tensor.shape[dim] if dim < tensor.ndim else 0
    shard = shares(planned_length, length)
    if shard.length != length:
        text = (
            f"it is given a tensor of shape {list(tensor.shape)}, in the trial dim {dim} of that was tokens"
        )
        raise PlanError(
            f"{text}: there are {shard.length}", fix="give all samples the same length", location=block_call
        )
    return shard


def _shard_of_new_tensor(
    tensor: torch.Tensor, shards: Sequence[TokenShard], block_call: str
) -> TokenShard | None:
    """Returns the shard for a tensor that was absent in the trial: a batch may need a mask that another
    does not.

    `mine` are the shards of the other inputs of the block call.
    """
    if tensor.ndim == MASK_DIMS and len({*tensor.shape[-2:]}) == 1 and tensor.shape[-1] > 1:
        rows = next((shard for shard in shards if shard.length == tensor.shape[-1]), None)
        if rows is not None:
            return rows
    if any(shard.length in tensor.shape for shard in shards):
        text = f"it is given a tensor of shape {list(tensor.shape)}, which was absent in the trial"
        raise PlanError(
            text,
            fix="make the plan from an example batch with all inputs of later batches",
            location=block_call,
        )
    return None


def wrap_block_outputs(value: Any, output_shards: OutputShards) -> Any:
    """Returns the outputs of a block as glue sees them: the n-th tensor becomes a SequenceShardedTensor of
    `output_shards[n]`.
    """
    sharded = {}
    for tensor, input_specs in zip(tree_tensors(value), output_shards, strict=False):
        if input_specs is not None and type(tensor) is not SequenceShardedTensor:
            sharded[id(tensor)] = make_sharded_tensor(tensor, *input_specs)
    return replace_tensors(value, sharded) if sharded else value


def _run_on_shards(
    name: str, func: Any, args: Any, kwargs: Any, sharded: Sequence[SequenceShardedTensor]
) -> Any:
    """Returns the result of `func` on each token by itself; None if it does not treat tokens separately."""
    first = sharded[0]
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
    op = find_op(name)
    if (
        op.kind == "reduction"
        or not op.is_tokenwise
        or any(entry.token_shard != first.token_shard for entry in sharded)
    ):
        return None
    dims_from_end = {entry.ndim - entry.sequence_dim for entry in sharded}
    if len(dims_from_end) != 1:
        return None
    (dim_from_end,) = dims_from_end
    shards = {id(entry): entry.local_tensor for entry in sharded}
    for tensor in tree_tensors((args, kwargs)):
        if (
            type(tensor) is not SequenceShardedTensor
            and tensor.ndim >= dim_from_end
            and tensor.shape[-dim_from_end] == first.token_shard.length > 1
        ):
            shards[id(tensor)] = first.token_shard.take_padded(tensor, tensor.ndim - dim_from_end)
    args, kwargs = replace_tensors((args, dict(kwargs)), shards)
    result = func(*args, **kwargs)
    return (
        make_sharded_tensor(result, result.ndim - dim_from_end, first.token_shard)
        if isinstance(result, torch.Tensor)
        else result
    )


def _index_other_dims(args: tuple[Any, ...]) -> Any:
    """Returns a view that keeps all tokens; None for any other index."""
    tensor, index = args
    if type(tensor) is not SequenceShardedTensor:
        return None
    index = index if isinstance(index, tuple) else (index,)
    if not all(entry is None or entry is Ellipsis or type(entry) in (slice, int) for entry in index):
        return None
    if Ellipsis in index:
        at, named = index.index(Ellipsis), sum(entry is not None and entry is not Ellipsis for entry in index)
        index = (*index[:at], *[slice(None)] * (tensor.ndim - named), *index[at + 1 :])
    dim, result, along, shards = 0, 0, None, list[Any]()  # current input dim and output dim
    for entry in index:
        if entry is not None and dim == tensor.sequence_dim:
            if type(entry) is int or not _takes_all(entry, tensor.token_shard.length):
                return None
            along, entry = result, slice(None)
        shards.append(entry)
        dim, result = dim + (entry is not None), result + (type(entry) is not int)
    along = result + tensor.sequence_dim - dim if along is None else along
    return make_sharded_tensor(tensor.local_tensor[tuple(shards)], along, tensor.token_shard)


def _has_same_shape(tensor: torch.Tensor, *sizes: Any) -> bool:
    sizes_given = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    return len(sizes_given) == tensor.ndim and all(
        size in (-1, own) for size, own in zip(sizes_given, tensor.shape, strict=True)
    )


def _takes_all(piece: slice, length: int) -> bool:
    return range(length)[piece] == range(length)


def _run_on_gathered(func: Any, args: Any, kwargs: Any, sharded: Sequence[SequenceShardedTensor]) -> Any:
    gathered = {
        id(entry): entry.token_shard.gather(entry.local_tensor, entry.sequence_dim) for entry in sharded
    }
    args, kwargs = replace_tensors((args, dict(kwargs)), gathered)
    return func(*args, **kwargs)


def _call_without_override(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
