"""Describes the placement of every tensor of a training step on the mesh, and the parameter groups that
follow.

A parameter that every rank uses on its own samples is R along the data axes; its gradient, the adjoint, is P
there: each rank holds a summand. `grad_layout` is the placement in which the optimizer takes the gradient and
updates the parameter. The reduction between the two is read from the redistribution table, and the program
must contain it. `storage_layout` is the placement of a parameter between its uses; parameters that are stored
or updated S(flat) are part of a flat parameter. All sizes are global; `plan.sharding.rank_view` has those of
one rank.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from meshwright.plan.hardware.memory_tiers import ON_DEVICE, MemoryTiers
from meshwright.plan.model_spec.model_spec import ROOT, ModelSpec, ParamSpec
from meshwright.plan.model_spec.stage_transfers import StageSpec
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall
from meshwright.plan.sharding.flat_param import FlatParamSpec, round_up
from meshwright.plan.sharding.mesh import AXES, ROUND_AXES, Mesh, axes_with, in_mesh_order
from meshwright.plan.sharding.param_sharding import ParamGroup, ParamSharding
from meshwright.plan.sharding.sequence_sharding import SequenceSharding
from meshwright.plan.sharding.tensor_placements import I, Layout, Placement, R


@dataclass(frozen=True)
class ShardingPlan:
    """The layouts of the batch, the residual stream, the logits and the parameters on a mesh; unnamed axes
    are invariant.

    If the residual stream is sharded along tokens, only the block calls `sequence_sliced_calls` take slices;
    `regather`: layers save the slice for backward and gather it again. Along `primary_rank_axes`, the rank at
    index 0 reads the samples, computes the loss and updates the parameters for all others.
    `block_calls_by_pp_rank` are the block calls of each rank along pp, which holds their parameters; empty:
    every rank runs all. Stages begin at `split_points`, except for the first one. `sequence_sharding` assigns
    the tokens of a sample to ranks. `syncs_batch_norm`: batch norms see all ranks' samples. The loss computes
    logits in `num_loss_chunks` chunks of tokens. In a flat parameter, a bucket or another buffer of several
    parameters, each parameter and each shard begins at a multiple of `align_numel` elements.
    Model states rest in `tiers`. What autograd saves in `encoded_calls` rests in another form until backward.
    The last `num_servers` ranks along `server_axis` take no samples and run no block call: they keep and step
    parameters for the others, the workers; of `params_on_servers` they alone have rows.
    """

    mesh: Mesh
    model_spec: ModelSpec
    param_shardings: tuple[ParamSharding, ...]
    batch_layout: Layout = Layout()
    residual_layout: Layout = Layout()
    logits_layout: Layout = Layout()
    sequence_sliced_calls: tuple[str, ...] = ()
    regather: bool = False
    primary_rank_axes: tuple[str, ...] = ()
    block_calls_by_pp_rank: tuple[tuple[str, ...], ...] = ()
    split_points: tuple[str, ...] = ()
    sequence_sharding: SequenceSharding | None = None
    syncs_batch_norm: bool = False
    num_loss_chunks: int = 1
    align_numel: int = 1
    tiers: MemoryTiers = ON_DEVICE
    encoded_calls: tuple[str, ...] = ()
    server_axis: str = ""
    num_servers: int = 0

    @classmethod
    def one_device(cls, mesh: Mesh, model_spec: ModelSpec) -> "ShardingPlan":
        """Returns all tensors invariant: what each rank would hold if it trained alone."""
        return cls(mesh, model_spec, tuple(ParamSharding(param) for param in model_spec.params))

    def with_batch_placement(self, axis: str, placement: Placement) -> "ShardingPlan":
        """Returns this plan with the batch at `placement` along `axis`."""
        return replace(self, batch_layout=self.batch_layout.with_placement(axis, placement))

    def with_residual_placement(
        self,
        axis: str,
        placement: Placement,
        sequence_sliced_calls: tuple[str, ...] = (),
        *,
        regather: bool = False,
    ) -> "ShardingPlan":
        """Returns this plan with the residual stream at `placement` along `axis`, in `sequence_sliced_calls`
        only, if any.

        `regather`: layers save the slice for backward, not the gathered tensor.
        """
        return replace(
            self,
            residual_layout=self.residual_layout.with_placement(axis, placement),
            sequence_sliced_calls=sequence_sliced_calls,
            regather=regather,
        )

    def residual_placement(self, calls: Iterable[LayerCall], axis: str) -> Placement:
        """Returns the placement along `axis` of the residual stream as input of `calls`: I for those that do
        not take slices.
        """
        return (
            self.residual_layout.placement(axis)
            if not self.sequence_sliced_calls or all(map(self.takes_sequence_slices, calls))
            else I
        )

    def takes_sequence_slices(self, call: LayerCall) -> bool:
        """Returns whether `call` takes slices of the residual stream; a head that is a block of its own may
        too.
        """
        if call.block_call in self.sequence_sliced_calls or not call.takes_residual:
            return call.takes_residual
        return (
            call.role == "lm_head"
            and call.name == call.block_call
            and any(
                flow.block_call in self.sequence_sliced_calls
                for flow in self.model_spec.residual_flows
                if flow.consumer == call.block_call
            )
        )

    def sequence_slice_ends(self) -> dict[str, tuple[bool, bool]]:
        """Returns, per block call with sequence slices: whether its input must be sliced, and whether its
        output must be gathered.
        """
        sliced_params = {
            name for each in self.param_shardings if each.sliced_dims for name in each.param.names
        }
        sliced_calls = set(self.sequence_sliced_calls)
        takes_slices = sliced_calls.union(
            call.block_call
            for call in self.model_spec.layer_calls
            if call.role == "lm_head"
            and f"{call.name}.weight" in sliced_params
            and self.takes_sequence_slices(call)
        )
        return {
            flow.block_call: (flow.producer not in sliced_calls, flow.consumer not in takes_slices)
            for flow in self.model_spec.residual_flows
            if flow.block_call in sliced_calls
        }

    def map_param_shardings(
        self, change: Callable[[ParamSharding], ParamSharding], *, frozen: bool = False
    ) -> "ShardingPlan":
        """Returns this plan with `change` applied to every trainable parameter's sharding; with `frozen`, to
        the others instead.
        """
        return replace(
            self,
            param_shardings=tuple(
                change(each) if each.param.trainable != frozen else each for each in self.param_shardings
            ),
        )

    def with_logits_placement(self, axis: str, placement: Placement) -> "ShardingPlan":
        """Returns this plan with the logits at `placement` along `axis`."""
        return replace(self, logits_layout=self.logits_layout.with_placement(axis, placement))

    def with_pipeline(
        self, block_calls_by_pp_rank: Iterable[tuple[str, ...]], split_points: tuple[str, ...]
    ) -> "ShardingPlan":
        """Returns this plan with these block calls on each rank along pp; gradients of parameters that
        several use are summed.
        """
        pipelined = replace(
            self, block_calls_by_pp_rank=tuple(block_calls_by_pp_rank), split_points=split_points
        )

        def sum_if_tied(each: ParamSharding) -> ParamSharding:
            if len(pipelined.pp_ranks_using(each.param)) == 1:
                return each
            layout = each.layout.with_placement("pp", R)
            return replace(each, layout=layout, grad_layout=each.grad_layout.with_placement("pp", I))

        return pipelined.map_param_shardings(sum_if_tied)

    def pp_ranks_using(self, param: ParamSpec) -> tuple[int, ...]:
        """Returns the ranks along pp that use `param`, in a block or in glue."""
        if not self.block_calls_by_pp_rank:
            return (0,)
        needing = set(self.model_spec.block_calls_needing(param))
        users = (i for i, calls in enumerate(self.block_calls_by_pp_rank) if not needing.isdisjoint(calls))
        return tuple(users) or (0,)

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """The pipeline stages, in order of the forward; empty without a pipeline, or if the boundaries are
        unknown.
        """
        boundaries = self.model_spec.stage_boundaries
        return (
            boundaries.stages(self.split_points)
            if self.block_calls_by_pp_rank and boundaries is not None
            else ()
        )

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold different samples, outermost first."""
        return tuple(axis for axis in AXES if self.batch_layout.placement(axis).dim == 0)

    @property
    def num_data(self) -> int:
        """The number of ranks with different samples: servers have none."""
        return self.num_workers_along(self.data_axes)

    def num_workers_along(self, axes: Iterable[str]) -> int:
        """Returns the number of ranks in a group that spans `axes`, without those that only serve."""
        return prod(self.num_workers if axis == self.server_axis else self.mesh.size(axis) for axis in axes)

    def is_server(self, coordinate: Mapping[str, int]) -> bool:
        """Returns whether the rank at `coordinate` only serves."""
        num_workers = self.num_workers
        return bool(self.num_servers) and coordinate.get(self.server_axis, 0) >= num_workers

    @property
    def num_workers(self) -> int:
        """The number of workers along `server_axis`; 0 if no rank only serves."""
        return self.mesh.size(self.server_axis) - self.num_servers if self.num_servers else 0

    @property
    def server_indices(self) -> range:
        """The indices along `server_axis` of the ranks that only serve."""
        return range(self.num_workers, self.num_workers + self.num_servers)

    def served_indices(self, owner_index: int | None) -> tuple[int, ...]:
        """Returns the indices of the ranks that exchange a parameter with the server at `owner_index`, its
        own included; empty: all ranks.
        """
        if not self.num_servers or owner_index is None:
            return ()
        return (*range(self.num_workers), owner_index)

    @cached_property
    def has_observers(self) -> bool:
        """Whether the ranks that only serve step nothing, and see the weights of the others at times."""
        return bool(self.num_servers) and not (self.has_owners or self.params_on_servers)

    @cached_property
    def params_on_servers(self) -> tuple[ParamSharding, ...]:
        """The parameters whose rows lie on the ranks that only serve."""
        return tuple(each for each in self.param_shardings if each.rows_on_servers)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold different tokens of the same samples, outermost first."""
        return tuple(axis for axis in AXES if self.batch_layout.placement(axis).dim == 1)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold different samples and different experts, outermost first."""
        return tuple(axis for axis in axes_with("experts") if axis in self.data_axes)

    def sum_axes(self, *axes: str) -> tuple[str, ...]:
        """Returns `axes`, and those of tokens and experts: a strategy that sums gradients of samples along
        `axes` sums them there too.
        """
        return in_mesh_order({*axes, *self.token_axes, *self.expert_axes})

    def param_sum_axes(self, param_sharding: ParamSharding, *axes: str) -> tuple[str, ...]:
        """Returns those of `sum_axes(*axes)` along which the gradient of a parameter is summed: not where it
        is sliced, since its gradient is complete there, and not if servers add the gradients of its rows.
        """
        if param_sharding.rows_on_servers:
            return ()
        return tuple(axis for axis in self.sum_axes(*axes) if axis not in param_sharding.sliced_dims)

    @property
    def grad_sum_axes(self) -> tuple[str, ...]:
        """The axes along which gradients are summed, because ranks have different samples or tokens."""
        return self.sum_axes(*self.site_data_axes)

    @property
    def site_data_axes(self) -> tuple[str, ...]:
        """Those of `data_axes` along which the ranks of one site lie: counts and losses are summed there."""
        return tuple(axis for axis in self.data_axes if axis not in ROUND_AXES)

    @cached_property
    def varying_axes(self) -> tuple[str, ...]:
        """The axes of several sites, along which parameters differ between two rounds."""
        varying = {axis for each in self.param_shardings for axis in each.layout.axes_with("V")}
        return in_mesh_order({axis for axis in varying if self.mesh.size(axis) > 1})

    def site_index(self, coordinate: Mapping[str, int]) -> int:
        """Returns the index of the site of `coordinate`; 0 if there are no sites."""
        return self.mesh.index(coordinate, self.varying_axes)

    @cached_property
    def grad_norm_axes(self) -> tuple[str, ...]:
        """The axes along which ranks update different elements, or none, so that some do not know the
        gradient norm alone.
        """
        sliced = {
            axis
            for each in self.param_shardings
            if each.param.trainable
            for axis in each.grad_layout.axes_with("S")
        }
        return in_mesh_order({*sliced, *self.stage_axes, *([self.server_axis] if self.has_observers else [])})

    @cached_property
    def param_slice_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have slices of parameters for the same tokens, outermost first."""
        sliced = {axis for each in self.param_shardings for axis in each.sliced_dims}
        return in_mesh_order(sliced.difference(self.grad_sum_axes))

    @property
    def model_parallel_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have different parameters, or slices of them, for the same tokens."""
        return in_mesh_order({*self.param_slice_axes, *self.stage_axes})

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have other layers; empty without a pipeline."""
        return axes_with("layers") if self.block_calls_by_pp_rank else ()

    @cached_property
    def has_owners(self) -> bool:
        """Whether single ranks step whole parameters, so that ranks of one role differ in what they keep."""
        return any(each.owner_index is not None for each in self.param_shardings)

    @cached_property
    def compressed_params(self) -> frozenset[str]:
        """The parameters whose gradients are summed as codes."""
        return frozenset(each.param.name for each in self.param_shardings if each.is_compressed)

    @cached_property
    def param_groups(self) -> tuple[ParamGroup, ...]:
        """The groups of the trainable parameters of the whole model."""
        return self.group_params(self.param_shardings, self.model_spec)

    def group_params(
        self, param_shardings: Iterable[ParamSharding], model_spec: ModelSpec, *, frozen: bool = False
    ) -> tuple[ParamGroup, ...]:
        """Returns the groups of those of `param_shardings` that are trainable, in the order in which backward
        completes them; with `frozen`, of the others.

        `model_spec` is the part of the model that uses them, and they may be slices. Parameters that ranks
        along pp sum are grouped by all their block calls, so that all these ranks have equal groups.
        """
        found: dict[tuple, list[ParamSharding]] = {}
        logical = {each.param.name: each for each in self.param_shardings}
        for each in param_shardings:
            if each.param.trainable == frozen:
                continue
            unsliced, reductions = logical[each.param.name], each.grad_reductions()
            users = (each.param.block_calls, ())
            if "pp" in reductions:
                users = (unsliced.param.block_calls, self.pp_ranks_using(unsliced.param))
            key = (
                users,
                self._is_uneven(unsliced),
                each.param.dtype,
                tuple(reductions.items()),
                each.flat_shard_axes,
                each.is_stored_sharded,
                (each.shard_alignment, each.owner_axes, each.owner_index) if each.flat_shard_axes else (),
                # copies must have equal codes, so that they lie among copies
                (each.is_compressed, in_mesh_order(each.sliced_dims) if each.is_coded else ()),
                each.param.name if each.rows_on_servers else "",
            )
            found.setdefault(key, []).append(each)
        groups = [
            self._param_group(members, *users, model_spec=model_spec, uneven=uneven)
            for (users, uneven, *_), members in found.items()
        ]
        order = {block_call: i for i, block_call in enumerate(reversed(model_spec.block_calls))}
        return tuple(sorted(groups, key=lambda group: order.get(group.last_block_call or ROOT, len(order))))

    def build_flat_params(self, param_groups: Iterable[ParamGroup]) -> dict[str, FlatParamSpec]:
        """Returns the flat parameters of those of `param_groups` that are updated or stored S(flat), by the
        name of the group.
        """
        found = {}
        full_numels = {each.param.name: each.param.numel for each in self.param_shardings}
        for group in param_groups:
            axes = group.param_shardings[0].flat_shard_axes
            if axes:
                first, param = group.param_shardings[0], group.params[0]
                has_rows, workers = first.rows_on_servers, self.sum_members(axes)
                members = self.served_indices(first.owner_index) or workers
                found[group.name] = FlatParamSpec.build(
                    group.name,
                    group.params,
                    axes,
                    self.num_servers if has_rows else len(workers) or self.mesh.group_size(axes),
                    first.shard_alignment,
                    full_numels,
                    self.align_numel,
                    first.owner_index,
                    tuple(self.server_indices) if has_rows else members,
                    row_numel=param.numel // param.shape[0] if has_rows else 1,
                )
        return found

    def sum_members(self, axes: Iterable[str]) -> tuple[int, ...]:
        """Returns the indices along `axes` of the ranks that sum gradients: workers; empty: all."""
        is_apart = self.has_observers or self.params_on_servers
        return tuple(range(self.num_workers)) if is_apart and self.server_axis in axes else ()

    def packed_numel(self, params: Iterable[ParamSpec]) -> int:
        """Returns the elements of a bucket of `params`, the padding behind each included."""
        return sum(round_up(param.numel, self.align_numel) for param in params)

    def unreduced_params(self) -> Iterator[ParamSharding]:
        """Returns the parameters whose gradients would reach the optimizer as partial sums."""
        return (
            each for each in self.param_shardings if each.param.trainable and each.grad_layout.axes_with("P")
        )

    def _is_uneven(self, param_sharding: ParamSharding) -> bool:
        # Such a parameter gets a flat parameter or bucket of its own, so that equal parameters lie at equal
        # offsets on all ranks. The offset decides the last bit of products, sums and updates, and copies must
        # stay bitwise equal. Owners update full matrices.
        dims = param_sharding.sliced_dims
        num_ranks = {
            dim: self.mesh.group_size(axis for axis in dims if dims[axis] == dim) for dim in dims.values()
        }
        return (
            bool(param_sharding.flat_shard_axes or param_sharding.grad_reductions())
            and not param_sharding.owner_axes
            and any(
                param_sharding.param.dim_split(dim).num_units % number for dim, number in num_ranks.items()
            )
        )

    def _param_group(
        self,
        param_shardings: list[ParamSharding],
        block_calls: tuple[str, ...],
        users: tuple[int, ...],
        *,
        model_spec: ModelSpec,
        uneven: bool,
    ) -> ParamGroup:
        first = param_shardings[0]
        name = "+".join(block_calls) + ("" if first.param.trainable else " frozen")
        name += f" {first.param.dtype}" if first.param.dtype else ""
        is_own_group = [axis for axis in first.grad_reductions() if axis not in self.grad_sum_axes]
        is_own_group = [f"pp {'+'.join(map(str, users))}" if axis == "pp" else axis for axis in is_own_group]
        name += f" over {' '.join(is_own_group)}" if is_own_group else ""
        name += " experts" if set(first.sliced_dims) & set(self.grad_sum_axes) else ""
        name += " in uneven slices" if uneven else ""
        name += f" rows of {first.param.name}" if first.rows_on_servers else ""
        if first.flat_shard_axes and first.shard_alignment != "element":
            name += (
                f" by owner along {' '.join(first.owner_axes)}"
                if first.owner_axes
                else f" by {first.shard_alignment}"
            )
        if first.is_coded:
            name += " compressed" if first.is_compressed else ""
            name += "".join(f" along {axis}" for axis in in_mesh_order(first.sliced_dims))
        weights = [param_sharding.param for param_sharding in param_shardings]
        return ParamGroup(name, tuple(param_shardings), model_spec.last_backward(weights), users, uneven)
