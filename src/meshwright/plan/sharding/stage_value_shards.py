"""Determines what each rank holds of a value that crosses a stage boundary: all of it, or a slice.

    the residual stream, sharded along tokens        outputs of the block calls that pass slices on
    the residual stream, sharded along hidden        every value as wide as the stream
    per-head tensors, 4-dim                          the local heads, if the producer has local heads
    everything else                                  replicated on all ranks that have slices of parameters
    sequence sharding                                the rank's own tokens, and of those the slice, if any

A slice is sent from each rank to the rank at the same position in the next stage, and so is its gradient: no
gather is needed. If two values look like the residual stream, or one could be a slice of something else, the
split point is refused. The values of the forward are compared with this plan before they are sent.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.model_spec.param_dim_split import DimShard, DimSplit
from meshwright.plan.model_spec.stage_transfers import StageValue
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import Placement

PER_HEAD_NDIM = 4  # dims of a per-head tensor: samples, heads, queries, keys
# Axes, and the split of a dim over all of them together.
AxesSplits = tuple[tuple[tuple[str, ...], DimSplit], ...]
DimSizes = tuple[tuple[int, int], ...]


class StageValueShards:
    """The local slices of `values` on the rank of `view`."""

    def __init__(self, view: RankView, values: Iterable[StageValue]) -> None:
        self._view, self._splits, self._axes = view, dict(_splits(view.plan, values)), _axes(view.plan)

    def local_shape(self, value: StageValue, num_samples: int) -> tuple[int, ...]:
        """Returns the local shape of `value` for `num_samples` samples, whose length may differ from the
        plan's.
        """
        view, mesh, shape = self._view, self._view.plan.mesh, value.shape(num_samples)
        coordinate = view.coordinate
        if view.plan.sequence_sharding is not None and value.sequence_dim is not None:
            num_tokens = view.plan.sequence_sharding.num_padded_tokens(
                shape[value.sequence_dim], mesh.index(coordinate, view.plan.token_axes)
            )
            shape = (*shape[: value.sequence_dim], num_tokens, *shape[value.sequence_dim + 1 :])
        for axes, split in self._splits.get(value.name, ()):
            size = shape[split.dim]
            if sum(split.sections) != size:  # local tokens, or samples of another length than the plan's
                split = DimSplit(split.dim, size, (size,))
            shard = DimShard(axes, split, mesh.group_size(axes), mesh.index(coordinate, axes))
            shape = shard.dim_split.local_shape(shape, shard.index, shard.num_ranks)
        return shape

    def local_positions(self, value: StageValue, num_samples: int) -> dict[int, list[int]]:
        """Returns the positions in the full value of what this rank has of it, by dim that ranks share; -1
        for padding.
        """
        view, mesh, shape = self._view, self._view.plan.mesh, value.shape(num_samples)
        found: dict[int, list[int]] = {}
        if view.plan.sequence_sharding is not None and value.sequence_dim is not None:
            length, index = shape[value.sequence_dim], mesh.index(view.coordinate, view.plan.token_axes)
            spans = view.plan.sequence_sharding.token_ranges(length, index)
            positions = [position for begin, end in spans for position in range(begin, end)]
            missing = view.plan.sequence_sharding.num_padded_tokens(length, index) - len(positions)
            found[value.sequence_dim] = [*positions, *[-1] * missing]
        for axes, split in self._splits.get(value.name, ()):
            positions = found.get(split.dim) or list(range(shape[split.dim]))
            if sum(split.sections) != len(positions):
                split = DimSplit(split.dim, len(positions), (len(positions),))
            ranges = split.ranges(mesh.index(view.coordinate, axes), mesh.group_size(axes))
            found[split.dim] = [positions[at] for begin, end in ranges for at in range(begin, end)]
        return found

    def glue_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the local shape, for glue, of a value of `shape`: sliced if the hidden dim is sharded."""
        placements = _residual_placements(self._view.plan)
        if (
            not placements
            or self._view.plan.sequence_sliced_calls
            or (*shape[-1:], 0) not in _widths(self._view.plan)
        ):
            return shape
        coordinate = self._view.coordinate
        for axes, split in _by_dim(placements, tuple((each, 0) for each in shape)):
            shard = DimShard(
                axes,
                split,
                self._view.plan.mesh.group_size(axes),
                self._view.plan.mesh.index(coordinate, axes),
            )
            shape = shard.dim_split.local_shape(shape, shard.index, shard.num_ranks)
        return shape

    def replicated_axes(self, value: StageValue) -> tuple[str, ...]:
        """Returns the axes along which ranks have slices of parameters but the same `value`."""
        split = {axis for axes, _ in self._splits.get(value.name, ()) for axis in axes}
        return tuple(axis for axis in self._axes if axis not in split)


