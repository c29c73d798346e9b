"""AdamW with both moments in 8 bits: one byte per element and moment, and one scale per 256 elements.

Why it works: an element of a moment is stored as the nearest of 256 fixed levels between -1 and 1, times the
largest magnitude of its block. The levels lie densely around zero, decade by decade, because moments span
many decades. A scale per block keeps one outlier from costing its neighbours their digits. What all elements
of a block have in common (a decay by beta) goes into the scale and is not rounded. As in `adamw_bf16`, the
update uses the exact new moments; only the stored ones are rounded.

    weight, flat   [ 256 elements | 256 elements | ... | rest ]
    codes (uint8)  [ 256          | 256          | ... | rest ]      m, and likewise v
    scales         [ 1            | 1            | ... | 1    ]      float32: largest magnitude in the block

    moment = levels[code] * scale         code = nearest(moment / scale)

Second moments are never negative, so all their levels are positive, and none is zero: a v that is rounded to
0 beside an m that is not would make a huge step. It is rounded up instead, and the step is smaller than
AdamW's.
Shard alignment: block. Shards begin at multiples of 256 elements of each weight, so a block lies on one rank,
and every rank computes for it what one device would.
Cost: 2 + 8/256 = 2.03 bytes per parameter, where AdamW keeps 8; padding of less than 256 elements per weight.
Limits: within a block, a moment more than 10**7 times smaller than the largest is rounded to zero (m) or up
(v). Embeddings are the usual place where that hurts: give them `name = "adamw"` in a group.
Paper: Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861 (section 2);
that second moments must not be rounded to zero: Li et al. 2023, "Memory Efficient Optimizers with 4-bit
States", arXiv 2309.01507.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.engine.optim.abstract_optimizer import PerParamOptimizer, get_compute_dtype
from meshwright.engine.optim.adamw_bf16_states import adamw_update
from meshwright.plan.sharding.flat_param import QUANT_BLOCK_NUMEL, ShardAlignment

NUM_DECADES = 7  # the numbers of a block reach from 1 down to 10**-7


class AdamW8bit(PerParamOptimizer):
    """AdamW over `groups` with 8-bit moments, in blocks of 256 elements of the flattened parameter."""

    shard_alignment: ClassVar[ShardAlignment] = "block"
    blockwise_state_keys: ClassVar[frozenset[str]] = frozenset({"exp_avg_scale", "exp_avg_sq_scale"})

    def __init__(
        self, groups: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._levels = {
            "exp_avg": quantization_levels(signed=True),
            "exp_avg_sq": quantization_levels(signed=False),
        }
        self._levels_on_device: dict[tuple[str, torch.device, torch.dtype], torch.Tensor] = {}

    def update_param(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        dtype = get_compute_dtype(parameter)
        if not state:
            state["step"] = 0
            moments = {key: torch.zeros_like(parameter, dtype=dtype) for key in self._levels}
        else:
            moments = {
                key: dequantize_blocks(state[key], state[f"{key}_scale"], self._levels_for(key, parameter))
                for key in self._levels
            }
        state["step"] += 1
        adamw_update(
            parameter, gradient.to(dtype), moments["exp_avg"], moments["exp_avg_sq"], state["step"], group
        )
        for key, moment in moments.items():
            state[key], state[f"{key}_scale"] = quantize_blocks(moment, self._levels_for(key, parameter))

    def _levels_for(self, key: str, parameter: torch.Tensor) -> torch.Tensor:
        place = (key, parameter.device, get_compute_dtype(parameter))
        if place not in self._levels_on_device:
            self._levels_on_device[place] = self._levels[key].to(*place[1:])
        return self._levels_on_device[place]


def quantization_levels(*, signed: bool) -> torch.Tensor:
    """Returns the 256 levels of a code, float64, ascending, the last one 1.

    Each decade has twice as many levels as the one below.
    Signed levels are symmetric and include zero; unsigned ones begin at 10**-7.
    """
    found = [1.0, 0.0 if signed else 10.0**-NUM_DECADES]
    for decade in range(NUM_DECADES):
        count = 2 ** (decade + (not signed))
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade + 1 - NUM_DECADES)).tolist()
        found += [*middles, *(-middle for middle in middles if signed)]
    return torch.tensor(sorted(found), dtype=torch.float64)


def quantize_blocks(moment: torch.Tensor, levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes of `moment` (uint8, same shape) by the ascending `levels`, and float32 scales."""
    blocks = _blocks(moment.reshape(-1))
    scales = blocks.abs().amax(dim=1).float()
    divisors = torch.where(scales > 0, scales, 1.0).to(blocks.dtype)
    codes = torch.bucketize(blocks / divisors[:, None], (levels[1:] + levels[:-1]) / 2)
    return codes.view(-1)[: moment.numel()].view(moment.shape).to(torch.uint8), scales


def dequantize_blocks(codes: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Returns the moment that `quantize_blocks` was given, up to rounding, in the dtype of `levels`."""
    values = _blocks(levels[codes.reshape(-1).int()]) * scales.to(levels.dtype)[:, None]
    return values.view(-1)[: codes.numel()].view(codes.shape)


def _blocks(flat: torch.Tensor) -> torch.Tensor:  # (blocks, 256), zero-padded
    return F.pad(flat, (0, -len(flat) % QUANT_BLOCK_NUMEL)).view(-1, QUANT_BLOCK_NUMEL)
