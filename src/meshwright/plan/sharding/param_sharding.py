"""Where one weight lives, and which weights travel together."""

from dataclasses import dataclass, replace

from meshwright.plan.model_spec.model_spec import Weight
from meshwright.plan.sharding.flat_param import Grain
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.placement import FLAT, Layout, P, Place, R, move_name


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

    def used_apart(self, axis: str) -> "Home":
        """This home where each rank along `axis` uses the weight on something of its own: R, so its gradient is P."""
        return replace(self, layout=self.layout.with_place(axis, R), grad=self.grad.with_place(axis, P))

    def moves(self) -> dict[str, str]:
        """Per axis, the act that brings the gradient from where backward leaves it to where it is wanted."""
        axes = {axis for axis, _ in (*self.pending.places, *self.grad.places)}
        names = {axis: move_name(self.pending.place(axis), self.grad.place(axis)) for axis in AXES if axis in axes}
        return {axis: name for axis, name in names.items() if name != "keep"}

    @property
    def flat(self) -> tuple[str, ...]:
        """The axes over which it is cut in the arena of its bundle, outermost first; none where it lies in no arena."""
        cut = {axis for axis, place in (*self.grad.places, *self.stored.places) if place.dim == FLAT}
        return tuple(axis for axis in AXES if axis in cut) if cut else ()

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
    several visits, are a bundle of their own. `homes` are all alike but for the weight. `sharing` are the indices along pp of the
    ranks that have a part of their gradient each; none where one rank has it all. `uneven`: ranks have slices of unlike sizes.
    """

    name: str
    homes: tuple[Home, ...]
    last: str | None
    sharing: tuple[int, ...] = ()
    uneven: bool = False

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
