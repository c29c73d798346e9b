"""GPU attention kernels equal the formula: output, mergeable log-sum-exp, and gradients given the log-sum-exp
of all blocks.
"""

import pytest
import torch

from meshwright.parallel.context.attention_kernel import (
    _choose_kernel,
    attention,
    attention_backward,
)
from meshwright.parallel.context.output_merge.merge_outputs import merge_outputs
from tests.parallel.context.dense_attention import gap, mask_of, sample, with_gradients

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: its kernels run on no other device"
)

SCALE, LENGTH = 0.6, 45


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["none", "causal", "window", "padding", "bias"])
def test_blocks_and_their_gradients_add_up_to_the_formula(dtype: torch.dtype, name: str) -> None:
    given = [each.to("cuda", dtype) for each in sample(LENGTH)]
    query, key, value, grad = given
    mask, causal = mask_of(name, LENGTH), name == "causal"
    mask = None if mask is None else mask.cuda()
    assert _choose_kernel(query, value, mask) in (
        ("cudnn", "flash") if mask is None and dtype != torch.float32 else ("efficient",)
    )
    blocks = [(0, LENGTH)] if causal else [(0, 7), (7, 32), (32, LENGTH)]
    out, lse = (
        grad.new_zeros(grad.shape, dtype=torch.float32),
        grad.new_full(grad.shape[:3], float("-inf"), dtype=torch.float32),
    )
    said = [
        {"mask": None if mask is None else mask[..., a:b], "causal": causal, "scale": SCALE}
        for a, b in blocks
    ]
    parts = [(key[:, :, a:b], value[:, :, a:b]) for a, b in blocks]
    for part, how in zip(parts, said, strict=True):
        out, lse = merge_outputs(out, lse, *attention(query, *part, **how))
    shares = [
        attention_backward(grad, query, *part, out.to(dtype), lse, **how)
        for part, how in zip(parts, said, strict=True)
    ]
    found = [out, torch.stack([share[0] for share in shares]).sum(0)]
    found += [torch.cat([share[at] for share in shares], 2) for at in (1, 2)]
    host = [each.cpu().double() for each in given]
    true = with_gradients(host, None if mask is None else mask.cpu(), causal=causal, scale=SCALE)[:4]
    for mine, right in zip(found, true, strict=True):
        assert right is not None
        assert gap(mine.cpu().double(), right) < (
            1e-3 if dtype == torch.float32 else 64 * torch.finfo(dtype).eps
        )
