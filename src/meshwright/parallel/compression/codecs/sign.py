"""Sign: gradient elements travel as one bit each, with a float32 scale per block of 256, and so does the sum.

Why it works: the sign of an element says which way to go. The scale, the mean of all magnitudes of the block,
is the one that loses least. Much is lost, but error feedback keeps all of it: on the rank that coded its
gradient, and on the rank that coded the sum.

    scale = mean |x|          code = (x >= 0)          x ~ +scale or -scale
    |x - decoded|^2 = |x|^2 - m scale^2 <= (1 - 1 / m) |x|^2      over a block of m elements, so it contracts

    codes of m elements: [ceil(m / 256) scales, float32][ceil(m / 8) bytes]
    c(m) = ceil(m / 8) + 4 ceil(m / 256): 0.1406 m

Cost: 0.1406 / 4 of the bytes of float32; a residual of 4 bytes per element (gradient_compression.py).
Limits: does not converge without error feedback, which it therefore insists on. The first steps of Adam want
exact sums, since its second moments learn from them: `exact_steps`, a tenth of the run or more. With AdamW it
still learns less per step: a Llama of 3.8 M ended 7 % above the loss of exact sums after 180 steps. AdamW
divides an element by its own recent size, so that one which carries much of what was owed moves no further
than others. Under Adafactor, which divides by the size of row and column, it ended 1.3 % above (benchmark
`compression_curves`). 1-bit Adam, which freezes the second moments after the exact steps, is not built: in
a run of 180 steps it ended further above (6 to 9 %). What is not finite makes its block not finite, so that
the loss guard sees it.
Paper: Seide et al. 2014, "1-bit stochastic gradient descent" (Interspeech); Karimireddy et al. 2019, "Error
Feedback Fixes SignSGD", arXiv 1901.09847; Tang et al. 2021, "1-bit Adam", arXiv 2102.02888 (both ends).
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


@dataclass(frozen=True)
class SignCompression(BlockCodec):
    """Sums gradients as their signs, with the mean magnitude of each block."""

    mode: ClassVar[str] = "sign"

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from super().check(job, sharding)
        if not self.error_feedback:
            text = "error_feedback = False with signs: steps of one size do not converge"
            yield Diagnostic(
                text, 'remove it, or use mode = "int8"', f"strategies.{self.name}.error_feedback"
            )

    def code_nbytes(self, numel: int) -> int:
        return -(-numel // 8) + SCALE_NBYTES * num_blocks(numel)

    def encode(self, values: torch.Tensor, draws: torch.Tensor | None) -> torch.Tensor:
        blocks = in_blocks(values, BLOCK)
        scales = blocks.abs().mean(1, keepdim=True).float()
        scales[-1] *= BLOCK / (len(values) - (len(scales) - 1) * BLOCK)  # the mean without padding
        bits = (blocks >= 0).view(-1, 8).to(torch.uint8)
        packed = (bits << _shifts(bits.device)).sum(1, dtype=torch.uint8)
        return join_scales(scales, packed[: -(-len(values) // 8)])

    def decode(self, codes: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        scales, packed = split_scales(codes, numel)
        bits = packed.unsqueeze(1) >> _shifts(packed.device) & 1
        signs = bits.view(-1)[:numel].to(dtype).mul_(2).sub_(1)
        return (in_blocks(signs, BLOCK) * scales.to(dtype)).view(-1)[:numel]


def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
