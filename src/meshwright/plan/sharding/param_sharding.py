"""Describes the placement of one parameter, its gradient and its storage, and groups parameters that
communicate together.
"""

from dataclasses import dataclass, replace

from meshwright.plan.model_spec.model_spec import ParamSpec
from meshwright.plan.sharding.flat_param import ShardAlignment
from meshwright.plan.sharding.mesh import AXES, in_mesh_order
from meshwright.plan.sharding.tensor_placements import (
    FLAT,
    Layout,
    P,
    Placement,
    R,
    S,
    V,
    redistribution_name,
)

SCATTER = redistribution_name(P, S(FLAT))  # of a gradient to the shards that are stepped


@dataclass(frozen=True)
class ParamSharding:
    """The placements of one logical parameter.

    `layout` is its placement while a block uses it, `storage_layout` between uses, `grad_layout` the
    placement in which the optimizer takes its gradient. `shard_alignment` is how finely the optimizer lets it
    be cut. If it `is_compressed`, its gradient is summed as codes; if it `is_gathered_as_codes`, ranks gather
    it so (parallel/compression). With `owner_index`, S(flat) is not cut: the rank at that index along
    `flat_shard_axes` has all elements, and the others have none (parallel/server). With `rows_on_servers`,
    the ranks that only serve have its rows, a stretch each, and workers have none (parallel/embedding).
    """

    param: ParamSpec
    layout: Layout = Layout()
    grad_layout: Layout = Layout()
    storage_layout: Layout = Layout()
    shard_alignment: ShardAlignment = "element"
    is_compressed: bool = False
    is_gathered_as_codes: bool = False
    owner_index: int | None = None
    rows_on_servers: bool = False

    @property
    def is_coded(self) -> bool:
        """Whether ranks with copies of it must find it in equal places: codes depend on what lies beside."""
        return self.is_compressed or self.is_gathered_as_codes

    @property
    def unreduced_grad_layout(self) -> Layout:
        """The gradient as backward leaves it: the adjoint of the parameter's layout."""
        return Layout.from_dict({axis: placement.adjoint for axis, placement in self.layout.placements})

    def with_partial_grad(self, axis: str) -> "ParamSharding":
        """Returns this sharding where each rank along `axis` uses the parameter on its own data: R, so its
        gradient is P. A parameter that is sliced along it is used on the data of all; servers add up the
        gradients of their rows.
        """
        if axis in self.sliced_dims or self.rows_on_servers:
            return self
        return replace(
            self,
            layout=self.layout.with_placement(axis, R),
            grad_layout=self.grad_layout.with_placement(axis, P),
        )

    def varying(self, axis: str) -> "ParamSharding":
        """Returns this sharding where each rank along `axis` has values of its own: V, its gradient too."""
        layouts = (self.layout, self.grad_layout, self.storage_layout)
        layout, grad, stored = (each.with_placement(axis, V) for each in layouts)
        return replace(self, layout=layout, grad_layout=grad, storage_layout=stored)

    def sliced(self, axis: str, dim: int) -> "ParamSharding":
        """Returns this sharding where each rank along `axis` has a slice along `dim`, its gradient too."""
        layouts = (self.layout, self.grad_layout, self.storage_layout)
        layout, grad, stored = (each.with_placement(axis, S(dim)) for each in layouts)
        return replace(self, layout=layout, grad_layout=grad, storage_layout=stored)

    def grad_reductions(self) -> dict[str, str]:
        """Returns, per axis, the redistribution from the gradient as backward leaves it to the wanted one;
        to an owner, it is a reduce. What varies (V) is a whole gradient on each rank, and summed with none.
        Rows on servers have none: the gradients of a few come as messages, and are added there.
        """
        if self.rows_on_servers:
            return {}
        axes = {axis for axis, _ in (*self.unreduced_grad_layout.placements, *self.grad_layout.placements)}
        names = {
            axis: redistribution_name(
                self.unreduced_grad_layout.placement(axis), self.grad_layout.placement(axis)
            )
            for axis in AXES
            if axis in axes and self.unreduced_grad_layout.placement(axis) != V
        }
        if self.owner_index is not None:
            names = {axis: "reduce" if name == SCATTER else name for axis, name in names.items()}
        return {axis: name for axis, name in names.items() if name != "keep"}

    @property
    def flat_shard_axes(self) -> tuple[str, ...]:
        """The axes over which it is cut as part of a flat parameter, outermost first; empty if it is in
        none.
        """
        sliced = {
            axis
            for axis, placement in (*self.grad_layout.placements, *self.storage_layout.placements)
            if placement.dim == FLAT
        }
        return in_mesh_order(sliced)

    @property
    def is_stored_sharded(self) -> bool:
        """Whether a rank stores only a shard of it between uses (ZeRO stage 3)."""
        return any(placement == Placement("S", FLAT) for _, placement in self.storage_layout.placements)

    @property
    def sliced_dims(self) -> dict[str, int]:
        """The axes along which each rank has a slice of it, each with the sliced dim."""
        return {
            axis: placement.dim for axis, placement in self.layout.placements if placement.dim is not None
        }

    @property
    def owner_axes(self) -> tuple[str, ...]:
        """The axes along whose slices one owner updates the full matrix
        (`plan/step/matrix_owner_actions.py`); empty if each rank updates its own slice.
        """
        sliced = self.sliced_dims if self.param.trainable and self.shard_alignment != "element" else {}
        return in_mesh_order(sliced)


@dataclass(frozen=True)
class ParamGroup:
    """Parameters whose gradients are complete at the same time and reduced over the same axes, so they
    communicate together.

    `last_block_call` is the one whose backward completes them; None means the last backward of the step. Tied
    parameters, used by several block calls, form a group of their own. All `param_shardings` agree except for
    the parameter. `pp_ranks` are the ranks along pp that each have a part of the gradient; empty if one rank
    has all of it. `is_uneven`: ranks have slices of different sizes.
    """

    name: str
    param_shardings: tuple[ParamSharding, ...]
    last_block_call: str | None
    pp_ranks: tuple[int, ...] = ()
    is_uneven: bool = False

    @property
    def params(self) -> tuple[ParamSpec, ...]:
        """The parameters, in the model's order."""
        return tuple(param_sharding.param for param_sharding in self.param_shardings)

    @property
    def names(self) -> tuple[str, ...]:
        """The logical names."""
        return tuple(param.name for param in self.params)

    @property
    def block_calls(self) -> tuple[str, ...]:
        """The block calls that use them."""
        return self.param_shardings[0].param.block_calls

    @property
    def trainable(self) -> bool:
        """Whether they have gradients."""
        return self.param_shardings[0].param.trainable

    @property
    def is_compressed(self) -> bool:
        """Whether their gradients are summed as codes."""
        return self.param_shardings[0].is_compressed

    @property
    def sliced_axes(self) -> tuple[str, ...]:
        """The axes along which each rank has slices of them."""
        return in_mesh_order(self.param_shardings[0].sliced_dims)

    @property
    def numel(self) -> int:
        """The number of elements of one copy."""
        return sum(param.numel for param in self.params)
