"""Where everything lives: the layouts of all that a step holds, and the bundles that follow from them.

A weight that every rank uses on its own samples is R along the data axes; its gradient, the adjoint, is P there: each
rank holds a summand. `grad` is the place in which the optimizer wants the gradient, and steps the weight. What lies between
the two is read from the move table, and the program must contain it. `stored` is where a weight is between its uses; what is
stored or stepped S(flat) lies in an arena. `Space.at` is what the rank at a coordinate sees: there, weights that are cut along a
dim of theirs have the shape of its slice, and all sizes that follow are its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from meshwright.core.anatomy import Anatomy, Call, Weight
from meshwright.core.arena import Arena, Grain
from meshwright.core.cut import Side
from meshwright.core.layout import FLAT, I, Layout, Place, move_name
from meshwright.core.mesh import AXES, Mesh


@dataclass(frozen=True)
class Home:
    """Where one logical parameter lives, and the place in which the optimizer takes its gradient.

    `layout` is what a block finds when it uses the weight, `stored` what is kept of it at other times. `grain` is how finely
    the optimizer lets it be cut.
    """

    weight: Weight
    layout: Layout = Layout()
    grad: Layout = Layout()
    stored: Layout = Layout()
    grain: Grain = "element"

    @property
    def pending(self) -> Layout:
        """The gradient as backward leaves it: the adjoint of the weight's layout."""
        return Layout.of({axis: place.adjoint for axis, place in self.layout.places})

    def moves(self) -> dict[str, str]:
        """Per axis, the act that brings the gradient from where backward leaves it to where it is wanted."""
        axes = {axis for axis, _ in (*self.pending.places, *self.grad.places)}
        names = {axis: move_name(self.pending.place(axis), self.grad.place(axis)) for axis in AXES if axis in axes}
        return {axis: name for axis, name in names.items() if name != "keep"}

    @property
    def flat(self) -> tuple[str, ...]:
        """The axes over which it is cut in the arena of its bundle, outermost first; none where it lies in no arena."""
        cut = (*self.grad.places, *self.stored.places)
        return tuple(axis for axis in AXES if (axis, Place("S", FLAT)) in cut)

    @property
    def in_shards(self) -> bool:
        """Whether a rank keeps no more of it than a shard between its uses."""
        return any(place == Place("S", FLAT) for _, place in self.stored.places)

    @property
    def cut(self) -> dict[str, int]:
        """The axes along which each rank has a slice of it, and the dim that is sliced."""
        return {axis: place.dim for axis, place in self.layout.places if place.dim is not None}

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes along whose slices one rank steps all of it (core/owners.py); none where each steps its own."""
        cut = self.cut if self.weight.trainable and self.grain != "element" else {}
        return tuple(axis for axis in AXES if axis in cut)


@dataclass(frozen=True)
class Bundle:
    """Weights whose gradients are complete at the same time and summed over the same axes, so they travel together.

    `last` is the visit whose backward completes them; None means the last backward of the step. Tied weights, used by
    several visits, are a bundle of their own. `homes` are all alike but for the weight.
    """

    name: str
    homes: tuple[Home, ...]
    last: str | None

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights, in the model's order."""
        return tuple(home.weight for home in self.homes)

    @property
    def names(self) -> tuple[str, ...]:
        """Their logical names."""
        return tuple(weight.name for weight in self.weights)

    @property
    def visits(self) -> tuple[str, ...]:
        """The visits that use them."""
        return self.homes[0].weight.visits

    @property
    def trainable(self) -> bool:
        """Whether they have gradients."""
        return self.homes[0].weight.trainable

    @property
    def numel(self) -> int:
        """The number of elements of one copy."""
        return sum(weight.numel for weight in self.weights)


