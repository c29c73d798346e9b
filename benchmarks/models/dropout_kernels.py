"""Kernels that a GPU runs for one dropout mask, counted on fake CUDA tensors: at most two.

    one device     the operator of the mask; zeros for the one sample of a draw that all samples share
    a slice        the same where the rank's elements are one range, as under tensor parallelism

Every operator that computes is counted as one kernel, views and allocations are not: with Triton the operator
of a mask is one kernel (model/rng/triton_draws.py). The detail has what the same masks take without Triton
(eager arithmetic in chunks of 4 M elements), and what they took before: 27 kernels for each 65,536 elements.
"""

import sys
from collections.abc import Mapping
from math import ceil
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness.result import Result
from meshwright.model.rng import draw_ops
from meshwright.model.rng.stateless_rng import DrawSites, SampleLayout, StatelessRNG

NAME = "dropout_kernels"
CLAIM = "a dropout mask of all samples takes at most two kernels on a GPU, with the bits of a CPU"
BAR = 2
BEFORE, BEFORE_CHUNK = 27, 1 << 16
NO_KERNEL = ("view", "expand", "transpose", "unsqueeze", "slice", "select", "empty", "new_empty", "detach")
MASKS: Mapping[str, tuple[SampleLayout, int, tuple[int, ...]]] = {
    "residual stream": ("dim0", 8, (8, 1024, 768)),
    "attention of GPT-2, batch 8": ("dim0", 8, (8, 12, 1024, 1024)),
    "sequence first": ("dim1", 8, (1024, 8, 768)),
    "flattened tokens": ("flattened", 8, (8 * 1024, 768)),
    "relative positions": ("shared", 8, (12, 1024, 1024)),
    "one sample of 32,768 tokens": ("dim0", 1, (1, 32768, 4096)),
    "256 samples of one number": ("dim0", 256, (256, 1, 1)),
}


class OpCounter(TorchDispatchMode):
    """While active (`with`), counts the operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.num_kernels = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        self.num_kernels += not (name in NO_KERNEL or func.namespace == "prim")
        return func(*args, **kwargs or {})


def mask_kernels(layout: SampleLayout, batch: int, shape: tuple[int, ...]) -> int:
    """Returns the kernels of the second mask of a forward: before the first, sample ids are copied."""
    rng = StatelessRNG(0, DrawSites({f"/{site}": (layout,) for site in range(2)}))
    with FakeTensorMode():
        device = torch.device("cuda", 0)
        rng.begin_forward(1, torch.zeros(batch, dtype=torch.int64, device=device))
        rng.keep_mask(shape, 0.1, device)
        with OpCounter() as counter:
            rng.keep_mask(shape, 0.1, device)
    return counter.num_kernels


def eager_kernels(batch: int, shape: tuple[int, ...]) -> int:
    """Returns the kernels of the same mask on a GPU without Triton."""
    numel, samples = torch.Size(shape).numel(), torch.zeros(batch, dtype=torch.int64, device="meta")
    with OpCounter() as counter:
        draw_ops.fill_eagerly(
            torch.empty((batch, numel // batch), dtype=torch.bool, device="meta"),
            samples,
            0,
            0,
            None,
            lambda bits: bits.bitwise_xor_(draw_ops.SIGN_BIT) >= 0,
        )
    return counter.num_kernels


def result() -> Result:
    """Returns the result of all masks: how many take at most two kernels."""
    rows = {}
    for name, (layout, batch, shape) in MASKS.items():
        numel = torch.Size(shape).numel()
        rows[name] = {
            "shape": list(shape),
            "kernels": mask_kernels(layout, batch, shape),
            "without triton": eager_kernels(1 if layout == "shared" else batch, shape),
            "before": BEFORE * ceil(numel / BEFORE_CHUNK),
        }
        print(f"{name}: {rows[name]}", file=sys.stderr)
    values = [float(str(row["kernels"])) for row in rows.values()]
    return Result.of_count(NAME, CLAIM, values, limit=BAR, bar=len(values), detail={"masks": rows})


def main() -> None:
    """Count, and write the result."""
    print(result().write(NAME))


if __name__ == "__main__":
    main()
