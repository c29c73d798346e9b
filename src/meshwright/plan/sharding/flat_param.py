"""A bundle's weights end to end in one flat stretch, cut into equal shards: who holds which elements under S(flat).

    weights   |---- w0 ----|-- w1 --|---------- w2 ----------| pad |
    shards    |     rank 0      |     rank 1      |     rank 2     |     each `shard` elements, so one message fits all

A rank's part of a weight is one *piece*: w0 has one on rank 0, w1 one on rank 0 and one on rank 1. More ranks than
elements is fine: the last ranks hold padding. An optimizer says how finely a weight may be cut, its *grain*:

    element   anywhere (SGD, AdamW, Lion)                       padding: less than one element per rank
    block     at multiples of 256 elements of each weight, which share one scale (8-bit moments)
    matrix    not at all: each weight is owned by one rank, which has all of it (Adafactor, Muon)

Coarser grains pad more; `numel` is what is stored and sent, padding included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.plan.model_spec.model_spec import ParamSpec

ShardAlignment = Literal["element", "block", "matrix"]
QUANT_BLOCK_NUMEL = 256  # elements that share one scale in 8-bit moments


@dataclass(frozen=True)
class ParamShard:
    """The elements `begin` to `end` of a flattened weight; they lie from `at` on in the shard of their rank."""

    name: str
    begin: int
    end: int
    shard_offset: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.end - self.begin


@dataclass(frozen=True)
class FlatParamSpec:
    """Where the weights of the bundle `name` lie: (weight, elements, first place) each, over `ranks` shards along `axes`."""

    name: str
    axes: tuple[str, ...]
    num_ranks: int
    shard_numel: int
    params: tuple[tuple[str, int, int], ...]

    @classmethod
    def build(
        cls,
        name: str,
        params: Sequence[ParamSpec],
        axes: tuple[str, ...],
        num_ranks: int,
        shard_alignment: ShardAlignment = "element",
        full_numel: Mapping[str, int] | None = None,
    ) -> "FlatParamSpec":
        """The arena of `weights` in their order; of whole matrices the largest first, each to the rank with the least.

        `whole` are the elements of the logical weights, where these are slices: all slices of one go to the same index.
        """
        if shard_alignment == "matrix":
            return cls(
                name,
                axes,
                num_ranks,
                *_owned(params, num_ranks, full_numel or {weight.name: weight.numel for weight in params}),
            )
        step = QUANT_BLOCK_NUMEL if shard_alignment == "block" else 1
        placed, end = [], 0
        for weight in params:
            end = -(-end // step) * step
            placed.append((weight.name, weight.numel, end))
            end += weight.numel
        shard = -(-end // num_ranks)
        return cls(name, axes, num_ranks, -(-shard // step) * step, tuple(placed))

    @property
    def numel(self) -> int:
        """All elements, padding included."""
        return self.num_ranks * self.shard_numel

    def param_shards(self, index: int) -> tuple[ParamShard, ...]:
        """What the rank at `index` holds, in order; weights of which it holds nothing are left out."""
        low, high = index * self.shard_numel, (index + 1) * self.shard_numel
        found = []
        for name, numel, start in self.params:
            begin, end = max(start, low), min(start + numel, high)
            if begin < end:
                found.append(ParamShard(name, begin - start, end - start, begin - low))
        return tuple(found)


def _owned(
    params: Sequence[ParamSpec], num_ranks: int, whole: Mapping[str, int]
) -> tuple[int, tuple[tuple[str, int, int], ...]]:
    """The length of a shard that holds whole weights, and where each lies."""
    loads, fills, owner = [0] * num_ranks, [0] * num_ranks, {}
    for weight in sorted(params, key=lambda each: -whole[each.name]):
        index = min(range(num_ranks), key=loads.__getitem__)
        owner[weight.name] = index, fills[index]
        loads[index] += whole[weight.name]
        fills[index] += weight.numel
    shard = max(fills)
    placed = (
        (weight.name, weight.numel, owner[weight.name][0] * shard + owner[weight.name][1])
        for weight in params
    )
    return shard, tuple(placed)
