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

from meshwright.plan.job.errors import Fault
from meshwright.plan.model_spec.dim_split import Cut, Side
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.model_spec.stage_boundaries import Value
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.placement import Place
from meshwright.plan.sharding.sharding_plan import Space

BY_HEAD = 4  # dims of a tensor that is one table per head: rows, heads, queries, keys
Cuts = tuple[tuple[tuple[str, ...], Cut], ...]  # axes, and how a dim is divided along all of those together
Dims = tuple[tuple[int, int], ...]


class Crossed:
    """What the rank that sees `space` has of `values`: which of them go in slices, their sizes in the plan tell."""

    def __init__(self, space: Space, values: Iterable[Value]) -> None:
        self._space, self._cuts, self._axes = space, dict(_cuts(space, values)), _axes(space)

    def shape(self, value: Value, rows: int) -> tuple[int, ...]:
        """The shape of what this rank has of `value`, whose rows may have another length than the plan's, for so many rows."""
        space, mesh, shape = self._space, self._space.mesh, value.shape(rows)
        coordinate = dict(space.coordinate)
        if space.deal is not None and value.along is not None:
            own = space.deal.run(shape[value.along], mesh.index(coordinate, space.token_axes))
            shape = (*shape[: value.along], own, *shape[value.along + 1 :])
        for axes, cut in self._cuts.get(value.name, ()):
            size = shape[cut.dim]
            if sum(cut.sections) != size:  # a rank's own tokens, or rows of another length than the plan's
                cut = Cut(cut.dim, size, (size,))
            side = Side(axes, cut, mesh.extent(axes), mesh.index(coordinate, axes))
            shape = side.cut.local(shape, side.index, side.ranks)
        return shape

    def looks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a value of `shape` has for glue on this rank: where the width goes in slices, that of its own."""
        places = _places(self._space)
        if not places or self._space.through or (*shape[-1:], 0) not in _widths(self._space):
            return shape
        coordinate = dict(self._space.coordinate)
        for axes, cut in _by_dim(places, tuple((each, 0) for each in shape)):
            side = Side(axes, cut, self._space.mesh.extent(axes), self._space.mesh.index(coordinate, axes))
            shape = side.cut.local(shape, side.index, side.ranks)
        return shape

    def alike(self, value: Value) -> tuple[str, ...]:
        """The axes along which ranks have slices of weights, and all the same of `value`."""
        cut = {axis for axes, _ in self._cuts.get(value.name, ()) for axis in axes}
        return tuple(axis for axis in self._axes if axis not in cut)


def crossed_faults(space: Space, values: Iterable[Value]) -> Iterator[Fault]:
    """Those of `values` of which nobody can tell what a rank has, where the stream goes in slices."""
    places, where = _places(space), "strategies.pipeline.cuts"
    if not places:
        return
    axes, fix = " and ".join(places), "choose cuts that it does not cross, or remove the strategy that cuts the stream"
    values = list(values)
    if not space.through:
        known = {name for name, _ in _cuts(space, values)}
        for value in (value for value in values if value.name not in known):
            shape = " x ".join(str(each) if not more else "rows" for each, more in value.dims)
            text = f"the width goes in slices along {axes}, and '{value}' ({shape}) crosses between parts"
            yield Fault(f"{text}: which slice of it a rank has is not known", fix, where)
        return
    given = _given(space)
    for visit in dict.fromkeys(value.made for value in values):
        alike = [value for value in values if value.made == visit and _is_stream(value, given)]
        if len(alike) > 1:
            names = " and ".join(f"'{value}'" for value in alike)
            text = f"tokens go in slices along {axes}, and '{visit}' gives out {names}, which look alike: which is the stream"
            yield Fault(f"{text} is not known", fix, where)


def _cuts(space: Space, values: Iterable[Value]) -> Iterator[tuple[str, Cuts]]:
    """How those of `values` are divided of which ranks have slices, by name."""
    places, given, widths, heads = _places(space), _given(space), _widths(space), _heads(space)
    axes = _axes(space)
    for value in values:
        by_head = heads.get((value.made, value.dims[1][0])) if len(value.dims) == BY_HEAD and not value.op else None
        if axes and by_head is not None:
            yield value.name, ((axes, by_head),)
        elif places and (_is_stream(value, given) if space.through else bool(value.dims) and value.dims[-1] in widths):
            yield value.name, tuple(_by_dim(places, value.dims))


def _axes(space: Space) -> tuple[str, ...]:
    """The axes along which there are several ranks with slices of weights."""
    return tuple(axis for axis in space.cut_axes if space.mesh.size(axis) > 1)


def _by_dim(places: Mapping[str, Place], dims: Dims) -> Iterator[tuple[tuple[str, ...], Cut]]:
    found = sorted((place.dim % len(dims), AXES.index(axis)) for axis, place in places.items() if place.dim is not None)
    for dim, along in groupby(found, key=lambda each: each[0]):
        size, _ = dims[dim]
        yield tuple(AXES[number] for _, number in along), Cut(dim, size, (size,))


def _places(space: Space) -> Mapping[str, Place]:
    """Where what is the stream lies, by axis, along those on which there are several ranks with slices of it."""
    return {axis: place for axis, place in space.stream.places if place.letter == "S" and space.mesh.size(axis) > 1}


def _given(space: Space) -> Mapping[str, Dims]:
    """The visits that give out slices of tokens, each with the dims of the whole stream."""
    ends, anatomy = space.borders(), (space.whole or space).anatomy
    going = [each for each in anatomy.passages if each.visit in ends and not ends[each.visit][1]]
    return {each.visit: ((0, 1), (each.tokens, 0), (each.width, 0)) for each in going}


def _is_stream(value: Value, given: Mapping[str, Dims]) -> bool:
    return not value.op and given.get(value.made) == value.dims


def _widths(space: Space) -> frozenset[tuple[int, int]]:
    return frozenset((each.width, 0) for each in (space.whole or space).anatomy.passages)


def _heads(space: Space) -> Mapping[tuple[str, int], Cut]:
    """Visits in which modules hold the rank's own number of heads, with the number of all: how heads are divided there."""
    anatomy, found = (space.whole or space).anatomy, {}
    for number in (number for number in anatomy.numbers if number.over is None and len(number.cut.sections) == 1):
        for visit in anatomy.visits:
            block = block_of(visit)
            if number.module == block or number.module.startswith(f"{block}."):
                (count,) = number.cut.sections
                found[visit, count] = Cut(1, number.cut.units, (count,), heads=number.cut.heads, own=number.cut.own)
    return found
