"""The weights of which a rank has a slice: cut out of whole values, and put together again.

    logical weight      whole: as the model declares it, as checkpoints hold it
    along tp, rank 1    the ranges of its cut (core/cut.py), one behind the other: what the module's parameter holds

A weight may be cut along several dims, and a dim along several axes. Whole values exist where somebody asks for them: initial
values one weight at a time, checkpoints, comparisons, exports. No step does.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch

from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.state import TrainedModule
from meshwright.model.tensor_parallel.slice_plan import slice_dims
from meshwright.model.tensors.lazy_tensors import LazyTensors, read_rows
from meshwright.plan.model_spec.dim_split import DimRanges
from meshwright.plan.plan import Plan


def copy_slice_into(full_tensor: torch.Tensor, spans: Sequence[DimRanges], local_slice: torch.Tensor) -> None:
    """Copy the slice `mine` into its places in `whole`."""
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
    """What the rank of `world` has of each weight that is cut along a dim of its own."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan, self._world = plan, world
        coordinate = plan.mesh.coordinate(world.rank)
        cut = {home.param.name: home for home in plan.sharding.logical_param_shardings if home.sliced_dims}
        self._sides = {name: plan.sharding.dim_shards(home, coordinate) for name, home in cut.items()}
        self._shapes = {name: home.param.shape for name, home in cut.items()}

    def __bool__(self) -> bool:
        return bool(self._sides)

    def slice_params(self, trained_module: TrainedModule) -> None:
        """Leave `subject`, whose parameters are whole, what this rank has of them."""
        blank = trained_module.initial_values
        if not self._sides:
            return
        in_arenas = {
            name for arena in self._plan.sharding.flat_param_specs().values() for name, _, _ in arena.params
        }
        for name in self._sides:
            parameter = trained_module.parameters[name]
            if name in blank and name in in_arenas:
                parameter.data = parameter.data.new_zeros(()).expand(self._cut_before(name)[-1])
            else:
                values = (
                    self.load_slice(name, blank)
                    if name in blank
                    else self.local_slice(name, parameter.detach())
                )
                parameter.data = values.to(parameter.dtype).clone(memory_format=torch.contiguous_format)
        trained_module.initial_values = LazyTensors(blank, lambda name: self.load_slice(name, blank))

    def load_slice(self, name: str, full_values: Mapping[str, torch.Tensor], entry: str = "") -> torch.Tensor:
        """What this rank has of the weight `name`, of whose `logical` values (`entry` there) other rows are not made."""
        spans, entry = self.spans(name), entry or name
        if not spans or spans[0].dim != 0:
            return self.local_slice(name, full_values[entry])
        parts = [read_rows(full_values, entry, range(*each)) for each in spans[0].ranges]
        return slice_dims(parts[0] if len(parts) == 1 else torch.cat(parts), spans[1:])

    def local_slice(self, name: str, full_tensor: torch.Tensor) -> torch.Tensor:
        """What this rank has of the logical values `whole` of the weight `name`: a view of them, where it can be."""
        return slice_dims(full_tensor, self.spans(name))

    def gather_full(self, name: str, local_slice: torch.Tensor, action: str) -> torch.Tensor:
        """The logical values of the weight `name`, of which this rank has `mine`; all ranks that have slices take part."""
        for side, shape in reversed(
            list(zip(self._sides.get(name, ()), self._cut_before(name), strict=False))
        ):
            group = self._world.group(side.axes)
            shapes = [
                side.dim_split.local_shape(shape, index, side.num_ranks) for index in range(side.num_ranks)
            ]
            largest = max(map(prod, shapes))
            sent = local_slice.new_zeros(largest)
            sent[: local_slice.numel()] = local_slice.reshape(-1)
            arrived = local_slice.new_empty(side.num_ranks * largest)
            group.all_gather(arrived, sent, action=action).wait()
            local_slice = local_slice.new_empty(shape)
            for index, each in enumerate(shapes):
                theirs = arrived[index * largest : index * largest + prod(each)].view(each)
                copy_slice_into(local_slice, (side.dim_split.dim_ranges(index, side.num_ranks),), theirs)
        return local_slice

    def spans(self, name: str) -> tuple[DimRanges, ...]:
        """What this rank has of the logical weight, dim by dim; empty for one that is not cut."""
        return tuple(side.dim_ranges for side in self._sides.get(name, ()))

    def _cut_before(self, name: str) -> list[tuple[int, ...]]:
        """The shapes of the weight `name` before it is cut along each of its sides, and what this rank has in the end."""
        shapes = [self._shapes.get(name, ())]
        for side in self._sides.get(name, ()):
            shapes.append(side.dim_split.local_shape(shapes[-1], side.index, side.num_ranks))
        return shapes