def stage_value_diagnostics(sharding: ShardingPlan, values: Iterable[StageValue]) -> Iterator[Diagnostic]:
    """Yields the `values` whose local slices cannot be determined while the residual stream is sharded."""
    placements, location = _residual_placements(sharding), "strategies.pipeline.split_points"
    if not placements:
        return
    axes = " and ".join(placements)
    fix = "choose split points that it does not cross, or remove the strategy that shards the residual stream"
    values = list(values)
    if not sharding.sequence_sliced_calls:
        sliced = {name for name, _ in _splits(sharding, values)}
        for value in (value for value in values if value.name not in sliced):
            shape = " x ".join(str(each) if not more else "samples" for each, more in value.dim_sizes)
            text = f"the hidden dim is sharded along {axes}, and '{value}' ({shape}) crosses a stage boundary"
            yield Diagnostic(f"{text}: the slice that a rank has of it is not known", fix, location)
        return
    sliced_outputs = _sliced_outputs(sharding)
    for block_call in dict.fromkeys(value.producer for value in values):
        candidates = [
            value for value in values if value.producer == block_call and _is_residual(value, sliced_outputs)
        ]
        if len(candidates) > 1:
            names = " and ".join(f"'{value}'" for value in candidates)
            text = f"tokens are sharded along {axes}, and '{block_call}' returns {names} of the same shape"
            yield Diagnostic(f"{text}: the residual stream among them is not known", fix, location)


def _splits(sharding: ShardingPlan, values: Iterable[StageValue]) -> Iterator[tuple[str, AxesSplits]]:
    placements = _residual_placements(sharding)
    sliced_outputs = _sliced_outputs(sharding)
    widths = _widths(sharding)
    heads = _heads(sharding)
    axes = _axes(sharding)
    for value in values:
        head_split = (
            heads.get((value.producer, value.dim_sizes[1][0]))
            if len(value.dim_sizes) == PER_HEAD_NDIM and not value.op
            else None
        )
        if axes and head_split is not None:
            yield value.name, ((axes, head_split),)
        elif placements and (
            _is_residual(value, sliced_outputs)
            if sharding.sequence_sliced_calls
            else bool(value.dim_sizes) and value.dim_sizes[-1] in widths
        ):
            yield value.name, tuple(_by_dim(placements, value.dim_sizes))


def _axes(sharding: ShardingPlan) -> tuple[str, ...]:
    return tuple(axis for axis in sharding.param_slice_axes if sharding.mesh.size(axis) > 1)


def _by_dim(
    placements: Mapping[str, Placement], dims: DimSizes
) -> Iterator[tuple[tuple[str, ...], DimSplit]]:
    found = sorted(
        (placement.dim % len(dims), AXES.index(axis))
        for axis, placement in placements.items()
        if placement.dim is not None
    )
    for dim, items in groupby(found, key=lambda each: each[0]):
        size, _ = dims[dim]
        yield tuple(AXES[attribute] for _, attribute in items), DimSplit(dim, size, (size,))


def _residual_placements(sharding: ShardingPlan) -> Mapping[str, Placement]:
    return {
        axis: placement
        for axis, placement in sharding.residual_layout.placements
        if placement.letter == "S" and sharding.mesh.size(axis) > 1
    }


def _sliced_outputs(sharding: ShardingPlan) -> Mapping[str, DimSizes]:
    ends, model_spec = sharding.sequence_slice_ends(), sharding.model_spec
    flows = [
        each for each in model_spec.residual_flows if each.block_call in ends and not ends[each.block_call][1]
    ]
    return {each.block_call: ((0, 1), (each.num_tokens, 0), (each.hidden_size, 0)) for each in flows}


def _is_residual(value: StageValue, sliced_outputs: Mapping[str, DimSizes]) -> bool:
    return not value.op and sliced_outputs.get(value.producer) == value.dim_sizes


def _widths(sharding: ShardingPlan) -> frozenset[tuple[int, int]]:
    return frozenset((each.hidden_size, 0) for each in sharding.model_spec.residual_flows)


def _heads(sharding: ShardingPlan) -> Mapping[tuple[str, int], DimSplit]:
    model_spec, found = sharding.model_spec, {}
    for attribute in (
        attribute
        for attribute in model_spec.size_attributes
        if attribute.divisor_split is None and len(attribute.dim_split.sections) == 1
    ):
        for block_call in model_spec.block_calls:
            block = block_of(block_call)
            if attribute.module == block or attribute.module.startswith(f"{block}."):
                (count,) = attribute.dim_split.sections
                found[block_call, count] = DimSplit(
                    1,
                    attribute.dim_split.num_units,
                    (count,),
                    num_heads=attribute.dim_split.num_heads,
                    per_head_numel=attribute.dim_split.per_head_numel,
                )
    return found