@dataclass(frozen=True)
class Space:
    """The layouts of samples, of the stream between blocks, of logits, and of weights on a mesh. Unnamed axes are invariant.

    Where the stream goes in slices of tokens, it does so `through` the visits that are named. Along the axes `led`, the rank at
    index 0 reads the samples, takes the loss and steps for all the others. `whole` is the space of all ranks, where this one is
    that of a coordinate (`at`).
    """

    mesh: Mesh
    anatomy: Anatomy
    homes: tuple[Home, ...]
    tokens: Layout = Layout()
    stream: Layout = Layout()
    logits: Layout = Layout()
    through: tuple[str, ...] = ()
    anew: bool = False
    led: tuple[str, ...] = ()
    whole: "Space | None" = None
    coordinate: tuple[tuple[str, int], ...] = field(default=(), compare=False)

    @classmethod
    def one_device(cls, mesh: Mesh, anatomy: Anatomy) -> "Space":
        """Every tensor invariant: what each rank would hold if it trained alone."""
        return cls(mesh, anatomy, tuple(Home(weight) for weight in anatomy.weights))

    def with_tokens(self, axis: str, place: Place) -> "Space":
        """This space with the samples at `place` along `axis`."""
        return replace(self, tokens=self.tokens.with_place(axis, place))

    def with_stream(self, axis: str, place: Place, through: tuple[str, ...] = (), *, anew: bool = False) -> "Space":
        """This space with what goes from block to block at `place` along `axis`: `through` these visits alone, if any.

        `anew`: layers keep it as it lies for backward, not what it became for them.
        """
        return replace(self, stream=self.stream.with_place(axis, place), through=through, anew=anew)

    def stream_for(self, calls: Iterable[Call], axis: str) -> Place:
        """Where the stream lies along `axis` when `calls` take it in: it is whole for those that do not take its slices."""
        return self.stream.place(axis) if not self.through or all(map(self.takes_slices, calls)) else I

    def takes_slices(self, call: Call) -> bool:
        """Whether `call` takes in the stream where that goes through visits in slices; a head that is a block may too."""
        if call.visit in self.through or not call.streams:
            return call.streams
        behind = [passage.visit for passage in self.anatomy.passages if passage.onward == call.visit]
        return call.role == "head" and call.name == call.visit and any(visit in self.through for visit in behind)

    def borders(self, visit: str) -> tuple[bool, bool]:
        """Whether the stream is cut into slices where `visit` takes it in, and put together again where it gives it out."""
        passage = next((each for each in self.anatomy.passages if each.visit == visit), None)
        if passage is None or visit not in self.through:
            return False, False
        cut = {name for home in self.homes if home.cut for name in (home.weight.name, *home.weight.aliases)}
        taken = any(
            self.takes_slices(call) and f"{call.name}.weight" in cut
            for call in self.anatomy.calls
            if call.visit == passage.onward and call.role == "head"
        )
        return passage.source not in self.through, passage.onward not in self.through and not taken

    def with_homes(self, change: Callable[[Home], Home], *, frozen: bool = False) -> "Space":
        """This space with every trainable weight's home changed by `change`; with `frozen`, those of all others instead."""
        return replace(self, homes=tuple(change(home) if home.weight.trainable != frozen else home for home in self.homes))

    def with_logits(self, axis: str, place: Place) -> "Space":
        """This space with what a head hands to the loss at `place` along `axis`."""
        return replace(self, logits=self.logits.with_place(axis, place))

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold different samples, outermost first."""
        split = self.tokens.axes("S")
        return tuple(axis for axis in AXES if axis in split)

    @property
    def norm_axes(self) -> tuple[str, ...]:
        """The axes along which ranks step different elements, so that no rank knows the norm of all gradients."""
        cut = {axis for home in self.homes if home.weight.trainable for axis in home.grad.axes("S")}
        return tuple(axis for axis in AXES if axis in cut)

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have slices of weights, outermost first."""
        cut = {axis for home in self.homes for axis in home.cut}
        return tuple(axis for axis in AXES if axis in cut)

    def told_first(self, coordinate: Mapping[str, int]) -> Iterator[str]:
        """The weights that count at `coordinate` in what is added up along `cut_axes`: nobody else tells the same of them."""
        away = {axis for axis in self.cut_axes if coordinate[axis]}
        yield from (home.weight.name for home in self.homes if away <= home.cut.keys())

    def held_first(self, coordinate: Mapping[str, int]) -> Iterator[str]:
        """The weights of which the rank at `coordinate` is the first to step its elements: those that count in the norm there."""
        away = [axis for axis in self.norm_axes if coordinate[axis]]
        yield from (home.weight.name for home in self.homes if set(away) <= set(home.grad.axes("S")))

    def at(self, coordinate: Mapping[str, int]) -> "Space":
        """This space as the rank at `coordinate` sees it."""
        logical = self.whole or self
        homes = tuple(logical._sliced(home, coordinate) for home in logical.homes)
        return replace(logical, homes=homes, whole=logical, coordinate=tuple(coordinate.items()))

    def range_of(self, name: str, axis: str) -> tuple[int, int]:
        """Of the weight `name`, which is cut along `axis`, the first index and the one behind the last of what this rank has."""
        home = next(home for home in (self.whole or self).homes if home.weight.name == name)
        (found,) = home.weight.cut(home.cut[axis]).ranges(dict(self.coordinate)[axis], self.mesh.size(axis))
        return found

    def sides(self, home: Home, coordinate: Mapping[str, int]) -> tuple[Side, ...]:
        """How `home` is cut, dim by dim, and which slice the rank at `coordinate` has."""
        found = []
        for dim in dict.fromkeys(home.cut[axis] for axis in AXES if axis in home.cut):
            axes, index = tuple(axis for axis in AXES if home.cut.get(axis) == dim), 0
            for axis in axes:
                index = index * self.mesh.size(axis) + coordinate[axis]
            found.append(Side(axes, home.weight.cut(dim), self.mesh.extent(axes), index))
        return tuple(found)

    def _sliced(self, home: Home, coordinate: Mapping[str, int]) -> Home:
        shape = home.weight.shape
        for side in self.sides(home, coordinate):
            shape = side.cut.local(shape, side.index, side.ranks)
        return home if shape == home.weight.shape else replace(home, weight=replace(home.weight, shape=shape))

    def local(self, shape: tuple[int, ...], layout: Layout, coordinate: Mapping[str, int]) -> tuple[int, ...]:
        """The shape that the rank at `coordinate` holds of a tensor: dims split as evenly as can be, larger first."""
        sizes = list(shape)
        for axis in AXES:
            place = layout.place(axis)
            if place.dim is not None:
                count, index = self.mesh.size(axis), coordinate[axis]
                sizes[place.dim] = sizes[place.dim] // count + (index < sizes[place.dim] % count)
        return tuple(sizes)

    def bundles(self, *, frozen: bool = False) -> tuple[Bundle, ...]:
        """The bundles in the order in which backward completes them; with `frozen`, those of weights without gradients."""
        found: dict[tuple, list[Home]] = {}
        uneven = {home.weight.name for home in (self.whole or self).homes if self._uneven(home)}
        for home in self.homes:
            if home.weight.trainable != frozen:
                weight, grain = home.weight, (home.grain, home.apart) if home.flat else ()
                apart = weight.name in uneven
                key = (weight.visits, weight.dtype, tuple(home.moves().items()), home.flat, home.in_shards, grain, apart)
                found.setdefault(key, []).append(home)
        bundles = [self._bundle(homes, uneven=homes[0].weight.name in uneven) for homes in found.values()]
        return tuple(sorted(bundles, key=self._completion))

    def all_bundles(self) -> tuple[Bundle, ...]:
        """The bundles that are trained, then the frozen ones."""
        return (*self.bundles(), *self.bundles(frozen=True))

    def arenas(self) -> dict[str, Arena]:
        """The arenas, by the name of their bundle: those of bundles that are stepped or stored S(flat)."""
        found, whole = {}, {home.weight.name: home.weight.numel for home in (self.whole or self).homes}
        for bundle in self.all_bundles():
            axes = bundle.homes[0].flat
            if axes:
                ranks, grain = self.mesh.extent(axes), bundle.homes[0].grain
                found[bundle.name] = Arena.of(bundle.name, bundle.weights, axes, ranks, grain, whole)
        return found

    def unreduced(self) -> Iterator[Home]:
        """The weights whose gradients would reach the optimizer as summands."""
        return (home for home in self.homes if home.weight.trainable and home.grad.axes("P"))

    def _uneven(self, home: Home) -> bool:
        """Whether ranks keep slices of unlike sizes in an arena: one of their own, so that what is whole lies alike on all.

        Where it lies decides the last bit of products and steps, and copies must stay equal to the bit. Owners step whole ones.
        """
        sizes = {axis: home.weight.cut(dim).units for axis, dim in home.cut.items()}
        return bool(home.flat) and not home.apart and any(units % self.mesh.size(axis) for axis, units in sizes.items())

    def _bundle(self, homes: list[Home], *, uneven: bool) -> Bundle:
        first = homes[0]
        name = "+".join(first.weight.visits) + ("" if first.weight.trainable else " frozen")
        name += f" {first.weight.dtype}" if first.weight.dtype else ""
        apart = [axis for axis in first.moves() if axis not in self.data_axes]
        name += f" over {' '.join(apart)}" if apart else ""
        name += " in uneven slices" if uneven else ""
        if first.flat and first.grain != "element":
            name += f" by owner along {' '.join(first.apart)}" if first.apart else f" by {first.grain}"
        weights = [home.weight for home in homes]
        return Bundle(name, tuple(homes), self.anatomy.last_backward(weights))

    def _completion(self, bundle: Bundle) -> int:
        visits = self.anatomy.visits
        return len(visits) if bundle.last is None else len(visits) - 1 - visits.index(bundle.last)
