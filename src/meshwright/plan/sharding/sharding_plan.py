"""Where everything lives: the layouts of all that a step holds, and the bundles that follow from them.

A weight that every rank uses on its own samples is R along the data axes; its gradient, the adjoint, is P there: each
rank holds a summand. `grad` is the place in which the optimizer wants the gradient, and steps the weight. What lies between
the two is read from the move table, and the program must contain it. `stored` is where a weight is between its uses; what is
stored or stepped S(flat) lies in an arena. `Space.at` is what the rank at a coordinate sees: there, weights that are cut along a
dim of theirs have the shape of its slice, and all sizes that follow are its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from meshwright.plan.model_spec.dim_split import Side
from meshwright.plan.model_spec.layer_calls import Call
from meshwright.plan.model_spec.model_spec import Anatomy, Weight
from meshwright.plan.model_spec.sequence_info import Deal
from meshwright.plan.model_spec.stage_boundaries import Part
from meshwright.plan.sharding.flat_param import Arena
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.plan.sharding.param_sharding import Bundle, Home
from meshwright.plan.sharding.placement import I, Layout, Place, R


@dataclass(frozen=True)
class Space:
    """The layouts of samples, of the stream between blocks, of logits, and of weights on a mesh. Unnamed axes are invariant.

    Where the stream goes in slices of tokens, it does so `through` the visits that are named. Along the axes `led`, the rank at
    index 0 reads the samples, takes the loss and steps for all the others. Along pp, the rank at each index runs the visits that
    `stages` name for it, and holds their weights; empty: all of them. The parts that they consist of begin with `cuts`, but for
    the first one. `whole` is the space of all ranks, where this one is that of a coordinate (`at`). Where ranks have some of the
    tokens of a sample each, those are dealt as `deal` says. LOSS makes logits, and looks at them, in so many `pieces` of tokens.
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
    stages: tuple[tuple[str, ...], ...] = ()
    cuts: tuple[str, ...] = ()
    deal: Deal | None = None
    pieces: int = 1
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
        behind = [passage.visit for passage in (self.whole or self).anatomy.passages if passage.onward == call.visit]
        return call.role == "head" and call.name == call.visit and any(visit in self.through for visit in behind)

    def borders(self) -> dict[str, tuple[bool, bool]]:
        """Of each visit through which the stream goes in slices, whether those are cut where it begins, and end with it."""
        logical = self.whole or self  # what comes behind a part decides what the part hands on
        cut = {name for home in logical.homes if home.cut for name in home.weight.names}
        heads = [call for call in logical.anatomy.calls if call.role == "head" and f"{call.name}.weight" in cut]
        slices = {*self.through, *(call.visit for call in heads if self.takes_slices(call))}
        through = [passage for passage in logical.anatomy.passages if passage.visit in self.through]
        return {each.visit: (each.source not in self.through, each.onward not in slices) for each in through}

    def with_homes(self, change: Callable[[Home], Home], *, frozen: bool = False) -> "Space":
        """This space with every trainable weight's home changed by `change`; with `frozen`, those of all others instead."""
        return replace(self, homes=tuple(change(home) if home.weight.trainable != frozen else home for home in self.homes))

    def with_logits(self, axis: str, place: Place) -> "Space":
        """This space with what a head hands to the loss at `place` along `axis`."""
        return replace(self, logits=self.logits.with_place(axis, place))

    def with_stages(self, stages: Iterable[tuple[str, ...]], cuts: tuple[str, ...]) -> "Space":
        """This space with the visits of `stages` on the ranks along pp; what several of them use is summed over those."""
        staged = replace(self, stages=tuple(stages), cuts=cuts)

        def shared(home: Home) -> Home:
            tied = len(staged.users(home.weight)) > 1
            return replace(home, layout=home.layout.with_place("pp", R), grad=home.grad.with_place("pp", I)) if tied else home

        return staged.with_homes(shared)

    def users(self, weight: Weight) -> tuple[int, ...]:
        """The indices along pp of the ranks that use `weight`, which is one of the whole model, in a block or in glue."""
        needing = set((self.whole or self).anatomy.needing(weight)) if self.stages else set()
        return tuple(i for i, stage in enumerate(self.stages) if not needing.isdisjoint(stage)) or (0,)

    @property
    def logical(self) -> tuple[Home, ...]:
        """The homes of what this rank holds, as all ranks see them: before it was cut into slices."""
        own = {home.weight.name for home in self.homes}
        return tuple(home for home in (self.whole or self).homes if home.weight.name in own)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the model, in order of the forward; none where ranks run it whole, or nothing is known of its borders."""
        borders = (self.whole or self).anatomy.borders
        return borders.parts(self.cuts) if self.stages and borders is not None else ()

    @property
    def takes_loss(self) -> bool:
        """Whether this rank runs what the loss follows."""
        return (self.whole or self).anatomy.visits[-1] in self.anatomy.visits

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold different samples, outermost first."""
        return tuple(axis for axis in AXES if self.tokens.place(axis).dim == 0)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold different tokens of the same samples, outermost first."""
        return tuple(axis for axis in AXES if self.tokens.place(axis).dim == 1)

    def with_theirs(self, *axes: str) -> tuple[str, ...]:
        """Where gradients are summed along `axes`: what ranks have of the tokens of a sample adds up like samples do."""
        return tuple(axis for axis in AXES if axis in axes or axis in self.token_axes)

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """The axes along which gradients are summands, for ranks have other samples, or other tokens of them."""
        return self.with_theirs(*self.data_axes)

    @property
    def norm_axes(self) -> tuple[str, ...]:
        """The axes along which ranks step different elements, so that no rank knows the norm of all gradients."""
        cut = {axis for home in (self.whole or self).homes if home.weight.trainable for axis in home.grad.axes("S")}
        return tuple(axis for axis in AXES if axis in cut or (axis == "pp" and self.stages))

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have slices of weights, outermost first."""
        cut = {axis for home in (self.whole or self).homes for axis in home.cut}
        return tuple(axis for axis in AXES if axis in cut)

    @property
    def weight_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have other weights, or other slices of them, for the same samples."""
        return tuple(axis for axis in AXES if axis in self.cut_axes or (axis == "pp" and self.stages))

    def told_first(self, coordinate: Mapping[str, int]) -> Iterator[str]:
        """The weights that count at `coordinate` in what is added up along `weight_axes`: nobody else tells the same of them."""
        away = {axis for axis in self.cut_axes if coordinate[axis]}
        yield from (home.weight.name for home in self._led_by(coordinate) if away <= home.cut.keys())

    def held_first(self, coordinate: Mapping[str, int]) -> Iterator[str]:
        """The weights of which the rank at `coordinate` is the first to step its elements: those that count in the norm there."""
        away = {axis for axis in self.norm_axes if coordinate[axis] and axis != "pp"}
        yield from (home.weight.name for home in self._led_by(coordinate) if away <= set(home.grad.axes("S")))

    def _led_by(self, coordinate: Mapping[str, int]) -> Iterator[Home]:
        """The weights of which the rank at `coordinate` is the first along pp that uses them."""
        for home, logical in zip(self.homes, self.logical, strict=True):
            if not self.stages or self.users(logical.weight)[0] == coordinate["pp"]:
                yield home

    def stage(self, index: int) -> "Space":
        """This space as the ranks at `index` along pp see it, at the same place along all other axes."""
        return self.at({**dict(self.coordinate), "pp": index})

    def at(self, coordinate: Mapping[str, int]) -> "Space":
        """This space as the rank at `coordinate` sees it."""
        logical, anatomy = self.whole or self, (self.whole or self).anatomy
        homes = logical.homes
        if logical.stages:
            anatomy = anatomy.within(logical.stages[coordinate["pp"]])
            own = {weight.name: weight.visits for weight in anatomy.weights}
            mine = (home for home in homes if home.weight.name in own)
            homes = tuple(replace(home, weight=replace(home.weight, visits=own[home.weight.name])) for home in mine)
        homes = tuple(logical._sliced(home, coordinate) for home in homes)
        return replace(logical, anatomy=anatomy, homes=homes, whole=logical, coordinate=tuple(coordinate.items()))

    def range_of(self, name: str, axis: str) -> tuple[int, int]:
        """Of the weight `name`, which is cut along `axis`, the first index and the one behind the last of what this rank has."""
        home = next(home for home in (self.whole or self).homes if home.weight.name == name)
        (found,) = home.weight.cut(home.cut[axis]).ranges(dict(self.coordinate)[axis], self.mesh.size(axis))
        return found

    def sides(self, home: Home, coordinate: Mapping[str, int]) -> tuple[Side, ...]:
        """How `home` is cut, dim by dim, and which slice the rank at `coordinate` has."""
        found = []
        for dim in dict.fromkeys(home.cut[axis] for axis in AXES if axis in home.cut):
            axes = tuple(axis for axis in AXES if home.cut.get(axis) == dim)
            found.append(Side(axes, home.weight.cut(dim), self.mesh.extent(axes), self.mesh.index(coordinate, axes)))
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
        """The bundles in the order in which backward completes them; with `frozen`, those of weights without gradients.

        What ranks along pp sum is in bundles of the same weights on all of these: of those that the same visits of all ranks use.
        """
        found: dict[tuple, list[Home]] = {}
        whole = self.logical
        logical = {home.weight.name: home.weight for home in whole}
        uneven = {home.weight.name for home in whole if self._uneven(home)}
        for home in self.homes:
            if home.weight.trainable != frozen:
                weight, grain = home.weight, (home.grain, home.apart) if home.flat else ()
                apart, moves = weight.name in uneven, home.moves()
                using = (logical[weight.name].visits, self.users(logical[weight.name])) if "pp" in moves else (weight.visits, ())
                key = (using, weight.dtype, tuple(moves.items()), home.flat, home.in_shards, grain, apart)
                found.setdefault(key, []).append(home)
        bundles = [self._bundle(homes, *key[0], uneven=homes[0].weight.name in uneven) for key, homes in found.items()]
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
        """Whether ranks keep slices of unlike sizes in an arena, or sum them in a bucket: one of their own.

        So what is whole lies alike on all. Where it lies decides the last bit of products, sums and steps, and copies must stay
        equal to the bit. Owners step whole ones.
        """
        sizes = {axis: home.weight.cut(dim).units for axis, dim in home.cut.items()}
        return (
            bool(home.flat or home.moves())
            and not home.apart
            and any(units % self.mesh.size(axis) for axis, units in sizes.items())
        )

    def _bundle(self, homes: list[Home], visits: tuple[str, ...], users: tuple[int, ...], *, uneven: bool) -> Bundle:
        first = homes[0]
        name = "+".join(visits) + ("" if first.weight.trainable else " frozen")
        name += f" {first.weight.dtype}" if first.weight.dtype else ""
        apart = [axis for axis in first.moves() if axis not in self.summed_axes]
        apart = [f"pp {'+'.join(map(str, users))}" if axis == "pp" else axis for axis in apart]
        name += f" over {' '.join(apart)}" if apart else ""
        name += " in uneven slices" if uneven else ""
        if first.flat and first.grain != "element":
            name += f" by owner along {' '.join(first.apart)}" if first.apart else f" by {first.grain}"
        weights = [home.weight for home in homes]
        return Bundle(name, tuple(homes), self.anatomy.last_backward(weights), users, uneven)

    def _completion(self, bundle: Bundle) -> int:
        visits = self.anatomy.visits
        return len(visits) if bundle.last is None else len(visits) - 1 - visits.index(bundle.last)
