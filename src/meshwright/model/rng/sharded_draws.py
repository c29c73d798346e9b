"""Random numbers of a slice: where a rank has a part of the tensor for which it draws, it draws the numbers of that part.

The trial run has the whole model, so it knows the whole shape that a site draws (model/dice.py) and between which layers that
happens. A rank whose tensor is smaller finds out along which dims, and which elements of the whole they are:

    whole, per sample    (heads 6, 9, 9)      between columns that are cut into 3 units, and their rows
    rank 1 of 2          (heads 2, 9, 9)      unit 2 of 3: heads 4 and 5      its index [h, i, j] is [4 + h, i, j] of the whole

Between columns and rows, what is divided are the units of the columns layer (heads, features); elsewhere it is what the layout
of the stream says. A dim that is divided along several axes is so in equal parts, the outermost axis first. A dim that no
division explains must be free (rows longer or shorter than those of the example), which is possible only where another dim is
explained. What is not clear is refused: other masks would train another model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from meshwright.model.tensor_parallel.layer_pairs import LayerUse
from meshwright.model.tensors.token_slices import span_positions
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.dim_split import DimRanges, DimSplit
from meshwright.plan.model_spec.layer_calls import LayerCall
from meshwright.plan.model_spec.sequence_info import MIN_TOKENS, SequenceSharding, with_padding


@dataclass(frozen=True)
class DrawSharding:
    """How the rank at `index` among `ranks` has a slice of tensors.

    Along `dim`, counted from the end (None: any), in units as `cut` has them; without that, in single elements. Where no layout
    says so, it is not `meant` and explains nothing: a tensor that looks as if it were divided so is refused. With a `deal` the
    elements are tokens, dealt so.
    """

    num_ranks: int
    index: int
    dim: int | None = None
    dim_split: DimSplit | None = None
    declared: bool = True
    sequence_sharding: SequenceSharding | None = None

    def local_span(self, dim: int, length: int) -> DimRanges | None:
        """What the rank has of a dim of `length`; None where that does not divide into the units."""
        if self.sequence_sharding is not None:
            return DimRanges(dim, with_padding(self.sequence_sharding.token_ranges(length, self.index)))
        if self.dim_split is None:
            return DimSplit(dim, length, (length,)).dim_ranges(self.index, self.num_ranks)
        if length % (self.dim_split.num_heads or self.dim_split.num_units):
            return None
        cut = DimSplit(
            dim,
            self.dim_split.num_units,
            (length,),
            num_heads=self.dim_split.num_heads,
            per_head_numel=(length // self.dim_split.num_units,),
        )
        return cut.dim_ranges(self.index, self.num_ranks)


@dataclass(frozen=True)
class TensorSlice:
    """A slice of a tensor of shape `whole`: along each dim of `local`, all of it, or what a span says."""

    full_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    spans: tuple[DimRanges | None, ...]

    def global_indices(self, index: torch.Tensor) -> torch.Tensor:
        """Where the elements `index` of the flattened slice lie in the flattened whole."""
        found, rest = torch.zeros_like(index), index
        *_, (outermost, _, behind) = self._runs
        if (
            len(self._runs) <= 2
            and self._runs[0][0] in (None, outermost)
            and outermost is not None
            and len(outermost.ranges) == 1
        ):
            return index + outermost.ranges[0][0] * behind  # one stretch of the whole
        for span, local, behind in self._runs:
            at = rest % local
            rest = rest.div(local, rounding_mode="floor")
            if span is not None and len(span.ranges) == 1:
                at = at + span.ranges[0][0]
            elif span is not None:
                at = torch.tensor(span_positions(span.ranges), device=index.device)[at]
            found += at * behind
        return found

    @cached_property
    def _runs(self) -> list[tuple[DimRanges | None, int, int]]:
        """From the last dim to the first, neighbours that are whole as one: span, local size, elements of the whole behind it."""
        found: list[tuple[DimRanges | None, int, int]] = []
        for dim in range(len(self.full_shape) - 1, -1, -1):
            span, local, behind = (
                self.spans[dim],
                max(1, self.local_shape[dim]),
                prod(self.full_shape[dim + 1 :]),
            )
            if span is None and found and found[-1][0] is None:
                _, inner, behind = found.pop()
                local *= inner
            found.append((span, local, behind))
        return found


@dataclass(frozen=True)
class DrawRegion:
    """Of what a rank draws, `shape` with all rows of a batch, along each dim in `spans`, counted from the end, the elements told.

    Other parts are drawn elsewhere, and tokens are all there: no deal says anything about `shape`.
    """

    full_shape: tuple[int, ...]
    spans: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

    @property
    def region_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        found = list(self.full_shape)
        for dim, spans in self.spans:
            found[dim] = sum(end - begin for begin, end in spans)
        return tuple(found)


@dataclass(frozen=True)
class NestedSlice:
    """A slice of a slice: `inner` of what `outer` is of the whole; None: that is the whole."""

    inner: TensorSlice
    outer: TensorSlice | None

    def global_indices(self, index: torch.Tensor) -> torch.Tensor:
        """Where the elements `index` of the flattened slice lie in the flattened whole."""
        found = self.inner.global_indices(index)
        return found if self.outer is None else self.outer.global_indices(found)


def locate_region(
    region: DrawRegion,
    full_shape: Sequence[int],
    local_shape: Sequence[int],
    shardings: Sequence[DrawSharding],
    site: str,
) -> NestedSlice:
    """Where `part` of one sample lies in a tensor of shape `whole`, of which the rank has one of shape `local`.

    Raises PlanError where that is not clear.
    """
    spans: list[DimRanges | None] = [None] * len(local_shape)
    sizes = list(local_shape)
    for dim, ends in region.spans:
        at = dim % len(local_shape)
        spans[at], sizes[at] = DimRanges(at, ends), sum(end - begin for begin, end in ends)
    known = [division for division in shardings if division.sequence_sharding is None]
    return NestedSlice(
        TensorSlice(tuple(local_shape), tuple(sizes), tuple(spans)),
        find_slice(full_shape, local_shape, known, site),
    )


def find_slice(
    full_shape: Sequence[int], local_shape: Sequence[int], shardings: Sequence[DrawSharding], site: str
) -> TensorSlice | None:
    """Which slice of a tensor of shape `whole` one of shape `local` is; None where it is all of it.

    Raises PlanError where that is not clear.
    """
    if tuple(full_shape) == tuple(local_shape):
        _refuse_short_sequences(full_shape, shardings, site)
        return None
    meant = [division for division in shardings if division.declared]
    spans: list[DimRanges | None] = [None] * len(full_shape)
    explaining: list[DrawSharding] = []
    for dim, (length, mine) in enumerate(zip(full_shape, local_shape, strict=False)):
        fits = (
            [division for division in meant if division.dim in (None, dim - len(full_shape))]
            if length != mine
            else []
        )
        for some in (*((division,) for division in fits), fits):
            spans[dim] = spans[dim] or _joint_span(some, dim, length, mine)
            explaining += some if spans[dim] is not None else ()
            if spans[dim] is not None:
                break
    twice = len(explaining) != len(set(map(id, explaining)))
    odd = any(
        _looks_sharded(full_shape, local_shape, division) for division in shardings if not division.declared
    )
    if len(full_shape) != len(local_shape) or twice or (not explaining and (odd or meant)):
        text = f"random numbers for {list(local_shape)} elements per sample, of {list(full_shape)} in the whole model: which is not clear"
        fix = "give rows as long as those of the example; or set the dropout that draws them to 0"
        raise PlanError(text, fix=fix, location=site)
    if not explaining:
        return None
    sizes = tuple(
        length if span is not None else mine
        for length, mine, span in zip(full_shape, local_shape, spans, strict=True)
    )
    return TensorSlice(sizes, tuple(local_shape), tuple(spans))


def _refuse_short_sequences(whole: Sequence[int], divisions: Sequence[DrawSharding], site: str) -> None:
    """A rank runs LEAST tokens at least, and of rows of as many its slice looks like all of them."""
    for deal, index in ((division.sequence_sharding, division.index) for division in divisions):
        if (
            deal is not None
            and len(whole) > 1
            and whole[-2] == MIN_TOKENS
            and with_padding(deal.token_ranges(MIN_TOKENS, index)) != ((0, MIN_TOKENS),)
        ):
            text = f"random numbers for {list(whole)} elements per sample, of rows of {MIN_TOKENS} tokens: not clear for which of them"
            raise PlanError(
                text, fix="give longer rows; or set the dropout that draws them to 0", location=site
            )


def _looks_sharded(whole: Sequence[int], local: Sequence[int], division: DrawSharding) -> bool:
    """Whether features (the last dim alone), or heads (what stands before rows and columns), are as few as `division` leaves."""
    for dim, (length, mine) in enumerate(zip(whole, local, strict=False)):
        features = dim == len(whole) - 1 and tuple(whole[:-1]) == tuple(local[:-1])
        span = (
            division.local_span(dim, length)
            if length != mine and (features or dim < len(whole) - 2)
            else None
        )
        if span is not None and span.size == mine:
            return True
    return False


def _joint_span(divisions: Sequence[DrawSharding], dim: int, length: int, mine: int) -> DimRanges | None:
    """What `divisions`, the outermost first, leave of a dim of `length`, if that is `mine` elements."""
    if len(divisions) == 1:
        span = divisions[0].local_span(dim, length)
        return span if span is not None and span.size == mine else None
    ranks = prod(division.num_ranks for division in divisions)
    if not divisions or ranks * mine != length:
        return None
    index = 0
    for division in divisions:
        index = index * division.num_ranks + division.index
    return DimRanges(dim, ((index * mine, (index + 1) * mine),))


def sites_between_layers(
    uses: Sequence[LayerUse], num_draws: Sequence[int], calls: Iterable[LayerCall]
) -> dict[str, tuple[str, str]]:
    """By site, the widest of the columns layers behind which it lies, and the rows layer before which it does.

    `drawn` counts, for each of `uses`, the sites of its visit before its end.
    """
    roles = {(call.name, call.block_call): call.role for call in calls}
    found: dict[str, tuple[str, str]] = {}
    waiting: list[tuple[LayerUse, int]] = []
    for use, count in zip(uses, num_draws, strict=True):
        role = roles.get((use.name, use.block_call), "")
        if waiting and waiting[-1][0].block_call != use.block_call:
            waiting = []
        if role == "columns":
            waiting.append((use, count))
        elif role == "rows" and waiting:
            widest = max((each for each, _ in waiting), key=lambda each: each.out_numel)
            found |= {
                f"{use.block_call}/{number}": (widest.name, use.name)
                for number in range(waiting[0][1], count)
            }
            waiting = []
    return found
