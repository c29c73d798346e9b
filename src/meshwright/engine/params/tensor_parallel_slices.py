"""The parameters of which a rank holds a slice: sliced from full values, and gathered again.

    logical parameter     full, as the model declares it and as checkpoints store it
    along tp, rank 1      the ranges of its dim split, concatenated: the module's parameter

A parameter may be sliced along several dims, and a dim along several axes. Full values exist only where they
are needed: initial values one parameter at a time, checkpoints, comparisons, exports. No step makes them.
"""

from collections.abc import Mapping, Sequence

import torch

from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.rank_state import TrainedModule
from meshwright.model.tensor_parallel.split_proposal import slice_dims
from meshwright.model.tensors.lazy_mapping import LazyTensors, read_region, read_shard
from meshwright.plan.model_spec.param_dim_split import DimRanges
from meshwright.plan.plan import RankPlan


def copy_slice_into(full_tensor: torch.Tensor, spans: Sequence[DimRanges], local_slice: torch.Tensor) -> None:
    """Copies `local_slice` into its ranges of `full_tensor`."""
    if not spans:
        full_tensor.copy_(local_slice)
        return
    dim, at = spans[0].dim, 0
    for first, end in spans[0].ranges:
        copy_slice_into(
            full_tensor.narrow(dim, first, end - first), spans[1:], local_slice.narrow(dim, at, end - first)
        )
        at += end - first


class ParamSlices:
    """The slices of parameters that the rank of `world` holds."""

    def __init__(self, plan: RankPlan, world: World) -> None:
        self._plan, self._world = plan, world
        sliced = {
            param_sharding.param.name: param_sharding
            for param_sharding in plan.view.logical_param_shardings
            if param_sharding.sliced_dims
        }
        self._dim_shards = {
            name: plan.view.dim_shards(param_sharding) for name, param_sharding in sliced.items()
        }
        self._shapes = {name: param_sharding.param.shape for name, param_sharding in sliced.items()}

    def __bool__(self) -> bool:
        return bool(self._dim_shards)

    def slice_params(self, trained_module: TrainedModule) -> None:
        """Replaces the full parameters of `trained_module` by this rank's slices."""
        initial_values = trained_module.initial_values
        if not self._dim_shards:
            return
        flattened_names = {
            name for spec in self._plan.view.flat_param_specs.values() for name, _, _ in spec.params
        }
        for name in self._dim_shards:
            parameter = trained_module.parameters[name]
            if name in initial_values and name in flattened_names:
                parameter.data = parameter.data.new_zeros(()).expand(self._shapes_before_slicing(name)[-1])
            else:
                values = (
                    self.load_slice(name, initial_values)
                    if name in initial_values
                    else self.local_slice(name, parameter.detach())
                )
                parameter.data = values.to(parameter.dtype).clone(memory_format=torch.contiguous_format)
        trained_module.initial_values = LazyTensors(
            initial_values, lambda name: self.load_slice(name, initial_values)
        )

    def load_slice(self, name: str, full_values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns this rank's slice of the parameter `name` from `full_values`.

        Other rows are not made.
        """
        spans = self.spans(name)
        if not spans or spans[0].dim != 0:
            return self.local_slice(name, full_values[name])
        row_ranges = [read_region(full_values, name, (range(*rows),)) for rows in spans[0].ranges]
        return slice_dims(row_ranges[0] if len(row_ranges) == 1 else torch.cat(row_ranges), spans[1:])

    def read_shard(
        self, name: str, full_values: Mapping[str, torch.Tensor], entry: str, begin: int, end: int
    ) -> torch.Tensor:
        """Returns elements `begin` to `end` of this rank's flattened slice of the parameter `name`.

        Nothing else of `full_values[entry]` is read.
        """
        return read_shard(full_values, entry, begin, end, self.spans(name))

    def local_slice(self, name: str, full_tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's slice of the logical values `full_tensor` of `name`: a view where possible."""
        return slice_dims(full_tensor, self.spans(name))

    def gather_full(self, name: str, local_slice: torch.Tensor, action: str) -> torch.Tensor:
        """Returns the logical values of `name` from all ranks' slices; all ranks with slices call it."""
        for dim_shard, shape in reversed(
            list(zip(self._dim_shards.get(name, ()), self._shapes_before_slicing(name), strict=False))
        ):
            group, split = self._world.group(dim_shard.axes), dim_shard.dim_split
            full_tensor, local_slice = local_slice.new_empty(shape), local_slice.contiguous()
            for index in range(dim_shard.num_ranks):  # one slice beside the full tensor
                part_shape = split.local_shape(shape, index, dim_shard.num_ranks)
                part = local_slice if index == group.index else full_tensor.new_empty(part_shape)
                group.broadcast(part, source=index, action=action).wait()
                copy_slice_into(full_tensor, (split.dim_ranges(index, dim_shard.num_ranks),), part)
                del part
            local_slice = full_tensor
        return local_slice

    def spans(self, name: str) -> tuple[DimRanges, ...]:
        """Returns the ranges of the logical parameter that this rank holds, dim by dim.

        Empty if it is not sliced.
        """
        return tuple(dim_shard.dim_ranges for dim_shard in self._dim_shards.get(name, ()))

    def _shapes_before_slicing(self, name: str) -> list[tuple[int, ...]]:
        shapes = [self._shapes.get(name, ())]
        for dim_shard in self._dim_shards.get(name, ()):
            shapes.append(dim_shard.dim_split.local_shape(shapes[-1], dim_shard.index, dim_shard.num_ranks))
        return shapes
