"""Computes attention of the newest tokens, which all ranks have, to keys and values that lie on all of them.

    rank 0    q    k0 k3 k6    out_0 lse_0
    rank 1    q    k1 k4       out_1 lse_1     all-gather, merged in rank order: equal bits on all ranks
    rank 2    q    k2 k5       out_2 lse_2

In decoding there is one query per sequence and many keys, so queries and outputs travel and keys stay. A rank
without keys has out 0 and lse -inf, which weigh nothing.

    sent per rank and call    (P - 1) B H n (e x element size + size of lse)      lse: 4 bytes, 8 in float64

B sequences, H query heads of this rank, n new tokens, e features of a value. Outputs travel as the kernel
returns them, so nothing is rounded on the way. Flash-Decoding merges splits of the keys of one device so.
"""

import torch

from meshwright.model.context_parallel.attention_call import SDPAArguments
from meshwright.parallel.context.attention_args_to_4d import to_autocast_dtype
from meshwright.parallel.context.attention_kernel import NEG_INF, accumulation_dtype, attention
from meshwright.parallel.context.output_merge.merge_outputs import merge_outputs
from meshwright.plan.strategy_interface import Runtime


def decode_attention(runtime: Runtime, axis: str, arguments: SDPAArguments) -> torch.Tensor:
    """Returns the attention of the queries, [B, H, n, d], to the keys and values of all ranks along `axis`:
    [B, H, n, e], the same on all of them.

    All ranks along the axis call it with the same queries, each with its own keys and values, [B, G, m, d]
    and [B, G, m, e], and the columns of the mask for these, [B or 1, H or 1, n or 1, m] or None. No key of
    another rank comes behind a query: `is_causal` is not read. Not recorded by autograd.
    """
    state = runtime.state
    query, key, value = (to_autocast_dtype(each) for each in arguments.tensors[:3])
    with torch.autocast(query.device.type, enabled=False):
        out, lse = attention(query, key, value, mask=arguments.attn_mask, scale=arguments.score_scale)
        message = torch.cat([each.reshape(-1).view(torch.uint8) for each in (lse, out)])
        group = state.world.group((axis,))
        gathered = message.new_empty(group.size, len(message))
        group.all_gather(gathered, message, action=state.current_action).wait()
        merged = torch.zeros_like(out, dtype=accumulation_dtype(query.dtype))
        merged_lse = torch.full_like(lse, NEG_INF)
        for received in gathered:
            # copied, because a view as numbers begins at a multiple of their size
            parts = (each.clone() for each in received.split([lse.nbytes, out.nbytes]))
            other_lse, other = (
                part.view(each.dtype).view(each.shape) for part, each in zip(parts, (lse, out), strict=True)
            )
            merge_outputs(merged, merged_lse, other, other_lse)
    return merged.to(query.dtype)
