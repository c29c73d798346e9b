"""Ternary gradients: elements travel as -1, 0 or 1, in two bits, with one float32 scale per block of 256.

Why it works: the scale is the largest magnitude of the block; what is below half of it waits in the residual
until it has grown. The largest element loses nothing, so each sum takes some of what is owed: it contracts.

    scale = max |x|      code = round(x / scale) + 1: 0, 1 or 2      x ~ scale (code - 1)
    |x - decoded|^2 <= |x|^2 - scale^2                               over a block

    codes of m elements: [ceil(m / 256) scales, float32][ceil(m / 4) bytes]
    c(m) = ceil(m / 4) + 4 ceil(m / 256): 0.2656 m

Cost: 0.066 of the bytes of float32; a residual of 4 bytes per element.
Limits: insists on error feedback: without, small elements would never be applied.
Paper: Lim et al. 2019, "3LC: Lightweight and Effective Traffic Compression for Distributed Machine Learning",
arXiv 1802.07389; Wen et al. 2017, "TernGrad", arXiv 1705.07878.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from meshwright.parallel.compression.codecs.block_codes import (
    BLOCK,
    SCALE_NBYTES,
    BlockCodec,
    in_blocks,
    join_scales,
    num_blocks,
    split_scales,
)
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.sharding_plan import ShardingPlan

PER_BYTE = 4  # codes of two bits


@dataclass(frozen=True)
class TernaryCompression(BlockCodec):
    """Sums gradients as -1, 0 or 1 times the largest magnitude of each block."""

    mode: ClassVar[str] = "ternary"

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from super().check(job, sharding)
        if not self.error_feedback:
            text = "error_feedback = False with three values: small elements would never be applied"
            yield Diagnostic(text, "remove it", f"strategies.{self.name}.error_feedback")

    def code_nbytes(self, numel: int) -> int:
        return -(-numel // PER_BYTE) + SCALE_NBYTES * num_blocks(numel)

    def encode(self, values: torch.Tensor, draws: torch.Tensor | None) -> torch.Tensor:
        blocks = in_blocks(values, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True).float()
        steps = (blocks / scales).nan_to_num_(0.0).round_().clamp_(-1, 1).add_(1).to(torch.uint8)
        packed = (steps.view(-1, PER_BYTE) << _shifts(steps.device)).sum(1, dtype=torch.uint8)
        return join_scales(scales, packed[: -(-len(values) // PER_BYTE)])

    def decode(self, codes: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        scales, packed = split_scales(codes, numel)
        steps = (packed.unsqueeze(1) >> _shifts(packed.device) & 3).view(-1)[:numel].to(dtype).sub_(1)
        return (in_blocks(steps, BLOCK) * scales.to(dtype)).view(-1)[:numel]


def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(0, 8, 8 // PER_BYTE, dtype=torch.uint8, device=device)
