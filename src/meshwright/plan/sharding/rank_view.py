"""Describes one coordinate of a sharding plan: the block calls, parameters, slices and work of that rank.

    ShardingPlan   all ranks        the whole model       sizes are global
    RankView       one coordinate   the rank's stage      sizes are local

A sharding plan says along which axes a tensor is sliced; a view says which slices the rank has, and which
share of the work. What follows from the plan and the coordinate is computed once, at first use, and kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.model_spec.param_dim_split import DimShard
from meshwright.plan.sharding.flat_param import FlatParamSpec, ShardAlignment
from meshwright.plan.sharding.mesh import in_mesh_order
from meshwright.plan.sharding.param_sharding import ParamGroup, ParamSharding
from meshwright.plan.sharding.rank_work_share import LayerFraction, RankWorkShare
from meshwright.plan.sharding.sharding_plan import ShardingPlan


@dataclass(frozen=True)
class RankView:
    """What the rank at `coordinate` (its index along every axis) has of `plan`.

    A rank outside of the mesh has no coordinate: it runs no block and holds no parameter. A rank that
    `is_server` runs no block either, and holds the parameters that it owns, or has rows of.
    """

    plan: ShardingPlan
    coordinate: Mapping[str, int] = field(hash=False)
    is_server: bool = False

    @classmethod
    def of(cls, plan: ShardingPlan, coordinate: Mapping[str, int]) -> "RankView":
        """Returns the view of the rank at `coordinate`: of a worker or of a server."""
        return cls(plan, coordinate, plan.is_server(coordinate))

    @cached_property
    def model_spec(self) -> ModelSpec:
        """The block calls that this rank runs, and the parameters that it holds."""
        rows = {each.param.name for each in self.plan.params_on_servers}
        if not self.is_server:
            kept = tuple(param for param in self.stage_spec.params if param.name not in rows)
            return replace(self.stage_spec, params=kept) if rows else self.stage_spec
        index = self.coordinate[self.plan.server_axis]
        owned = {each.param.name for each in self.plan.param_shardings if each.owner_index == index}
        params = tuple(param for param in self.stage_spec.params if param.name in owned | rows)
        return replace(self.stage_spec.restricted_to(()), params=params)

    @cached_property
    def stage_spec(self) -> ModelSpec:
        """The block calls of the stage at this coordinate, and what they use."""
        calls_by_pp_rank = self.plan.block_calls_by_pp_rank
        model_spec = self.plan.model_spec
        if not self.coordinate:
            return model_spec.restricted_to(())
        return (
            model_spec.restricted_to(calls_by_pp_rank[self.coordinate["pp"]])
            if calls_by_pp_rank
            else model_spec
        )

    @cached_property
    def logical_param_shardings(self) -> tuple[ParamSharding, ...]:
        """The plan's shardings of this rank's parameters: unsliced, with the block calls of all stages."""
        local = {param.name for param in self.model_spec.params}
        return tuple(each for each in self.plan.param_shardings if each.param.name in local)

    @cached_property
    def unsliced_param_shardings(self) -> tuple[ParamSharding, ...]:
        """The shardings of this rank's parameters, unsliced, with the block calls of this rank."""
        holds_all = not self.is_server and not self.plan.params_on_servers
        if self.coordinate and not self.plan.block_calls_by_pp_rank and holds_all:
            return self.plan.param_shardings
        local = {param.name: param.block_calls for param in self.model_spec.params}
        return tuple(
            replace(each, param=replace(each.param, block_calls=local[each.param.name]))
            for each in self.logical_param_shardings
        )

    @cached_property
    def param_shardings(self) -> tuple[ParamSharding, ...]:
        """The shardings of this rank's parameters; one that is sliced has the shape of this rank's slice."""
        return tuple(map(self._slice, self.unsliced_param_shardings))

    @cached_property
    def param_shardings_by_layer(self) -> Mapping[str, Sequence[ParamSharding]]:
        """The shardings of this rank's parameters by the modules that hold them."""
        found: dict[str, list[ParamSharding]] = {}
        for each in self.param_shardings:
            for layer in each.param.layers:
                found.setdefault(layer, []).append(each)
        return found

    @cached_property
    def param_groups(self) -> tuple[ParamGroup, ...]:
        """The groups of this rank's trainable parameters, in the order in which backward completes them."""
        return self.plan.group_params(self.param_shardings, self.stage_spec)

    @cached_property
    def frozen_param_groups(self) -> tuple[ParamGroup, ...]:
        """The groups of this rank's parameters without gradients."""
        return self.plan.group_params(self.param_shardings, self.stage_spec, frozen=True)

    @property
    def all_param_groups(self) -> tuple[ParamGroup, ...]:
        """The trainable groups, then the frozen ones."""
        return (*self.param_groups, *self.frozen_param_groups)

    @cached_property
    def flat_param_specs(self) -> Mapping[str, FlatParamSpec]:
        """The flat parameters by the name of their group, trainable or frozen."""
        return self.plan.build_flat_params(self.all_param_groups)

    def shard_numel(self, flat_param: FlatParamSpec) -> int:
        """Returns the elements of this rank's shard of `flat_param`, padding included."""
        return flat_param.local_numel(self.plan.mesh.index(self.coordinate, flat_param.axes))

    @cached_property
    def shard_alignments(self) -> Mapping[str, ShardAlignment]:
        """The shard alignment that the optimizer needs by sharded or sliced parameter, by name."""
        return {
            each.param.name: each.shard_alignment
            for each in self.param_shardings
            if each.flat_shard_axes or each.sliced_dims
        }

    @property
    def computes_loss(self) -> bool:
        """Whether this rank runs the last block call."""
        return self.plan.model_spec.block_calls[-1] in self.model_spec.block_calls

    @cached_property
    def params_counted_in_sum(self) -> frozenset[str]:
        """The parameters that this rank counts in a sum over `model_parallel_axes`: each counts once."""
        nonzero_axes = {axis for axis in self.plan.param_slice_axes if self.coordinate[axis]}
        return frozenset(
            each.param.name for each in self._first_used_params() if nonzero_axes <= each.sliced_dims.keys()
        )

    @cached_property
    def params_counted_in_norm(self) -> frozenset[str]:
        """The parameters that this rank counts in the gradient norm: it is the first with these elements."""
        slice_axes = set(self.plan.grad_norm_axes).difference(self.plan.stage_axes)
        nonzero_axes = {axis for axis in slice_axes if self.coordinate[axis]}
        return frozenset(
            each.param.name
            for each in self._first_used_params()
            if nonzero_axes <= set(each.grad_layout.axes_with("S"))
        )

    @cached_property
    def work_share(self) -> RankWorkShare:
        """The fraction of the work that this rank does."""
        fractions = dict[str, LayerFraction]()
        for local, logical in zip(self.param_shardings, self.logical_param_shardings, strict=True):
            if local.sliced_dims:
                fraction = LayerFraction(
                    Fraction(local.param.numel, logical.param.numel), frozenset(local.sliced_dims)
                )
                names = (name.rpartition(".") for name in local.param.names)
                fractions |= {layer: fraction for layer, _, leaf in names if leaf == "weight"}
        fractions |= self._experts_fractions()
        token_shard = self.plan.mesh.index(self.coordinate, self.plan.token_axes)
        return RankWorkShare(self.plan, self.model_spec, fractions, token_shard)

    def _experts_fractions(self) -> Iterator[tuple[str, LayerFraction]]:
        """Yields this rank's fraction of the work of experts, by module: of the features inside each expert,
        if they are sliced, or of the experts, if others have others for the same tokens.
        """
        inner_splits = {
            call.name: call.inner_splits[0] for call in self.model_spec.experts_calls if call.inner_splits
        }
        calls = self.model_spec.experts_calls
        named = (
            {name: each for each in self.logical_param_shardings for name in each.param.names}
            if calls
            else {}
        )
        for call in calls:
            for shard in self.dim_shards(named[call.params[0]]):
                dispatch_axes = [axis for axis in shard.axes if axis not in self.plan.param_slice_axes]
                if shard.dim_split.dim == 0 and len(dispatch_axes) < len(shard.axes):
                    number = shard.dim_ranges.size * self.plan.mesh.group_size(dispatch_axes)
                    yield call.name, LayerFraction(Fraction(number, call.num_experts), frozenset(shard.axes))
        for module, (name, split) in inner_splits.items():
            for shard in self.dim_shards(named[name]):
                if shard.dim_split.dim == split.dim:
                    fraction = Fraction(shard.dim_ranges.size, sum(split.sections))
                    yield module, LayerFraction(fraction, frozenset(shard.axes))

    def slice_range(self, name: str, axis: str) -> tuple[int, int]:
        """Returns the index range of this rank of parameter `name` along the dim that is sliced over
        `axis`.
        """
        found = next(each for each in self.plan.param_shardings if each.param.name == name)
        dim_split = found.param.dim_split(found.sliced_dims[axis])
        (index_range,) = dim_split.ranges(self.coordinate[axis], self.plan.mesh.size(axis))
        return index_range

    def dim_shards(self, param_sharding: ParamSharding) -> tuple[DimShard, ...]:
        """Returns the shard of this rank for each sliced dim of a parameter."""
        found, sliced_dims, mesh = list[DimShard](), param_sharding.sliced_dims, self.plan.mesh
        for dim in dict.fromkeys(sliced_dims[axis] for axis in in_mesh_order(sliced_dims)):
            axes = in_mesh_order({axis for axis in sliced_dims if sliced_dims[axis] == dim})
            dim_split = param_sharding.param.dim_split(dim)
            found.append(DimShard(axes, dim_split, mesh.group_size(axes), mesh.index(self.coordinate, axes)))
        return tuple(found)

    def _slice(self, param_sharding: ParamSharding) -> ParamSharding:
        shape = param_sharding.param.shape
        for shard in self.dim_shards(param_sharding):
            shape = shard.dim_split.local_shape(shape, shard.index, shard.num_ranks)
        return (
            param_sharding
            if shape == param_sharding.param.shape
            else replace(param_sharding, param=replace(param_sharding.param, shape=shape))
        )

    def _first_used_params(self) -> Iterator[ParamSharding]:
        for local, logical in zip(self.param_shardings, self.logical_param_shardings, strict=True):
            has_stages = bool(self.plan.block_calls_by_pp_rank)
            if not has_stages or self.plan.pp_ranks_using(logical.param)[0] == self.coordinate["pp"]:
                yield local
