"""The write plan of a checkpoint: which rank writes which part of which tensor.

    replicated tensors    distributed, the largest first, each to the rank with the fewest bytes so far
    shards                every rank lists the ranges that it has; the first rank that has one writes it

A shard is written as boxes of its tensor (plan/sharding/shard_boxes.py).

Replicas of a shard are written once, and so are values that every piece of a parameter has, such as an
optimizer's step count.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import chain

import torch

from meshwright.engine.optim.sharded_state_dict import SavedTensor, TensorShard
from meshwright.engine.params.rank_file import load_pages
from meshwright.model.tensors.lazy_mapping import box_window
from meshwright.plan.model_spec.param_dim_split import DimRanges
from meshwright.plan.sharding.shard_boxes import ShardBox, shard_boxes
from meshwright.run.checkpoint.manifest import StoredSlice, TensorEntry
from meshwright.run.checkpoint.shard_io import DTYPES, dtype_name

TensorOutline = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class ShardRange:
    """A shard as its rank lists it: elements `begin` to `end` of the flattened tensor `name`, or of its
    slice (`spans`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int
    spans: tuple[DimRanges, ...] = ()


@dataclass(frozen=True)
class WritePlan:
    """The data that each rank of a group writes, by index: names of replicated tensors, and ranges of sharded
    ones.
    """

    full_tensors: tuple[tuple[str, ...], ...]
    shard_ranges: tuple[tuple[ShardRange, ...], ...]
    outline: TensorOutline

    @classmethod
    def from_ranks(cls, tensors: Mapping[str, SavedTensor], listings: Sequence[bytes]) -> "WritePlan":
        """Returns the plan of ranks that have `tensors` like this one and whose shards are `listings`
        (`list_shards`), in rank order.
        """
        whole = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
        all_ranges: set[ShardRange] = set()
        cut: list[tuple[ShardRange, ...]] = []
        known: set[bytes] = set()
        for line in listings:
            if line in known:  # a replica, which writes nothing
                cut.append(())
                continue
            known.add(line)
            rows = json.loads(line or b"[]")
            mine = [
                ShardRange(name, tuple(shape), dtype, a, b, _parse_spans(spans))
                for name, shape, dtype, spans, a, b in rows
            ]
            cut.append(tuple(stretch for stretch in mine if stretch not in all_ranges))
            all_ranges.update(mine)
        outline: TensorOutline = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in whole.items()}
        outline |= {
            each.name: (each.shape, DTYPES[each.dtype])
            for each in sorted(all_ranges, key=lambda each: each.name)
        }
        shares = balance_by_size({name: tensor.nbytes for name, tensor in whole.items()}, len(listings))
        return cls(shares, tuple(cut), outline)

    def local_tensors(self, tensors: Mapping[str, SavedTensor], index: int) -> dict[str, torch.Tensor]:
        """Returns the tensors that the rank at `index` writes, by their key in its file."""
        found = {
            name: tensor
            for name in self.full_tensors[index]
            if isinstance(tensor := tensors[name], torch.Tensor)
        }
        for stretch in self.shard_ranges[index]:
            share = tensors[stretch.name]
            if isinstance(share, TensorShard):
                boxes = stored_boxes(stretch)
                found |= {key: _contiguous(box_window(share.values, box)) for key, box in boxes}
        return found

    def entries(self, files: Sequence[str]) -> dict[str, TensorEntry]:
        """Returns every entry of the manifest; `files` are the files of the ranks."""
        slices: dict[str, list[StoredSlice]] = {name: [] for name in self.outline}
        for file, names, cut in zip(files, self.full_tensors, self.shard_ranges, strict=True):
            for name in names:
                shape = self.outline[name][0]
                slices[name].append(StoredSlice(file, name, (0,) * len(shape), shape))
            for stretch in cut:
                slices[stretch.name] += [
                    StoredSlice(file, key, box.start, box.size) for key, box in stored_boxes(stretch)
                ]
        return {
            name: TensorEntry(shape, dtype_name(dtype), tuple(slices[name]))
            for name, (shape, dtype) in self.outline.items()
        }

    def writer_indices(self) -> tuple[int, ...]:
        """Returns the indices of the ranks that write anything."""
        return tuple(
            index
            for index, (names, cut) in enumerate(zip(self.full_tensors, self.shard_ranges, strict=True))
            if names or cut
        )


def list_shards(tensors: Mapping[str, SavedTensor]) -> bytes:
    """Returns the list of this rank's shards, as JSON, for the other ranks."""
    rows = [
        [
            name,
            list(share.shape),
            dtype_name(share.dtype),
            _span_lists(share.spans),
            share.start,
            share.start + share.values.numel(),
        ]
        for name, share in tensors.items()
        if isinstance(share, TensorShard)
    ]
    return json.dumps(rows, separators=(",", ":")).encode() if rows else b""


def _contiguous(window: torch.Tensor) -> torch.Tensor:
    if not window.is_contiguous():  # then it is read here
        load_pages(window)
    return window.contiguous()


def stored_boxes(shard_range: ShardRange) -> Iterator[tuple[str, ShardBox]]:
    """Yields the boxes of `shard_range`, each with its key in the file."""
    for box in shard_boxes(shard_range.begin, shard_range.end, shard_range.shape, shard_range.spans):
        where = "-".join(map(str, box.start)) if shard_range.spans else shard_range.begin + box.at
        yield f"{shard_range.name}@{where}", box


def _span_lists(spans: Sequence[DimRanges]) -> list[list[int]]:
    return [[span.dim, *chain.from_iterable(span.ranges)] for span in spans]


def _parse_spans(lists: Sequence[Sequence[int]]) -> tuple[DimRanges, ...]:
    return tuple(DimRanges(dim, tuple(zip(ends[::2], ends[1::2], strict=True))) for dim, *ends in lists)


def balance_by_size(nbytes: Mapping[str, int], size: int) -> tuple[tuple[str, ...], ...]:
    """Distributes named things of `nbytes` over `size` ranks: the largest first, each to the rank with the
    fewest bytes so far.
    """
    loads = [(0, index) for index in range(size)]
    heapify(loads)
    shares: list[list[str]] = [[] for _ in range(size)]
    for name in sorted(nbytes, key=lambda name: (-nbytes[name], name)):
        load, index = loads[0]
        shares[index].append(name)
        heapreplace(loads, (load + nbytes[name], index))
    return tuple(map(tuple, shares))
