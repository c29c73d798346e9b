"""Where one weight lives, and which weights travel together."""

from dataclasses import dataclass, replace

from meshwright.plan.model_spec.model_spec import ParamSpec
from meshwright.plan.sharding.flat_param import ShardAlignment
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.placement import FLAT, Layout, P, Placement, R, redistribution_name


@dataclass(frozen=True)
class ParamSharding:
    """Where one logical parameter lives, and the place in which the optimizer takes its gradient.

    `layout` is what a block finds when it uses the weight, `stored` what is kept of it at other times. `grain` is how finely
    the optimizer lets it be cut.
    """

    param: ParamSpec
    layout: Layout = Layout()
    grad_layout: Layout = Layout()
    storage_layout: Layout = Layout()
    shard_alignment: ShardAlignment = "element"

    @property
    def unreduced_grad_layout(self) -> Layout:
        """The gradient as backward leaves it: the adjoint of the weight's layout."""
        return Layout.from_dict({axis: place.adjoint for axis, place in self.layout.placements})

    def with_partial_grad(self, axis: str) -> "ParamSharding":
        """This home where each rank along `axis` uses the weight on something of its own: R, so its gradient is P."""
        return replace(
            self,
            layout=self.layout.with_placement(axis, R),
            grad_layout=self.grad_layout.with_placement(axis, P),
        )

    def grad_reductions(self) -> dict[str, str]:
        """Per axis, the act that brings the gradient from where backward leaves it to where it is wanted."""
        axes = {axis for axis, _ in (*self.unreduced_grad_layout.placements, *self.grad_layout.placements)}
        names = {
            axis: redistribution_name(
                self.unreduced_grad_layout.placement(axis), self.grad_layout.placement(axis)
            )
            for axis in AXES
            if axis in axes
        }
        return {axis: name for axis, name in names.items() if name != "keep"}

    @property
    def flat_shard_axes(self) -> tuple[str, ...]:
        """The axes over which it is cut in the arena of its bundle, outermost first; none where it lies in no arena."""
        cut = {
            axis
            for axis, place in (*self.grad_layout.placements, *self.storage_layout.placements)
            if place.dim == FLAT
        }
        return tuple(axis for axis in AXES if axis in cut) if cut else ()

    @property
    def is_stored_sharded(self) -> bool:
        """Whether a rank keeps no more of it than a shard between its uses."""
        return any(place == Placement("S", FLAT) for _, place in self.storage_layout.placements)

    @property
    def sliced_dims(self) -> dict[str, int]:
        """The axes along which each rank has a slice of it, and the dim that is sliced."""
        return {axis: place.dim for axis, place in self.layout.placements if place.dim is not None}

    @property
    def owner_axes(self) -> tuple[str, ...]:
        """The axes along whose slices one rank steps all of it (core/owners.py); none where each steps its own."""
        cut = self.sliced_dims if self.param.trainable and self.shard_alignment != "element" else {}
        return tuple(axis for axis in AXES if axis in cut)


@dataclass(frozen=True)
class ParamGroup:
    """Weights whose gradients are complete at the same time and summed over the same axes, so they travel together.

    `last` is the visit whose backward completes them; None means the last backward of the step. Tied weights, used by
    several visits, are a bundle of their own. `homes` are all alike but for the weight. `sharing` are the indices along pp of the
    ranks that have a part of their gradient each; none where one rank has it all. `uneven`: ranks have slices of unlike sizes.
    """

    name: str
    param_shardings: tuple[ParamSharding, ...]
    last_block_call: str | None
    pp_ranks: tuple[int, ...] = ()
    is_uneven: bool = False

    @property
    def params(self) -> tuple[ParamSpec, ...]:
        """The weights, in the model's order."""
        return tuple(home.param for home in self.param_shardings)

    @property
    def names(self) -> tuple[str, ...]:
        """Their logical names."""
        return tuple(weight.name for weight in self.params)

    @property
    def block_calls(self) -> tuple[str, ...]:
        """The visits that use them."""
        return self.param_shardings[0].param.block_calls

    @property
    def trainable(self) -> bool:
        """Whether they have gradients."""
        return self.param_shardings[0].param.trainable

    @property
    def numel(self) -> int:
        """The number of elements of one copy."""
        return sum(weight.numel for weight in self.params)
