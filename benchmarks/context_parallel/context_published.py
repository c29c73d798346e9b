"""Ring attention and Ulysses against public packages: the same tokens, outputs and gradients, on CPU ranks.

    ring-attention-pytorch 0.5.20   a ring in plain torch: its output, and the gradient of queries. Those of
                                    keys and values are wrong on more than one rank: `ring_pass` returns two
                                    tensors, the second of them sent and not received, which its backward
                                    takes for the two gradients. They are shown only
    yunchang 0.6.4, ring            the loop of picotron, whose kernels are for CUDA, with none for backward:
                                    torch's CPU kernels stand in, and its five gradients for six inputs are
                                    put in order
    yunchang 0.6.4, Ulysses         torch's attention stands in for its local one; the ranks must divide the
                                    key heads

The packages shard tokens in contiguous slices of one length, causally or without a mask. ring-flash-attn
0.1.8 cannot be used: all of it imports `flash_attn`, which needs CUDA; so do yunchang's zigzag rings. Ours
are compared with the formula as well. The figure is the number of cases that agree with the packages within
16 roundings of float32.

    python -m benchmarks.context_parallel.context_published    a minute, and once the environment of the
                                                               packages in build/peers
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the field's name

from benchmarks.context_parallel.attention_call import (
    AttentionRank,
    Call,
    Sizes,
    Tensors,
    reference_attention,
)
from benchmarks.harness.peer_environment import ensure_packages
from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import Result
from benchmarks.models.llama_steps import fresh_store, join
from meshwright.comm.world import TorchWorld
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

NAME = "context_published"
CLAIM = (
    "ring attention and Ulysses agree with the public packages, in outputs and gradients, on 2, 3 and 4 ranks"
)
PACKAGES = ("ring-attention-pytorch==0.5.20", "yunchang==0.6.4")
ROUNDINGS = 16 * 2.0**-23
TENSORS = ("output", "query", "key", "value")
aten: Any = torch.ops.aten
PackageAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor
]  # q, k, v [B, n, heads, width], causal


@dataclass(frozen=True)
class Package:
    """A package: our strategy that it is compared with, the tensors for which it is an oracle, and whether it
    supports grouped queries.
    """

    ours: Strategy
    tensors: tuple[str, ...] = TENSORS
    grouped: bool = True


ORACLES: Mapping[str, Package] = {
    "ring-attention-pytorch": Package(
        RingAttention(load_balance="contiguous"), ("output", "query"), grouped=False
    ),
    "yunchang, ring": Package(RingAttention(load_balance="contiguous")),
    "yunchang, Ulysses": Package(Ulysses()),
}


def ring_attention_pytorch() -> PackageAttention:
    """Returns the ring of ring-attention-pytorch."""
    ring_flash_attn = import_module("ring_attention_pytorch").ring_flash_attn
    return lambda q, k, v, causal: ring_flash_attn(
        q, k, v, causal=causal, ring_reduce_col=True, bucket_size=q.shape[1]
    )


def yunchang_ring() -> PackageAttention:
    """Returns the ring of yunchang with torch's CPU kernel."""
    module: Any = import_module("yunchang.ring.ring_pytorch_attn")
    module.pytorch_attn_forward, module.pytorch_attn_backward = _forward, _backward

    class OrderedGradients(torch.autograd.Function):
        forward = module.RingAttentionFunc.forward

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
            return (None, *module.RingAttentionFunc.backward(ctx, *grads)[:3], None, None)

    return lambda q, k, v, causal: OrderedGradients.apply(dist.group.WORLD, q, k, v, None, causal)


def yunchang_ulysses() -> PackageAttention:
    """Returns the Ulysses of yunchang with torch's attention."""
    kinds = import_module("yunchang.kernels").AttnType
    layer = import_module("yunchang.ulysses").UlyssesAttention(dist.group.WORLD, attn_type=kinds.TORCH_MATH)
    layer.attn_fn = _attention
    return lambda q, k, v, causal: layer(q, k, v, causal=causal)


PACKAGE_ATTENTION: Mapping[str, Callable[[], PackageAttention]] = {
    "ring-attention-pytorch": ring_attention_pytorch,
    "yunchang, ring": yunchang_ring,
    "yunchang, Ulysses": yunchang_ulysses,
}


def _attention(
    q: Any, k: Any, v: Any, *_: Any, causal: bool = False, softmax_scale: float = 1.0, **__: Any
) -> torch.Tensor:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=grouped
    ).transpose(1, 2)


