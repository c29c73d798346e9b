"""Concatenates the parameters of a group into one flat parameter and cuts it into equal shards: placement
S(flat).

    params    |---- w0 ----|-- w1 --|---------- w2 ----------| pad |
    shards    |     rank 0      |     rank 1      |     rank 2     |     `shard_numel` elements each

All shards have the same size, so one message size fits all ranks. With more ranks than elements, the last
ranks hold padding. The optimizer's shard alignment says how finely a parameter may be cut:

    element   anywhere (SGD, AdamW, Lion)                       padding: less than one element per rank
    block     at multiples of 256 elements of each parameter, which share one scale (8-bit optimizer states)
    matrix    not at all: one rank owns each parameter (Adafactor, Muon)

Coarser alignments pad more; `numel` is what is stored and sent, padding included.

Where one rank steps whole groups (`owner_index`), its shard is everything, and those of all others are empty:

    shards    |                        rank 1                          |     ranks 0, 2: no elements

Where the ranks that only serve have the rows of a parameter, these ranks alone have shards, of whole rows:

    shards    |        rank 2: rows 0 to 5       | rank 3: rows 6 to 10, pad |     ranks 0, 1: no elements

On an accelerator each parameter and each shard begins at a multiple of `align_numel` elements too, which are
128 bytes (`align_bytes` of the plan): one bias of 10 elements would else misalign all parameters behind it,
and kernels and NCCL could not load them by 16 bytes at once.

    w0 (10 elements)           at 0                 at 0
    w1                         at 10                at 32, of float32
    shard 1                    anywhere             at a multiple of 32
    padding                    none                 less than 128 bytes per parameter and per shard
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Literal

from meshwright.plan.model_spec.model_spec import ParamSpec

ShardAlignment = Literal["element", "block", "matrix"]
QUANT_BLOCK_NUMEL = 256  # elements that share one scale in 8-bit optimizer states


@dataclass(frozen=True)
class ParamShard:
    """Elements `begin` to `end` of a flattened parameter, at `shard_offset` in the shard of their rank."""

    name: str
    begin: int
    end: int
    shard_offset: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.end - self.begin

    @property
    def in_shard(self) -> slice:
        """The range of the elements in the shard of their rank."""
        return slice(self.shard_offset, self.shard_offset + self.numel)


@dataclass(frozen=True)
class FlatParamSpec:
    """The layout of the flat parameter of group `name`: (parameter, elements, offset) each, in `num_ranks`
    shards of `shard_numel` elements; with `owner_index`, in one shard of that many on the rank at this index.
    Only the ranks at `member_indices` along `axes` have it, in this order (empty: all).
    """

    name: str
    axes: tuple[str, ...]
    num_ranks: int
    shard_numel: int
    params: tuple[tuple[str, int, int], ...]
    owner_index: int | None = None
    member_indices: tuple[int, ...] = ()

    @classmethod
    def build(
        cls,
        name: str,
        params: Sequence[ParamSpec],
        axes: tuple[str, ...],
        num_ranks: int,
        shard_alignment: ShardAlignment = "element",
        full_numel: Mapping[str, int] | None = None,
        align_numel: int = 1,
        owner_index: int | None = None,
        member_indices: tuple[int, ...] = (),
        row_numel: int = 1,
    ) -> "FlatParamSpec":
        """Lays out `params` in order; with alignment "matrix", the largest first, each on the rank with the
        least. With `owner_index`, all lie on that rank.

        `full_numel` gives the elements of the full parameters if `params` are slices: all slices of a
        parameter go to the same index. Parameters and shards begin at multiples of `align_numel` elements,
        and of `row_numel`.
        """
        if shard_alignment == "matrix" and owner_index is None:
            full_numel = full_numel or {param.name: param.numel for param in params}
            return cls(name, axes, num_ranks, *_assign_owners(params, num_ranks, full_numel, align_numel))
        step = lcm(QUANT_BLOCK_NUMEL if shard_alignment == "block" else 1, align_numel, row_numel)
        entries, offset = [], 0
        for param in params:
            offset = round_up(offset, step)
            entries.append((param.name, param.numel, offset))
            offset += param.numel
        num_shards = num_ranks if owner_index is None else 1
        shard_numel = round_up(-(-offset // num_shards), step)
        return cls(name, axes, num_ranks, shard_numel, tuple(entries), owner_index, member_indices)

    @property
    def numel(self) -> int:
        """All elements, padding included."""
        return self.shard_numel * (self.num_ranks if self.owner_index is None else 1)

    def shard_range(self, index: int) -> tuple[int, int]:
        """Returns the first element of the shard of rank `index`, and the one behind its last."""
        if self.owner_index is None:
            if self.member_indices and index not in self.member_indices:
                return 0, 0
            place = self.member_indices.index(index) if self.member_indices else index
            return place * self.shard_numel, (place + 1) * self.shard_numel
        return 0, self.shard_numel if index == self.owner_index else 0

    def local_numel(self, index: int) -> int:
        """Returns the elements of the shard of rank `index`, padding included."""
        begin, end = self.shard_range(index)
        return end - begin

    def shards_of(self, name: str) -> Iterator[tuple[int, ParamShard]]:
        """Yields the shards of the parameter `name`, in order, each with the index of its rank among those
        that have the flat parameter.
        """
        numel, offset = next((numel, offset) for each, numel, offset in self.params if each == name)
        if self.owner_index is not None:
            owner, members = self.owner_index, self.member_indices
            yield members.index(owner) if members else owner, ParamShard(name, 0, numel, offset)
            return
        for index in range(offset // self.shard_numel, -(-(offset + numel) // self.shard_numel)):
            first = index * self.shard_numel
            begin, end = max(offset, first), min(offset + numel, first + self.shard_numel)
            if begin < end:
                yield index, ParamShard(name, begin - offset, end - offset, begin - first)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The ranges of the flat parameter that are padding."""
        found, end = [], 0
        for _, numel, offset in sorted(self.params, key=lambda each: each[2]):
            found.append((end, offset))
            end = offset + numel
        return tuple((begin, end) for begin, end in [*found, (end, self.numel)] if begin < end)

    def param_shards(self, index: int) -> tuple[ParamShard, ...]:
        """Returns the parameter shards of rank `index`, in order; parameters without elements there are left
        out.
        """
        shard_begin, shard_end = self.shard_range(index)
        found = []
        for name, numel, offset in self.params:
            begin, end = max(offset, shard_begin), min(offset + numel, shard_end)
            if begin < end:
                found.append(ParamShard(name, begin - offset, end - offset, begin - shard_begin))
        return tuple(found)


def round_up(numel: int, step: int) -> int:
    """Returns the smallest multiple of `step` that is not below `numel`."""
    return -(-numel // step) * step


def _assign_owners(
    params: Sequence[ParamSpec], num_ranks: int, full_numel: Mapping[str, int], align_numel: int
) -> tuple[int, tuple[tuple[str, int, int], ...]]:
    loads, used, owner = [0] * num_ranks, [0] * num_ranks, {}
    for param in sorted(params, key=lambda each: -full_numel[each.name]):
        index = min(range(num_ranks), key=loads.__getitem__)
        owner[param.name] = index, used[index]
        loads[index] += full_numel[param.name]
        used[index] += round_up(param.numel, align_numel)
    shard_numel = max(used)
    entries = (
        (param.name, param.numel, owner[param.name][0] * shard_numel + owner[param.name][1])
        for param in params
    )
    return shard_numel, tuple(entries)
