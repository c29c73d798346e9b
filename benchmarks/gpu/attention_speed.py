"""Attention kernels, forward and backward: those that torch can choose, and ours with its merge.

A ring of n ranks calls the kernel of one block n times a layer, and merges n - 1 times: what share of a block
the merge takes is what it costs.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.setting import Setting, seconds_of
from meshwright.parallel.context.attention_kernel import attention, attention_backward
from meshwright.parallel.context.output_merge.merge_outputs import merge_outputs

SHAPE, TINY_SHAPE, KV_HEADS = (1, 32, 8192, 128), (1, 4, 32, 16), 4  # B, H, n, d; H / KV_HEADS heads of keys
BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


def attention_kernels(setting: Setting) -> dict[str, object]:
    """Returns the seconds of each kernel, causal and full; where torch refuses one, its words."""
    batch, heads, length, width = setting.size(SHAPE, TINY_SHAPE)
    shapes = [(batch, heads, length, width), *[(batch, heads // KV_HEADS, length, width)] * 2]
    query, key, value = (
        torch.randn(shape, device=setting.device, dtype=torch.bfloat16, requires_grad=True)
        for shape in shapes
    )
    rows: dict[str, object] = {}
    for causal in (True, False):
        word = "causal" if causal else "full"
        flops = 4 * batch * heads * length * length * width / (2 if causal else 1)
        for backend in BACKENDS[:-1] if not setting.tiny else BACKENDS:
            call = _sdpa(query, key, value, backend, causal=causal)
            rows[f"{backend.name.lower()}, {word}"] = _timed(call, flops, setting)
        call = _ours(query.detach(), key.detach(), value.detach(), causal=causal)
        rows[f"meshwright, {word}"] = _timed(call, flops, setting)
        setting.keep({"kernels": rows})
    rows["merge of two blocks"] = _merge(query.detach(), setting)
    ours = ("meshwright, causal", "meshwright, full", "merge of two blocks")
    return {"ok": all(isinstance(rows[name], dict) for name in ours), "kernels": rows}


Calls = tuple[Callable[[], object], Callable[[], object]]  # forward alone; forward and backward


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, backend: SDPBackend, *, causal: bool
) -> Calls:
    # repeated heads, because the memory-efficient kernel has no grouped ones
    key, value = (each.repeat_interleave(KV_HEADS, 1) for each in (key, value))

    def forward() -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    return forward, lambda: torch.autograd.grad(forward().sum(), (query, key, value))


def _ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool) -> Calls:
    scale = query.shape[-1] ** -0.5

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return attention(query, key, value, causal=causal, scale=scale)

    def both() -> object:
        out, lse = forward()
        return attention_backward(out, query, key, value, out, lse, causal=causal, scale=scale)

    return forward, both


def _timed(calls: Calls, flops: float, setting: Setting) -> dict[str, float] | str:
    repeats = setting.size(10, 1)
    try:
        forward, both = (seconds_of(call, setting.device, repeats) for call in calls)
    except RuntimeError as error:
        return str(error).partition("\n")[0][:200]
    # a backward has 2.5 times the products of a forward
    return {"forward_s": forward, "both_s": both, "both_tflops": 3.5 * flops / both / 1e12}


def _merge(query: torch.Tensor, setting: Setting) -> dict[str, float] | str:
    out, lse = query.float(), torch.zeros(query.shape[:3], device=query.device)
    return {"s": seconds_of(lambda: merge_outputs(out, lse, query, lse), setting.device, setting.size(20, 1))}