def _forward(q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool) -> Any:
    inputs = (each.transpose(1, 2) for each in (q, k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, causal, scale=softmax_scale)
    return out.transpose(1, 2), lse


def _backward(*inputs: Any, softmax_lse: Any, softmax_scale: float, causal: bool) -> Any:
    transposed = (each.transpose(1, 2) for each in inputs)
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = op(*transposed, softmax_lse.transpose(1, 2).contiguous(), 0.0, causal, scale=softmax_scale)
    return tuple(each.transpose(1, 2) for each in found)


def compare(rank: int, size: int, store: str) -> Callable[[], object]:
    """Returns a step whose note has, for each case, this rank's errors: package to ours, and both to the
    formula.
    """
    join(rank, size, store)
    torch.set_num_threads(1)
    world = TorchWorld(Mesh(cp=size), rank, "cpu", shared_memory=False)
    made = {name: make() for name, make in PACKAGE_ATTENTION.items()}

    def step() -> dict[str, dict[str, dict[str, float]]]:
        rows = {}
        for name, package in ORACLES.items():
            for mask in ("none", "causal"):
                for groups in (12, 3 if size == 3 else 4)[: 1 + package.grouped]:
                    call = Sizes(groups=groups, tokens=8 * size, width=8, values=8).call(mask, torch.float32)
                    rank_attention = AttentionRank(world, package.ours, call)
                    ours, package_tensors, expected = (
                        rank_attention.run_step(),
                        run_package(made[name], rank_attention, call.causal),
                        formula(rank_attention, call),
                    )
                    pairs = {
                        "package to ours": (package_tensors, ours),
                        "ours": (ours, expected),
                        "package": (package_tensors, expected),
                    }
                    rows[f"{name}, {size} ranks, {mask}, 12 heads, {groups} key heads"] = {
                        what: {
                            part: _relative_error(*both) for part, *both in zip(TENSORS, *pair, strict=True)
                        }
                        for what, pair in pairs.items()
                    }
        return rows

    return step


def run_package(attention: PackageAttention, rank_attention: AttentionRank, causal: bool) -> Tensors:
    """Runs `attention` of a package on the tokens of `rank_attention`; returns what its `run_step` does."""
    leaves = [each.transpose(1, 2).contiguous().requires_grad_() for each in rank_attention.leaves]
    out = attention(leaves[0], leaves[1], leaves[2], causal)
    found = torch.autograd.grad(out, leaves, rank_attention.grad.transpose(1, 2).contiguous())
    return tuple(each.detach().transpose(1, 2) for each in (out, *found))


def formula(rank_attention: AttentionRank, call: Call) -> Tensors:
    """Returns the expected tensors for the tokens of `rank_attention`, in float64."""
    wide = {name: getattr(call, name).double() for name in ("query", "key", "value", "grad")}
    return tuple(rank_attention.take_local(each) for each in reference_attention(replace(call, **wide)))


def _relative_error(one: torch.Tensor, other: torch.Tensor) -> float:
    error = float((one - other).abs().max() / other.abs().max())
    return error if isfinite(error) else float("inf")


def result(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Result:
    """Returns the result: the number of cases in which the packages agree with ours, where
    they are oracles.
    """
    values = []
    for case, row in found.items():
        tensors = next(package.tensors for name, package in ORACLES.items() if case.startswith(name))
        values.append(max(*(row["package to ours"][part] for part in tensors), *row["ours"].values()))
    detail = {"packages": PACKAGES, "cases": found}
    return Result.of_count(NAME, CLAIM, values, limit=ROUNDINGS, bar=len(values), detail=detail)


def main() -> None:
    """Compares, and writes the result."""
    ensure_packages(f"benchmarks.context_parallel.{NAME}", "yunchang", PACKAGES)
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, dict[str, dict[str, float]]] = {}
    for size in (2, 3, 4):
        with Ranks(
            "compare", compare, size, preload=("torch", "meshwright.api"), store=fresh_store()
        ) as ranks:
            (first, *others) = [note for note in ranks.step().notes if isinstance(note, dict)]
            for case, row in first.items():
                found[case] = {
                    what: {
                        part: max(error, *(other[case][what][part] for other in others))
                        for part, error in parts.items()
                    }
                    for what, parts in row.items()
                }
                print(case, found[case], file=sys.stderr, flush=True)
    print(result(found).write(NAME))


if __name__ == "__main__":
    main()
