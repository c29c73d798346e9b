"""Of the values that cross between parts of a model, what each rank has: all of one, or a slice of it.

    the stream, in slices of tokens `through` some visits    what such a visit gives out, when the next takes slices
    the stream, in slices of the width                       what is as wide as the stream, whoever made it
    tables by head, 4-dim                                    the rank's heads, where a visit that computes with those made them
    all else                                                 whole, and the same on all ranks that have slices of weights
    tokens that are dealt to ranks                           the rank's own (core/tokens.py), and of those the slice, if any

A slice goes from each rank to the one at the same place in the next part, and so does its gradient: nobody puts a value together
for that. Where two values look like the stream, or one could be a slice of something else, nothing is guessed: the cut is
refused. What the forward gives out is compared with what is said here before it is sent.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.model_spec.dim_split import DimShard, DimSplit
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.model_spec.stage_boundaries import StageValue
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.placement import Placement
from meshwright.plan.sharding.sharding_plan import ShardingPlan

PER_HEAD_NDIM = 4  # dims of a tensor that is one table per head: rows, heads, queries, keys
AxesSplits = tuple[
    tuple[tuple[str, ...], DimSplit], ...
]  # axes, and how a dim is divided along all of those together
DimSizes = tuple[tuple[int, int], ...]


class StageValueShards:
    """What the rank that sees `space` has of `values`: which of them go in slices, their sizes in the plan tell."""

    def __init__(self, sharding: ShardingPlan, values: Iterable[StageValue]) -> None:
        self._space, self._cuts, self._axes = sharding, dict(_cuts(sharding, values)), _axes(sharding)

    def local_shape(self, value: StageValue, num_samples: int) -> tuple[int, ...]:
        """The shape of what this rank has of `value`, whose rows may have another length than the plan's, for so many rows."""
        space, mesh, shape = self._space, self._space.mesh, value.shape(num_samples)
        coordinate = dict(space.coordinate)
        if space.sequence_sharding is not None and value.sequence_dim is not None:
            own = space.sequence_sharding.num_padded_tokens(
                shape[value.sequence_dim], mesh.index(coordinate, space.token_axes)
            )
            shape = (*shape[: value.sequence_dim], own, *shape[value.sequence_dim + 1 :])
        for axes, cut in self._cuts.get(value.name, ()):
            size = shape[cut.dim]
            if sum(cut.sections) != size:  # a rank's own tokens, or rows of another length than the plan's
                cut = DimSplit(cut.dim, size, (size,))
            side = DimShard(axes, cut, mesh.group_size(axes), mesh.index(coordinate, axes))
            shape = side.dim_split.local_shape(shape, side.index, side.num_ranks)
        return shape

    def glue_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a value of `shape` has for glue on this rank: where the width goes in slices, that of its own."""
        places = _places(self._space)
        if not places or self._space.sequence_sliced_calls or (*shape[-1:], 0) not in _widths(self._space):
            return shape
        coordinate = dict(self._space.coordinate)
        for axes, cut in _by_dim(places, tuple((each, 0) for each in shape)):
            side = DimShard(
                axes, cut, self._space.mesh.group_size(axes), self._space.mesh.index(coordinate, axes)
            )
            shape = side.dim_split.local_shape(shape, side.index, side.num_ranks)
        return shape

    def replicated_axes(self, value: StageValue) -> tuple[str, ...]:
        """The axes along which ranks have slices of weights, and all the same of `value`."""
        cut = {axis for axes, _ in self._cuts.get(value.name, ()) for axis in axes}
        return tuple(axis for axis in self._axes if axis not in cut)


def stage_value_diagnostics(sharding: ShardingPlan, values: Iterable[StageValue]) -> Iterator[Diagnostic]:
    """Those of `values` of which nobody can tell what a rank has, where the stream goes in slices."""
    places, where = _places(sharding), "strategies.pipeline.split_points"
    if not places:
        return
    axes, fix = (
        " and ".join(places),
        "choose cuts that it does not cross, or remove the strategy that cuts the stream",
    )
    values = list(values)
    if not sharding.sequence_sliced_calls:
        known = {name for name, _ in _cuts(sharding, values)}
        for value in (value for value in values if value.name not in known):
            shape = " x ".join(str(each) if not more else "rows" for each, more in value.dim_sizes)
            text = f"the width goes in slices along {axes}, and '{value}' ({shape}) crosses between parts"
            yield Diagnostic(f"{text}: which slice of it a rank has is not known", fix, where)
        return
    given = _given(sharding)
    for visit in dict.fromkeys(value.producer for value in values):
        alike = [value for value in values if value.producer == visit and _is_stream(value, given)]
        if len(alike) > 1:
            names = " and ".join(f"'{value}'" for value in alike)
            text = f"tokens go in slices along {axes}, and '{visit}' gives out {names}, which look alike: which is the stream"
            yield Diagnostic(f"{text} is not known", fix, where)


def _cuts(sharding: ShardingPlan, values: Iterable[StageValue]) -> Iterator[tuple[str, AxesSplits]]:
    """How those of `values` are divided of which ranks have slices, by name."""
    places, given, widths, heads = _places(sharding), _given(sharding), _widths(sharding), _heads(sharding)
    axes = _axes(sharding)
    for value in values:
        by_head = (
            heads.get((value.producer, value.dim_sizes[1][0]))
            if len(value.dim_sizes) == PER_HEAD_NDIM and not value.op
            else None
        )
        if axes and by_head is not None:
            yield value.name, ((axes, by_head),)
        elif places and (
            _is_stream(value, given)
            if sharding.sequence_sliced_calls
            else bool(value.dim_sizes) and value.dim_sizes[-1] in widths
        ):
            yield value.name, tuple(_by_dim(places, value.dim_sizes))


def _axes(sharding: ShardingPlan) -> tuple[str, ...]:
    """The axes along which there are several ranks with slices of weights."""
    return tuple(axis for axis in sharding.param_slice_axes if sharding.mesh.size(axis) > 1)


def _by_dim(
    placements: Mapping[str, Placement], dims: DimSizes
) -> Iterator[tuple[tuple[str, ...], DimSplit]]:
    found = sorted(
        (place.dim % len(dims), AXES.index(axis))
        for axis, place in placements.items()
        if place.dim is not None
    )
    for dim, along in groupby(found, key=lambda each: each[0]):
        size, _ = dims[dim]
        yield tuple(AXES[number] for _, number in along), DimSplit(dim, size, (size,))


def _places(sharding: ShardingPlan) -> Mapping[str, Placement]:
    """Where what is the stream lies, by axis, along those on which there are several ranks with slices of it."""
    return {
        axis: place
        for axis, place in sharding.residual_layout.placements
        if place.letter == "S" and sharding.mesh.size(axis) > 1
    }


def _given(sharding: ShardingPlan) -> Mapping[str, DimSizes]:
    """The visits that give out slices of tokens, each with the dims of the whole stream."""
    ends, anatomy = sharding.sequence_slice_ends(), (sharding.all_ranks or sharding).model_spec
    going = [
        each for each in anatomy.residual_flows if each.block_call in ends and not ends[each.block_call][1]
    ]
    return {each.block_call: ((0, 1), (each.num_tokens, 0), (each.hidden_size, 0)) for each in going}


def _is_stream(value: StageValue, given: Mapping[str, DimSizes]) -> bool:
    return not value.op and given.get(value.producer) == value.dim_sizes


def _widths(sharding: ShardingPlan) -> frozenset[tuple[int, int]]:
    return frozenset(
        (each.hidden_size, 0) for each in (sharding.all_ranks or sharding).model_spec.residual_flows
    )


def _heads(sharding: ShardingPlan) -> Mapping[tuple[str, int], DimSplit]:
    """Visits in which modules hold the rank's own number of heads, with the number of all: how heads are divided there."""
    anatomy, found = (sharding.all_ranks or sharding).model_spec, {}
    for number in (
        number
        for number in anatomy.size_attributes
        if number.divisor_split is None and len(number.dim_split.sections) == 1
    ):
        for visit in anatomy.block_calls:
            block = block_of(visit)
            if number.module == block or number.module.startswith(f"{block}."):
                (count,) = number.dim_split.sections
                found[visit, count] = DimSplit(
                    1,
                    number.dim_split.num_units,
                    (count,),
                    num_heads=number.dim_split.num_heads,
                    per_head_numel=number.dim_split.per_head_numel,
                )
    return found
