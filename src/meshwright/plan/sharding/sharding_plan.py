"""Describes the placement of every tensor of a training step on the mesh, and the parameter groups that
follow.

A parameter that every rank uses on its own samples is R along the data axes; its gradient, the adjoint, is P
there: each rank holds a summand. `grad_layout` is the placement in which the optimizer takes the gradient and
updates the parameter. The reduction between the two is read from the redistribution table, and the program
must contain it. `storage_layout` is the placement of a parameter between its uses; parameters that are stored
or updated S(flat) are part of a flat parameter. `ShardingPlan.at_coordinate` gives the view of one rank:
parameters that are sliced have the shape of the local slice, and all sizes that follow are local.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from meshwright.plan.model_spec.model_spec import ModelSpec, ParamSpec
from meshwright.plan.model_spec.param_dim_split import DimShard
from meshwright.plan.model_spec.stage_transfers import StageSpec
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall
from meshwright.plan.sharding.flat_param import FlatParamSpec, ShardAlignment
from meshwright.plan.sharding.mesh import AXES, Mesh
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
    logits in `num_loss_chunks` chunks of tokens. `all_ranks` is the plan of all ranks if this is the view of
    one `coordinate`.
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
    all_ranks: "ShardingPlan | None" = None
    coordinate: tuple[tuple[str, int], ...] = field(default=(), compare=False)

    @classmethod
    def one_device(cls, mesh: Mesh, model_spec: ModelSpec) -> "ShardingPlan":
        """Returns all tensors invariant: what each rank would hold if it trained alone."""
        return cls(mesh, model_spec, tuple(ParamSharding(param) for param in model_spec.params))

    @property
    def global_plan(self) -> "ShardingPlan":
        """The plan of all ranks, of which this may be the view of one."""
        return self.all_ranks or self

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
                for flow in self.global_plan.model_spec.residual_flows
                if flow.consumer == call.block_call
            )
        )

    def sequence_slice_ends(self) -> dict[str, tuple[bool, bool]]:
        """Returns, per block call with sequence slices: whether its input must be sliced, and whether its
        output must be gathered.
        """
        logical = self.global_plan  # the next stage decides whether this one hands on slices
        sliced_params = {
            name for each in logical.param_shardings if each.sliced_dims for name in each.param.names
        }
        sliced_calls = set(self.sequence_sliced_calls)
        takes_slices = sliced_calls.union(
            call.block_call
            for call in logical.model_spec.layer_calls
            if call.role == "lm_head"
            and f"{call.name}.weight" in sliced_params
            and self.takes_sequence_slices(call)
        )
        return {
            flow.block_call: (flow.producer not in sliced_calls, flow.consumer not in takes_slices)
            for flow in logical.model_spec.residual_flows
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
        needing = set(self.global_plan.model_spec.block_calls_needing(param))
        users = (i for i, calls in enumerate(self.block_calls_by_pp_rank) if not needing.isdisjoint(calls))
        return tuple(users) or (0,)

    @property
    def logical_param_shardings(self) -> tuple[ParamSharding, ...]:
        """The shardings of this rank's parameters before they were sliced."""
        local = {each.param.name for each in self.param_shardings}
        return tuple(each for each in self.global_plan.param_shardings if each.param.name in local)

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """The pipeline stages, in order of the forward; empty without a pipeline, or if the boundaries are
        unknown.
        """
        boundaries = self.global_plan.model_spec.stage_boundaries
        return (
            boundaries.stages(self.split_points)
            if self.block_calls_by_pp_rank and boundaries is not None
            else ()
        )

    @property
    def computes_loss(self) -> bool:
        """Whether this rank runs the last block call."""
        return self.global_plan.model_spec.block_calls[-1] in self.model_spec.block_calls

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold different samples, outermost first."""
        return tuple(axis for axis in AXES if self.batch_layout.placement(axis).dim == 0)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold different tokens of the same samples, outermost first."""
        return tuple(axis for axis in AXES if self.batch_layout.placement(axis).dim == 1)

    def with_token_axes(self, *axes: str) -> tuple[str, ...]:
        """Returns `axes` and the token axes: gradients of different tokens of a sample are summed like those
        of samples.
        """
        return tuple(axis for axis in AXES if axis in axes or axis in self.token_axes)

    @property
    def grad_sum_axes(self) -> tuple[str, ...]:
        """The axes along which gradients are summed, because ranks have different samples or tokens."""
        return self.with_token_axes(*self.data_axes)

    @property
    def grad_norm_axes(self) -> tuple[str, ...]:
        """The axes along which ranks update different elements, so that no rank alone knows the gradient
        norm.
        """
        sliced = {
            axis
            for each in self.global_plan.param_shardings
            if each.param.trainable
            for axis in each.grad_layout.axes_with("S")
        }
        return tuple(
            axis for axis in AXES if axis in sliced or (axis == "pp" and self.block_calls_by_pp_rank)
        )

    @property
    def param_slice_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have slices of parameters, outermost first."""
        sliced = {axis for each in self.global_plan.param_shardings for axis in each.sliced_dims}
        return tuple(axis for axis in AXES if axis in sliced)

    @property
    def model_parallel_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have different parameters, or slices of them, for the same samples."""
        has_stages = bool(self.block_calls_by_pp_rank)
        return tuple(axis for axis in AXES if axis in self.param_slice_axes or (axis == "pp" and has_stages))

    def params_counted_in_sum(self, coordinate: Mapping[str, int]) -> Iterator[str]:
        """Yields the parameters that the rank at `coordinate` counts in a sum over `model_parallel_axes`:
        each counts once.
        """
        nonzero_axes = {axis for axis in self.param_slice_axes if coordinate[axis]}
        yield from (
            param_sharding.param.name
            for param_sharding in self._first_user_params(coordinate)
            if nonzero_axes <= param_sharding.sliced_dims.keys()
        )

    def params_counted_in_norm(self, coordinate: Mapping[str, int]) -> Iterator[str]:
        """Yields the parameters that the rank at `coordinate` counts in the gradient norm: it is the first
        with these elements.
        """
        nonzero_axes = {axis for axis in self.grad_norm_axes if coordinate[axis] and axis != "pp"}
        yield from (
            param_sharding.param.name
            for param_sharding in self._first_user_params(coordinate)
            if nonzero_axes <= set(param_sharding.grad_layout.axes_with("S"))
        )

    def _first_user_params(self, coordinate: Mapping[str, int]) -> Iterator[ParamSharding]:
        for param_sharding, logical in zip(self.param_shardings, self.logical_param_shardings, strict=True):
            if not self.block_calls_by_pp_rank or self.pp_ranks_using(logical.param)[0] == coordinate["pp"]:
                yield param_sharding

    def at_pp_rank(self, pp_rank: int) -> "ShardingPlan":
        """Returns the view of the rank at `pp_rank`, at the same position along all other axes."""
        return self.at_coordinate({**dict(self.coordinate), "pp": pp_rank})

    def at_coordinate(self, coordinate: Mapping[str, int]) -> "ShardingPlan":
        """Returns the view of the rank at `coordinate`."""
        logical, model_spec = self.global_plan, self.global_plan.model_spec
        param_shardings = logical.param_shardings
        if logical.block_calls_by_pp_rank:
            model_spec = model_spec.restricted_to(logical.block_calls_by_pp_rank[coordinate["pp"]])
            local = {param.name: param.block_calls for param in model_spec.params}
            param_shardings = tuple(
                replace(each, param=replace(each.param, block_calls=local[each.param.name]))
                for each in param_shardings
                if each.param.name in local
            )
        return replace(
            logical,
            model_spec=model_spec,
            param_shardings=tuple(logical._slice(each, coordinate) for each in param_shardings),
            all_ranks=logical,
            coordinate=tuple(coordinate.items()),
        )

    def slice_range(self, name: str, axis: str) -> tuple[int, int]:
        """Returns the index range of this rank of parameter `name` along the dim that is sliced over
        `axis`.
        """
        found = next(each for each in self.global_plan.param_shardings if each.param.name == name)
        dim_split = found.param.dim_split(found.sliced_dims[axis])
        (index_range,) = dim_split.ranges(dict(self.coordinate)[axis], self.mesh.size(axis))
        return index_range

    def dim_shards(
        self, param_sharding: ParamSharding, coordinate: Mapping[str, int]
    ) -> tuple[DimShard, ...]:
        """Returns the shard of the rank at `coordinate` for each sliced dim of a parameter."""
        found, sliced_dims = list[DimShard](), param_sharding.sliced_dims
        for dim in dict.fromkeys(sliced_dims[axis] for axis in AXES if axis in sliced_dims):
            axes = tuple(axis for axis in AXES if sliced_dims.get(axis) == dim)
            dim_split = param_sharding.param.dim_split(dim)
            index = self.mesh.index(coordinate, axes)
            found.append(DimShard(axes, dim_split, self.mesh.group_size(axes), index))
        return tuple(found)

    def _slice(self, param_sharding: ParamSharding, coordinate: Mapping[str, int]) -> ParamSharding:
        shape = param_sharding.param.shape
        for shard in self.dim_shards(param_sharding, coordinate):
            shape = shard.dim_split.local_shape(shape, shard.index, shard.num_ranks)
        return (
            param_sharding
            if shape == param_sharding.param.shape
            else replace(param_sharding, param=replace(param_sharding.param, shape=shape))
        )

    def local_shape(
        self, shape: tuple[int, ...], layout: Layout, coordinate: Mapping[str, int]
    ) -> tuple[int, ...]:
        """Returns the local shape of a tensor at `coordinate`: dims split as evenly as possible, the first
        ranks get one more.
        """
        sizes = list(shape)
        for axis in AXES:
            placement = layout.placement(axis)
            if placement.dim is not None:
                count, index = self.mesh.size(axis), coordinate[axis]
                sizes[placement.dim] = sizes[placement.dim] // count + (index < sizes[placement.dim] % count)
        return tuple(sizes)

    def param_groups(self, *, frozen: bool = False) -> tuple[ParamGroup, ...]:
        """Returns the parameter groups in the order in which backward completes them; with `frozen`, those
        without gradients.

        Parameters that ranks along pp sum are grouped by all their block calls, so that all these ranks have
        equal groups.
        """
        found: dict[tuple, list[ParamSharding]] = {}
        logical = {each.param.name: each for each in self.logical_param_shardings}
        for each in self.param_shardings:
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
                (each.shard_alignment, each.owner_axes) if each.flat_shard_axes else (),
            )
            found.setdefault(key, []).append(each)
        groups = [
            self._param_group(members, *users, uneven=uneven)
            for (users, uneven, *_), members in found.items()
        ]
        return tuple(sorted(groups, key=self._completion))

    def all_param_groups(self) -> tuple[ParamGroup, ...]:
        """Returns the trainable groups, then the frozen ones."""
        return (*self.param_groups(), *self.param_groups(frozen=True))

    def flat_param_specs(self) -> dict[str, FlatParamSpec]:
        """Returns the flat parameters by the name of their group: those of groups that are updated or stored
        S(flat).
        """
        found = {}
        full_numels = {each.param.name: each.param.numel for each in self.global_plan.param_shardings}
        for group in self.all_param_groups():
            axes = group.param_shardings[0].flat_shard_axes
            if axes:
                ranks, alignment = self.mesh.group_size(axes), group.param_shardings[0].shard_alignment
                found[group.name] = FlatParamSpec.build(
                    group.name, group.params, axes, ranks, alignment, full_numels
                )
        return found

    def shard_alignments(self) -> dict[str, ShardAlignment]:
        """Returns the shard alignment that the optimizer needs by sharded or sliced parameter, by name."""
        return {
            each.param.name: each.shard_alignment
            for each in self.param_shardings
            if each.flat_shard_axes or each.sliced_dims
        }

    def unreduced_params(self) -> Iterator[ParamSharding]:
        """Returns the parameters whose gradients would reach the optimizer as partial sums."""
        return (
            each for each in self.param_shardings if each.param.trainable and each.grad_layout.axes_with("P")
        )

    def _is_uneven(self, param_sharding: ParamSharding) -> bool:
        # Such a parameter gets a flat parameter or bucket of its own, so that equal parameters lie at equal
        # offsets on all ranks. The offset decides the last bit of products, sums and updates, and copies must
        # stay bitwise equal. Owners update full matrices.
        sizes = {
            axis: param_sharding.param.dim_split(dim).num_units
            for axis, dim in param_sharding.sliced_dims.items()
        }
        return (
            bool(param_sharding.flat_shard_axes or param_sharding.grad_reductions())
            and not param_sharding.owner_axes
            and any(units % self.mesh.size(axis) for axis, units in sizes.items())
        )

    def _param_group(
        self,
        param_shardings: list[ParamSharding],
        block_calls: tuple[str, ...],
        users: tuple[int, ...],
        *,
        uneven: bool,
    ) -> ParamGroup:
        first = param_shardings[0]
        name = "+".join(block_calls) + ("" if first.param.trainable else " frozen")
        name += f" {first.param.dtype}" if first.param.dtype else ""
        is_own_group = [axis for axis in first.grad_reductions() if axis not in self.grad_sum_axes]
        is_own_group = [f"pp {'+'.join(map(str, users))}" if axis == "pp" else axis for axis in is_own_group]
        name += f" over {' '.join(is_own_group)}" if is_own_group else ""
        name += " in uneven slices" if uneven else ""
        if first.flat_shard_axes and first.shard_alignment != "element":
            name += (
                f" by owner along {' '.join(first.owner_axes)}"
                if first.owner_axes
                else f" by {first.shard_alignment}"
            )
        weights = [param_sharding.param for param_sharding in param_shardings]
        return ParamGroup(name, tuple(param_shardings), self.model_spec.last_backward(weights), users, uneven)

    def _completion(self, param_group: ParamGroup) -> int:
        block_calls = self.model_spec.block_calls
        return (
            len(block_calls)
            if param_group.last_block_call is None
            else len(block_calls) - 1 - block_calls.index(param_group.last_block_call)
        )
