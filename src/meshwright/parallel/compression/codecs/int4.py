"""Int4: each gradient element travels as four bits, two to a byte, with a float32 scale per block of 256.

Why it works: as int8 does it, with 15 steps in place of 255. One step is a seventh of the largest element of
the block, so most of a gradient is lost at once; the residual sends it later. With stochastic rounding each
code is right in the mean.

    scale = max |x| / 7          code = round(x / scale) + 8 in 1 .. 15      x ~ (code - 8) * scale
    |x - decoded| <= scale / 2 (nearest), < scale (stochastic, E = 0)

    codes of m elements: [ceil(m / 256) scales, float32][ceil(m / 2) bytes]
    c(m) = ceil(m / 2) + 4 ceil(m / 256): 0.5156 m

Cost: 0.5156 / 4 of the bytes of float32; a residual of 4 bytes per element (gradient_compression.py).
Limits: needs error feedback, or stochastic rounding. A block with one huge element codes its others as 0.
What is not finite makes its block not finite, so that the loss guard sees it.
Paper: Xie et al. 2024, "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", arXiv
2407.04480; Alistarh et al. 2017, "QSGD", arXiv 1610.02132.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from meshwright.parallel.compression.codecs.block_codes import (
    BLOCK,
    SCALE_NBYTES,
    RoundedCodec,
    in_blocks,
    join_scales,
    num_blocks,
    split_scales,
)

LARGEST_CODE, OFFSET = 7, 8


@dataclass(frozen=True)
class Int4Compression(RoundedCodec):
    """Sums gradients as codes of four bits; `rounding` to the nearest one, or "stochastic": unbiased."""

    mode: ClassVar[str] = "int4"

    def code_nbytes(self, numel: int) -> int:
        return -(-numel // 2) + SCALE_NBYTES * num_blocks(numel)

    def encode(self, values: torch.Tensor, draws: torch.Tensor | None) -> torch.Tensor:
        blocks = in_blocks(values, BLOCK)
        scales = (blocks.abs().amax(1, keepdim=True) / LARGEST_CODE).float()
        steps = self.rounded(blocks / scales, LARGEST_CODE, draws).add_(OFFSET)
        pairs = steps.to(torch.uint8).view(-1, 2)
        packed = pairs[:, 0] | pairs[:, 1] << 4
        return join_scales(scales, packed[: -(-len(values) // 2)])

    def decode(self, codes: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        scales, packed = split_scales(codes, numel)
        steps = torch.stack((packed & 15, packed >> 4), 1).view(-1)[:numel].to(dtype).sub_(OFFSET)
        return (in_blocks(steps, BLOCK) * scales.to(dtype)).view(-1)[:numel]
