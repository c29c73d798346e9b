"""Ring attention and Ulysses beside the public packages that published them: the same tokens, the same
gradients, on CPU ranks.

    ring-attention-pytorch 0.5.20   a ring in plain torch: what comes out, and the gradient of queries. Those
                                    of keys and values
                                    are not right on more than one rank: `ring_pass` gives two tensors,
                                        the second of them sent
                                    and not received, which its backward takes for the two gradients. They
                                        are shown
    yunchang 0.6.4, ring            the loop of picotron, whose kernels are for CUDA, and none for backwards:
                                    torch's for CPU
                                    stand in, and its five gradients for six inputs are put in order
    yunchang 0.6.4, Ulysses         torch's attention stands in for its local one; heads of keys have to
                                    divide

They deal tokens in contiguous slices of one length, causally or without a mask. ring-flash-attn 0.1.8 cannot
serve: all that it has imports `flash_attn`, which needs CUDA; so do yunchang's zigzag rings. Ours are held
against the formula besides: the figure is how many cases agree with the packages within 16 roundings of
float32.

    python -m benchmarks.context_parallel.context_published    a minute, and once the packages' own environment in
                                               benchmarks/scratch
"""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the field's name

from benchmarks.context_parallel.attention_call import Call, Seat, Sizes, Tensors, dense
from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import ROOT, Result
from benchmarks.models.llama_steps import fresh_store, join
from meshwright.comm.world import TorchWorld
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy import Strategy

NAME = "context_published"
CLAIM = (
    "ring attention and Ulysses give what the public packages give, outputs and gradients, on 2, 3 and 4 "
    "ranks"
)
PACKAGES = ("ring-attention-pytorch==0.5.20", "yunchang==0.6.4")
ROUNDINGS = 16 * 2.0**-23
PARTS = ("output", "query", "key", "value")
aten: Any = torch.ops.aten
Theirs = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor
]  # of [B, n, heads, width], and causal or not


@dataclass(frozen=True)
class Package:
    """One of the packages: what of ours it is beside, the parts in which it is an oracle, and with how many
    heads of keys.
    """

    ours: Strategy
    parts: tuple[str, ...] = PARTS
    grouped: bool = True


OF: Mapping[str, Package] = {
    "ring-attention-pytorch": Package(
        RingAttention(load_balance="contiguous"), ("output", "query"), grouped=False
    ),
    "yunchang, ring": Package(RingAttention(load_balance="contiguous")),
    "yunchang, Ulysses": Package(Ulysses()),
}


def plain_ring() -> Theirs:
    """The ring of ring-attention-pytorch."""
    given = import_module("ring_attention_pytorch").ring_flash_attn
    return lambda q, k, v, causal: given(q, k, v, causal=causal, ring_reduce_col=True, bucket_size=q.shape[1])


def looped_ring() -> Theirs:
    """The ring of yunchang over torch's kernel for CPU."""
    theirs: Any = import_module("yunchang.ring.ring_pytorch_attn")
    theirs.pytorch_attn_forward, theirs.pytorch_attn_backward = _forward, _backward

    class InOrder(torch.autograd.Function):
        forward = theirs.RingAttentionFunc.forward

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
            return (None, *theirs.RingAttentionFunc.backward(ctx, *grads)[:3], None, None)

    return lambda q, k, v, causal: InOrder.apply(dist.group.WORLD, q, k, v, None, causal)


def exchanged() -> Theirs:
    """The Ulysses of yunchang round torch's attention."""
    kinds = import_module("yunchang.kernels").AttnType
    layer = import_module("yunchang.ulysses").UlyssesAttention(dist.group.WORLD, attn_type=kinds.TORCH_MATH)
    layer.attn_fn = _attention
    return lambda q, k, v, causal: layer(q, k, v, causal=causal)


