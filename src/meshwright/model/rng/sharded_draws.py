"""Random numbers of a slice: a rank with a slice of a tensor draws the numbers of that slice.

The trial runs the unsharded model, so it knows the full shape that each site draws
(model/rng/stateless_rng.py), and between which layers the site lies. A rank whose tensor is smaller
determines the sharded dims, and which elements of the full tensor it has:

    full shape, per sample    (heads 6, 9, 9)    between colwise layers in 3 units and a rowwise layer
    rank 1 of 2               (heads 2, 9, 9)    unit 2 of 3: heads 4, 5; [h, i, j] is [4 + h, i, j] there

Between a colwise and a rowwise layer, the units of the colwise layer (heads, features) are sharded; elsewhere
the layout of the residual stream says what is. A dim that is sharded along several mesh axes is split into
equal parts, the outermost axis first. A dim that no sharding explains must be free (sequences longer or
shorter than the example), which is allowed only where another dim is explained. An ambiguous case is refused:
other masks would train another model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from meshwright.model.tensor_parallel.layer_pairs import LayerUse
from meshwright.model.tensors.select_token_ranges import span_positions
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.param_dim_split import DimRanges, DimSplit
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall
from meshwright.plan.sharding.sequence_sharding import MIN_TOKENS, SequenceSharding, with_padding


@dataclass(frozen=True)
class DrawSharding:
    """The slice that the rank at `index` of `num_ranks` has of the tensors at a site.

    `dim` counts from the end (None: any dim). The dim is split into the units of `dim_split`, or without one
    into single elements. If no layout declares the split (`declared` is False), it explains nothing, and a
    tensor that looks split in this way is refused. With a `sequence_sharding` the elements are tokens,
    sharded as it says.
    """

    num_ranks: int
    index: int
    dim: int | None = None
    dim_split: DimSplit | None = None
    declared: bool = True
    sequence_sharding: SequenceSharding | None = None

    def local_span(self, dim: int, length: int) -> DimRanges | None:
        """Returns the rank's part of a dim of `length`; None if the length does not divide into the units."""
        if self.sequence_sharding is not None:
            return DimRanges(dim, with_padding(self.sequence_sharding.token_ranges(length, self.index)))
        if self.dim_split is None:
            return DimSplit(dim, length, (length,)).dim_ranges(self.index, self.num_ranks)
        if length % (self.dim_split.num_heads or self.dim_split.num_units):
            return None
        dim_split = DimSplit(
            dim,
            self.dim_split.num_units,
            (length,),
            num_heads=self.dim_split.num_heads,
            per_head_numel=(length // self.dim_split.num_units,),
        )
        return dim_split.dim_ranges(self.index, self.num_ranks)


@dataclass(frozen=True)
class TensorSlice:
    """A slice of a tensor of `full_shape`: along each dim all of it, or the part that its span gives."""

    full_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    spans: tuple[DimRanges | None, ...]

    def global_indices(self, index: torch.Tensor) -> torch.Tensor:
        """Returns the indices in the flattened full tensor of the elements `index` of the flattened slice."""
        if self.first_index is not None:
            return index + self.first_index
        found, rest = torch.zeros_like(index), index
        for span, local_size, stride in self._runs:
            position = rest % local_size
            rest = rest.div(local_size, rounding_mode="floor")
            if span is not None and len(span.ranges) == 1:
                position = position + span.ranges[0][0]
            elif span is not None:
                position = torch.tensor(span_positions(span.ranges), device=index.device)[position]
            found += position * stride
        return found

    @cached_property
    def first_index(self) -> int | None:
        """The index of the first element, if the slice is one contiguous range of the full tensor."""
        *_, (outermost, _, stride) = self._runs
        if (
            len(self._runs) <= 2
            and self._runs[0][0] in (None, outermost)
            and outermost is not None
            and len(outermost.ranges) == 1
        ):
            return outermost.ranges[0][0] * stride
        return None

    @cached_property
    def _runs(self) -> list[tuple[DimRanges | None, int, int]]:
        # (span, local size, elements of the full tensor per step); neighbouring full dims are merged
        found: list[tuple[DimRanges | None, int, int]] = []
        for dim in range(len(self.full_shape) - 1, -1, -1):
            span, local_size, stride = (
                self.spans[dim],
                max(1, self.local_shape[dim]),
                prod(self.full_shape[dim + 1 :]),
            )
            if span is None and found and found[-1][0] is None:
                _, inner, stride = found.pop()
                local_size *= inner
            found.append((span, local_size, stride))
        return found


@dataclass(frozen=True)
class DrawRegion:
    """A region of a rank's draw: of a tensor of `full_shape` (all samples), the ranges in `spans`.

    Each span is (dim counted from the end, ranges). The other regions are drawn by other calls. All tokens
    are present: no sequence sharding applies to `full_shape`.
    """

    full_shape: tuple[int, ...]
    spans: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

    @property
    def region_shape(self) -> tuple[int, ...]:
        """The shape of the region."""
        found = list(self.full_shape)
        for dim, spans in self.spans:
            found[dim] = sum(end - begin for begin, end in spans)
        return tuple(found)


@dataclass(frozen=True)
class NestedSlice:
    """A slice of a slice: `inner` indexes into `outer`, and that into the full tensor (None: it is full)."""

    inner: TensorSlice
    outer: TensorSlice | None

    @property
    def first_index(self) -> int | None:
        """The index of the first element, if the slice is one contiguous range of the full tensor."""
        inner = self.inner.first_index
        if inner is None or self.outer is None:
            return inner
        return None if self.outer.first_index is None else self.outer.first_index + inner

    def global_indices(self, index: torch.Tensor) -> torch.Tensor:
        """Returns the indices in the flattened full tensor of the elements `index` of the flattened slice."""
        found = self.inner.global_indices(index)
        return found if self.outer is None else self.outer.global_indices(found)


def locate_region(
    region: DrawRegion,
    full_shape: Sequence[int],
    local_shape: Sequence[int],
    shardings: Sequence[DrawSharding],
    site: str,
) -> NestedSlice:
    """Returns the slice that `region` is of one sample's tensor of `full_shape`; the rank has `local_shape`
    of it.

    Raises PlanError if that is ambiguous.
    """
    spans: list[DimRanges | None] = [None] * len(local_shape)
    sizes = list(local_shape)
    for dim, ranges in region.spans:
        dim_index = dim % len(local_shape)
        spans[dim_index], sizes[dim_index] = (
            DimRanges(dim_index, ranges),
            sum(end - begin for begin, end in ranges),
        )
    feature_shardings = [sharding for sharding in shardings if sharding.sequence_sharding is None]
    return NestedSlice(
        TensorSlice(tuple(local_shape), tuple(sizes), tuple(spans)),
        find_slice(full_shape, local_shape, feature_shardings, site),
    )


def find_slice(
    full_shape: Sequence[int], local_shape: Sequence[int], shardings: Sequence[DrawSharding], site: str
) -> TensorSlice | None:
    """Returns the slice that a tensor of `local_shape` is of one of `full_shape`; None if it is the full
    tensor.

    Raises PlanError if that is ambiguous.
    """
    if tuple(full_shape) == tuple(local_shape):
        _refuse_short_sequences(full_shape, shardings, site)
        return None
    declared = [sharding for sharding in shardings if sharding.declared]
    spans: list[DimRanges | None] = [None] * len(full_shape)
    explaining: list[DrawSharding] = []
    for dim, (length, local_length) in enumerate(zip(full_shape, local_shape, strict=False)):
        candidates = (
            [sharding for sharding in declared if sharding.dim in (None, dim - len(full_shape))]
            if length != local_length
            else []
        )
        for group in (*((sharding,) for sharding in candidates), candidates):
            spans[dim] = spans[dim] or _joint_span(group, dim, length, local_length)
            explaining += group if spans[dim] is not None else ()
            if spans[dim] is not None:
                break
    twice = len(explaining) != len(set(map(id, explaining)))
    looks_sharded = any(
        _looks_sharded(full_shape, local_shape, sharding) for sharding in shardings if not sharding.declared
    )
    if len(full_shape) != len(local_shape) or twice or (not explaining and (looks_sharded or declared)):
        text = (
            f"random numbers for {list(local_shape)} elements per sample, of {list(full_shape)} in the "
            "unsharded model: the slice is ambiguous"
        )
        fix = "give sequences as long as those of the example; or set the dropout that draws them to 0"
        raise PlanError(text, fix=fix, location=site)
    if not explaining:
        return None
    sizes = tuple(
        length if span is not None else local_length
        for length, local_length, span in zip(full_shape, local_shape, spans, strict=True)
    )
    return TensorSlice(sizes, tuple(local_shape), tuple(spans))


def _refuse_short_sequences(full_shape: Sequence[int], shardings: Sequence[DrawSharding], site: str) -> None:
    # a rank runs at least MIN_TOKENS tokens: of a sequence that long, its slice looks like the full tensor
    for sequence_sharding, index in ((sharding.sequence_sharding, sharding.index) for sharding in shardings):
        if (
            sequence_sharding is not None
            and tuple(full_shape[-2:-1] or full_shape[-1:]) == (MIN_TOKENS,)
            and with_padding(sequence_sharding.token_ranges(MIN_TOKENS, index)) != ((0, MIN_TOKENS),)
        ):
            text = (
                f"random numbers for {list(full_shape)} elements per sample, of sequences of {MIN_TOKENS} "
                "tokens: the slice is ambiguous"
            )
            raise PlanError(
                text, fix="give longer sequences; or set the dropout that draws them to 0", location=site
            )


def _looks_sharded(full_shape: Sequence[int], local_shape: Sequence[int], sharding: DrawSharding) -> bool:
    # features: the last dim alone; heads: a dim before the last two
    for dim, (length, local_length) in enumerate(zip(full_shape, local_shape, strict=False)):
        features = dim == len(full_shape) - 1 and tuple(full_shape[:-1]) == tuple(local_shape[:-1])
        span = (
            sharding.local_span(dim, length)
            if length != local_length and (features or dim < len(full_shape) - 2)
            else None
        )
        if span is not None and span.size == local_length:
            return True
    return False


def _joint_span(shardings: Sequence[DrawSharding], dim: int, length: int, size: int) -> DimRanges | None:
    """The part of a dim of `length` that `shardings`, outermost first, leave, if it has `size` elements."""
    if len(shardings) == 1:
        span = shardings[0].local_span(dim, length)
        return span if span is not None and span.size == size else None
    num_ranks = prod(sharding.num_ranks for sharding in shardings)
    if not shardings or num_ranks * size != length:
        return None
    index = 0
    for sharding in shardings:
        index = index * sharding.num_ranks + sharding.index
    return DimRanges(dim, ((index * size, (index + 1) * size),))


def sites_between_layers(
    uses: Sequence[LayerUse], num_draws: Sequence[int], calls: Iterable[LayerCall]
) -> dict[str, tuple[str, str]]:
    """Returns, by site, the widest of the colwise layers before it and the rowwise layer after it.

    `num_draws` counts, for each of `uses`, the sites of its block call before the end of the use.
    """
    roles = {(call.name, call.block_call): call.role for call in calls}
    found: dict[str, tuple[str, str]] = {}
    colwise_uses: list[tuple[LayerUse, int]] = []
    for use, count in zip(uses, num_draws, strict=True):
        role = roles.get((use.name, use.block_call), "")
        if colwise_uses and colwise_uses[-1][0].block_call != use.block_call:
            colwise_uses = []
        if role == "colwise":
            colwise_uses.append((use, count))
        elif role == "rowwise" and colwise_uses:
            widest = max((each for each, _ in colwise_uses), key=lambda each: each.out_numel)
            found |= {
                f"{use.block_call}/{number}": (widest.name, use.name)
                for number in range(colwise_uses[0][1], count)
            }
            colwise_uses = []
    return found
