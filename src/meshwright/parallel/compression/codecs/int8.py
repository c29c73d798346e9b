"""Int8: each gradient element travels as one byte, with a float32 scale per block of 256.

Why it works: gradients of one block are of one magnitude, so 255 steps between its largest element and the
opposite of it lose little: at most half a step (nearest), or one step that is right in the mean (stochastic).

    scale = max |x| / 127        code = round(x / scale)        x ~ code * scale
    |x - code * scale| <= scale / 2 (nearest), < scale (stochastic, E = 0)

    codes of m elements: [ceil(m / 256) scales, float32][m bytes]     c(m) = m + 4 ceil(m / 256): 1.0156 m

Cost: 1.0156 / 4 of the bytes of float32; a residual of 4 bytes per element (gradient_compression.py).
Limits: a block with one huge element codes its others as 0; error feedback sends them later. What is not
finite makes its block not finite, so that the loss guard sees it.
Paper: Alistarh et al. 2017, "QSGD", arXiv 1610.02132; Dettmers 2016, "8-Bit Approximations for Parallelism in
Deep Learning", arXiv 1511.04561.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from meshwright.comm.shared_memory import int8_codes
from meshwright.parallel.compression.codecs.block_codes import (
    BLOCK,
    SCALE_NBYTES,
    RoundedCodec,
    in_blocks,
    join_scales,
    num_blocks,
    split_bytes,
    split_scales,
)

LARGEST_CODE = 127


@dataclass(frozen=True)
class Int8Compression(RoundedCodec):
    """Sums gradients as codes of one byte; `rounding` to the nearest one, or "stochastic": unbiased."""

    mode: ClassVar[str] = "int8"

    def code_nbytes(self, numel: int) -> int:
        return numel + SCALE_NBYTES * num_blocks(numel)

    def encode(self, values: torch.Tensor, draws: torch.Tensor | None) -> torch.Tensor:
        blocks = in_blocks(values, BLOCK)
        scales = (blocks.abs().amax(1, keepdim=True) / LARGEST_CODE).float()
        codes = self.rounded(blocks * (1.0 / scales), LARGEST_CODE, draws).to(torch.int8)
        return join_scales(scales, codes.view(-1)[: len(values)].view(torch.uint8))

    def encode_in_place(self, values: torch.Tensor, codes: torch.Tensor, draws: torch.Tensor | None) -> None:
        if draws is None and int8_codes.can_code(values):
            int8_codes.encode(values, *split_bytes(codes, len(values)))
        else:
            super().encode_in_place(values, codes, draws)

    def write_codes(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        if int8_codes.can_code(values):
            int8_codes.encode(values, *split_bytes(codes, len(values)))
        else:
            super().write_codes(values, codes)

    def decode_into(self, codes: torch.Tensor, values: torch.Tensor, *, add: bool) -> None:
        if int8_codes.can_code(values):
            int8_codes.decode(*split_bytes(codes, len(values)), values, add=add)
        else:
            super().decode_into(codes, values, add=add)

    def decode(self, codes: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        scales, steps = split_scales(codes, numel)
        return (in_blocks(steps.view(torch.int8), BLOCK).to(dtype) * scales.to(dtype)).view(-1)[:numel]
