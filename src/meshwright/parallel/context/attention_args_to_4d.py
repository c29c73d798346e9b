"""Brings the arguments of one attention call to four dims; checks that they belong to tokens of this rank."""

from dataclasses import dataclass

import torch

from meshwright.model.context_parallel.attention_call import ShardedAttentionCall
from meshwright.model.rng.sharded_draws import DrawRegion
from meshwright.model.rng.stateless_dropout import keep_mask as thinned
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.sequence_sharding import TokenRange


@dataclass(frozen=True)
class AttentionInputs:
    """query [B, H, n, d], key [B, G, m, d], value [B, G, m, e] and mask of one attention call; the mask may
    be None.

    The mask is [B or 1, H or 1, n or 1, all keys]. `output_shape` is the shape of the output in the dims of
    the call. Attention weights are dropped with probability `dropout_p`. `gathered_mask` and `bias` are those
    of the call, in the dims of the mask.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    output_shape: tuple[int, ...]
    dropout_p: float = 0.0
    gathered_mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def restore_shape(self, out: torch.Tensor) -> torch.Tensor:
        """Returns `out`, [B, H, n, e], in the dims of the call."""
        return out.reshape(self.output_shape)


def attention_inputs(call: ShardedAttentionCall, name: str) -> AttentionInputs:
    """Returns the inputs of `call` in four dims, for the strategy `name`.

    Raises:
        PlanError: queries, keys or the mask are not those of this rank's tokens.
    """
    location = f"strategies.{name}"
    query, key, value = (to_autocast_dtype(each) for each in (call.query, call.key, call.value))
    mask = None if call.mask is None else to_autocast_dtype(call.mask)
    for what, tensor, share in (
        ("queries", query, call.query_shard),
        ("keys", key, call.key_shard),
        ("values", value, call.key_shard),
    ):
        if tensor.shape[-2] != share.num_tokens:
            text = (
                f"attention gets {tensor.shape[-2]} {what}, and this rank has {share.num_tokens} of "
                f"{share.length} tokens"
            )
            raise PlanError(
                text, fix="attend to the tokens of the sample alone, or set mesh.cp = 1", location=location
            )
    if mask is not None:
        keys = call.key_shard.length
        if (
            call.is_causal
            or mask.shape[-1] not in (keys, 1)
            or mask.shape[-2] not in (call.query_shard.num_tokens, 1)
        ):
            text = (
                f"the mask is of shape {list(mask.shape)}; needed are rows for "
                f"{call.query_shard.num_tokens} queries of this rank"
            )
            fix = (
                "give the block a mask of shape [samples, heads, tokens, tokens], made outside of it; and "
                "is_causal = False"
            )
            raise PlanError(f"{text}, and columns for all {keys} keys", fix=fix, location=location)
    mask, together, bias = (
        _mask_to_4d(each, query, call.key_shard.length) for each in (mask, call.group_mask_rows, call.bias)
    )
    shape = (*query.shape[:-1], value.shape[-1])
    return AttentionInputs(
        _to_4d(query), _to_4d(key), _to_4d(value), mask, shape, call.dropout_p, together, bias
    )


def dropout_keep_mask(
    call: ShardedAttentionCall, query_spans: tuple[TokenRange, ...], heads: TokenRange | None = None
) -> torch.Tensor | None:
    """Returns the attention weights that dropout keeps for the queries in `query_spans`, bool [B, H, n, all
    keys]; None without dropout.

    It equals the draw of one device. `heads` is the range of query heads on this rank, if it has only some.
    """
    if not call.dropout_p:
        return None
    before = call.query.shape[:-2]
    part = DrawRegion(
        (*before, call.query_shard.length, call.key_shard.length),
        (*(((-3, (heads,)),) if heads else ()), (-2, query_spans)),
    )
    return _to_4d(thinned(call.query, part, call.dropout_p))


def _mask_to_4d(mask: torch.Tensor | None, query: torch.Tensor, keys: int) -> torch.Tensor | None:
    if mask is None:
        return None
    before = mask.shape[:-2] if query.ndim <= 4 else query.shape[:-2]
    mask = mask.expand(*before, mask.shape[-2], keys)
    return mask.reshape(*[1] * (4 - mask.ndim), *mask.shape) if mask.ndim <= 4 else mask.flatten(0, -4)


def _to_4d(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim < 4:
        return tensor.reshape(*[1] * (4 - tensor.ndim), *tensor.shape)
    return tensor if tensor.ndim == 4 else tensor.flatten(0, -4)


def to_autocast_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor` in the dtype that torch's attention takes under autocast."""
    kind = tensor.device.type
    casts = tensor.is_floating_point() and torch.is_autocast_enabled(kind)
    return tensor.to(torch.get_autocast_dtype(kind)) if casts else tensor
