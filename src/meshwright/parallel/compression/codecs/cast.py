"""Cast: gradient elements travel as narrower floats: bfloat16, float16, or float8 with a scale per block.

Why it works: a float of 16 bits rounds each element to 2^-8 (bfloat16) or 2^-11 (float16) of itself, which is
small beside the noise of a gradient. What would be lost is the sum: in 16 bits, small summands vanish in a
large sum. Here the sum is made in float32, and rounded once more when it is sent on.

    bfloat16   x to 8 significant bits                                      c(m) = 2 m
    float16    x to 11 significant bits, clamped to +-65504                 c(m) = 2 m
    float8     scale = max |x| / 448 of 256 elements, x / scale to e4m3     c(m) = m + 4 ceil(m / 256)

    |x - decoded| <= 2^-8 |x|, 2^-11 |x|, 2^-4 |x| + scale 2^-10

Cost: 0.5, 0.5 and 0.2539 of the bytes of float32. With float16, elements below 6e-8 round to 0, and arrive
with the residual when they have grown; bfloat16 has the range of float32.
Limits: on a CPU without bfloat16 instructions a cast is as slow as int8. What is not finite stays so, and
with float8 makes its block not finite, so that the loss guard sees it.
Paper: Micikevicius et al. 2018, "Mixed Precision Training", arXiv 1710.03740; Micikevicius et al. 2022, "FP8
Formats for Deep Learning", arXiv 2209.05433.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

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

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class CastCompression(BlockCodec):
    """Sums gradients as codes of a narrower `dtype`: 2 bytes per element, or one ("float8")."""

    mode: ClassVar[str] = "cast"
    dtype: Literal["bfloat16", "float16", "float8"] = "bfloat16"

    def code_nbytes(self, numel: int) -> int:
        return numel + SCALE_NBYTES * num_blocks(numel) if self.dtype == "float8" else 2 * numel

    def encode(self, values: torch.Tensor, draws: torch.Tensor | None) -> torch.Tensor:
        narrow = DTYPES[self.dtype]
        if self.dtype == "bfloat16":
            return values.to(narrow).view(torch.uint8)
        largest = torch.finfo(narrow).max
        if self.dtype == "float16":
            clamped = values.clamp(-largest, largest)
            return torch.where(values.isfinite(), clamped, values).to(narrow).view(torch.uint8)
        blocks = in_blocks(values, BLOCK)
        scales = (blocks.abs().amax(1, keepdim=True) / largest).float()
        scaled = (blocks / scales).nan_to_num_(0.0).clamp_(-largest, largest).to(narrow)
        return join_scales(scales, scaled.view(-1)[: len(values)].view(torch.uint8))

    def decode(self, codes: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        narrow = DTYPES[self.dtype]
        if self.dtype != "float8":
            return codes.view(narrow).to(dtype)
        scales, scaled = split_scales(codes, numel)
        blocks = in_blocks(scaled.view(narrow).to(dtype), BLOCK)
        return (blocks * scales.to(dtype)).view(-1)[:numel]

    def encode_in_place(self, values: torch.Tensor, codes: torch.Tensor, draws: torch.Tensor | None) -> None:
        if not self._is_plain_cast(values):
            return super().encode_in_place(values, codes, draws)
        values.sub_(codes.view(DTYPES[self.dtype]).copy_(values))
        return None

    def decode_into(self, codes: torch.Tensor, values: torch.Tensor, *, add: bool) -> None:
        if self.dtype == "float8":
            return super().decode_into(codes, values, add=add)
        decoded = codes.view(DTYPES[self.dtype])
        values.add_(decoded) if add else values.copy_(decoded)
        return None

    def _is_plain_cast(self, values: torch.Tensor) -> bool:
        """Whether the codes of `values` are a conversion of torch's; in float16 nothing may be clamped, which
        would stop a GPU to be known.
        """
        if self.dtype == "float16":
            largest = torch.finfo(torch.float16).max
            return values.device.type == "cpu" and bool(values.abs().amax() <= largest)
        return self.dtype == "bfloat16"