MADE: Mapping[str, Callable[[], Theirs]] = {
    "ring-attention-pytorch": plain_ring,
    "yunchang, ring": looped_ring,
    "yunchang, Ulysses": exchanged,
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
    given = (each.transpose(1, 2) for each in (q, k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, causal, scale=softmax_scale)
    return out.transpose(1, 2), lse


def _backward(*given: Any, softmax_lse: Any, softmax_scale: float, causal: bool) -> Any:
    turned = (each.transpose(1, 2) for each in given)
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = op(*turned, softmax_lse.transpose(1, 2).contiguous(), 0.0, causal, scale=softmax_scale)
    return tuple(each.transpose(1, 2) for each in found)


def compared(rank: int, size: int, store: str) -> Callable[[], object]:
    """A step that tells, of each case, how far this rank's part of theirs is from ours, and both are from the
    formula.
    """
    join(rank, size, store)
    torch.set_num_threads(1)
    world = TorchWorld(Mesh(cp=size), rank, "cpu", shared_memory=False)
    made = {name: make() for name, make in MADE.items()}

    def step() -> dict[str, dict[str, dict[str, float]]]:
        rows = {}
        for name, package in OF.items():
            for mask in ("none", "causal"):
                for groups in (12, 3 if size == 3 else 4)[: 1 + package.grouped]:
                    call = Sizes(groups=groups, tokens=8 * size, width=8, values=8).call(mask, torch.float32)
                    seat = Seat(world, package.ours, call)
                    ours, theirs, right = (
                        seat.play(),
                        played(made[name], seat, call.causal),
                        formula(seat, call),
                    )
                    pairs = {
                        "theirs to ours": (theirs, ours),
                        "ours": (ours, right),
                        "theirs": (theirs, right),
                    }
                    rows[f"{name}, {size} ranks, {mask}, 12 heads, {groups} of keys"] = {
                        what: {part: _gap(*both) for part, *both in zip(PARTS, *pair, strict=True)}
                        for what, pair in pairs.items()
                    }
        return rows

    return step


def played(theirs: Theirs, seat: Seat, causal: bool) -> Tensors:
    """What `theirs` makes of the tokens of `seat`: as it plays itself."""
    leaves = [each.transpose(1, 2).contiguous().requires_grad_() for each in seat.leaves]
    out = theirs(leaves[0], leaves[1], leaves[2], causal)
    found = torch.autograd.grad(out, leaves, seat.grad.transpose(1, 2).contiguous())
    return tuple(each.detach().transpose(1, 2) for each in (out, *found))


def formula(seat: Seat, call: Call) -> Tensors:
    """What is right for the tokens of `seat`, in float64."""
    wide = {name: getattr(call, name).double() for name in ("query", "key", "value", "grad")}
    return tuple(seat.mine(each) for each in dense(replace(call, **wide)))


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    gap = float((one - other).abs().max() / other.abs().max())
    return gap if isfinite(gap) else float("inf")


def result(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Result:
    """The result: in how many cases the packages agree with ours, in the parts in which they are oracles."""
    values = []
    for case, row in found.items():
        parts = next(package.parts for name, package in OF.items() if case.startswith(name))
        values.append(max(*(row["theirs to ours"][part] for part in parts), *row["ours"].values()))
    detail = {"packages": PACKAGES, "cases": found}
    return Result.of_count(NAME, CLAIM, values, limit=ROUNDINGS, bar=len(values), detail=detail)


def environment() -> str:
    """The Python of the environment with the packages, made if it is not there."""
    folder = ROOT / "benchmarks" / "scratch" / "published"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        packages = Path(subprocess.check_output(ask, text=True).strip())
        (packages / "meshwright.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT / 'src'}\n")
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
        (folder / "ready").touch()
    return str(python)


def main() -> None:
    """Compare, and write the result."""
    if find_spec("yunchang") is None:
        sys.exit(
            subprocess.run(
                [environment(), "-m", f"benchmarks.context_parallel.{NAME}"], cwd=ROOT, check=False
            ).returncode
        )
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, dict[str, dict[str, float]]] = {}
    for size in (2, 3, 4):
        with Ranks(
            "compared", compared, size, preload=("torch", "meshwright.api"), store=fresh_store()
        ) as ranks:
            (first, *others) = [note for note in ranks.step().notes if isinstance(note, dict)]
            for case, row in first.items():
                found[case] = {
                    what: {
                        part: max(gap, *(other[case][what][part] for other in others))
                        for part, gap in parts.items()
                    }
                    for what, parts in row.items()
                }
                print(case, found[case], file=sys.stderr, flush=True)
    print(result(found).write(NAME))


if __name__ == "__main__":
    main()
