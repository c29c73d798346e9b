"""Attention of queries that all ranks have, to keys of which each has some, is that to all keys."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from meshwright.comm.collectives.group import World
from meshwright.model.context_parallel.attention_call import SDPAArguments
from meshwright.parallel.context.attention_kernel import accumulation_dtype
from meshwright.parallel.context.output_merge.decode_attention import decode_attention
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads

SAMPLES, HEADS, GROUPS, WIDTH, VALUE_WIDTH = 3, 6, 3, 8, 5
TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_keys", [1, 11])
@pytest.mark.parametrize("masked", [False, True])
def test_merged_attention_is_that_to_all_keys(dtype: torch.dtype, num_keys: int, masked: bool):
    """Bits are equal on all ranks; with one key, two of three ranks have none."""
    drawn = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(SAMPLES, heads, tokens, width, generator=drawn, dtype=torch.float64).to(dtype)
        for heads, tokens, width in (
            (HEADS, 1, WIDTH),
            (GROUPS, num_keys, WIDTH),
            (GROUPS, num_keys, VALUE_WIDTH),
        )
    )
    padding = torch.tensor([0, 4, 9]).clamp(max=num_keys - 1).view(-1, 1, 1, 1)
    mask = torch.arange(num_keys) >= padding if masked else None
    wide = (each.double() for each in (query, key, value))
    expected = F.scaled_dot_product_attention(*wide, attn_mask=mask, scale=0.3, enable_gqa=True)

    def rank(world: World) -> tuple[torch.Tensor, float]:
        own = slice(world.rank, num_keys, 3)
        runtime: Any = SimpleNamespace(state=SimpleNamespace(world=world, current_action="GENERATE"))
        given = query, key[:, :, own], value[:, :, own], None if mask is None else mask[..., own]
        found = decode_attention(runtime, "cp", SDPAArguments(*given, scale=0.3))
        return found, world.ledger.sent_nbytes["GENERATE"]

    found = run_on_threads(rank, Mesh(cp=3))
    each = VALUE_WIDTH * dtype.itemsize + accumulation_dtype(dtype).itemsize
    for merged, nbytes in found:
        assert merged.dtype == dtype
        assert torch.equal(merged, found[0][0])
        torch.testing.assert_close(merged.double(), expected, rtol=0, atol=TOLERANCES[dtype])
        assert nbytes == 2 * SAMPLES * HEADS * each
