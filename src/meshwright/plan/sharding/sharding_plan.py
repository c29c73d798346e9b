"""Where everything lives: the layouts of all that a step holds, and the bundles that follow from them.

A weight that every rank uses on its own samples is R along the data axes; its gradient, the adjoint, is P there: each
rank holds a summand. `grad` is the place in which the optimizer wants the gradient, and steps the weight. What lies between
the two is read from the move table, and the program must contain it. `stored` is where a weight is between its uses; what is
stored or stepped S(flat) lies in an arena. `Space.at` is what the rank at a coordinate sees: there, weights that are cut along a
dim of theirs have the shape of its slice, and all sizes that follow are its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from meshwright.plan.model_spec.dim_split import DimShard
from meshwright.plan.model_spec.layer_calls import LayerCall
from meshwright.plan.model_spec.model_spec import ModelSpec, ParamSpec
from meshwright.plan.model_spec.sequence_info import SequenceSharding
from meshwright.plan.model_spec.stage_boundaries import StageSpec
from meshwright.plan.sharding.flat_param import FlatParamSpec
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.plan.sharding.param_sharding import ParamGroup, ParamSharding
from meshwright.plan.sharding.placement import I, Layout, Placement, R


@dataclass(frozen=True)
class ShardingPlan:
    """The layouts of samples, of the stream between blocks, of logits, and of weights on a mesh. Unnamed axes are invariant.

    Where the stream goes in slices of tokens, it does so `through` the visits that are named. Along the axes `led`, the rank at
    index 0 reads the samples, takes the loss and steps for all the others. Along pp, the rank at each index runs the visits that
    `stages` name for it, and holds their weights; empty: all of them. The parts that they consist of begin with `cuts`, but for
    the first one. `whole` is the space of all ranks, where this one is that of a coordinate (`at`). Where ranks have some of the
    tokens of a sample each, those are dealt as `deal` says. LOSS makes logits, and looks at them, in so many `pieces` of tokens.
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
    num_loss_chunks: int = 1
    all_ranks: "ShardingPlan | None" = None
    coordinate: tuple[tuple[str, int], ...] = field(default=(), compare=False)

    @classmethod
    def one_device(cls, mesh: Mesh, model_spec: ModelSpec) -> "ShardingPlan":
        """Every tensor invariant: what each rank would hold if it trained alone."""
        return cls(mesh, model_spec, tuple(ParamSharding(weight) for weight in model_spec.params))

    def with_batch_placement(self, axis: str, placement: Placement) -> "ShardingPlan":
        """This space with the samples at `place` along `axis`."""
        return replace(self, batch_layout=self.batch_layout.with_placement(axis, placement))

    def with_residual_placement(
        self,
        axis: str,
        placement: Placement,
        sequence_sliced_calls: tuple[str, ...] = (),
        *,
        regather: bool = False,
    ) -> "ShardingPlan":
        """This space with what goes from block to block at `place` along `axis`: `through` these visits alone, if any.

        `anew`: layers keep it as it lies for backward, not what it became for them.
        """
        return replace(
            self,
            residual_layout=self.residual_layout.with_placement(axis, placement),
            sequence_sliced_calls=sequence_sliced_calls,
            regather=regather,
        )

    def residual_placement(self, calls: Iterable[LayerCall], axis: str) -> Placement:
        """Where the stream lies along `axis` when `calls` take it in: it is whole for those that do not take its slices."""
        return (
            self.residual_layout.placement(axis)
            if not self.sequence_sliced_calls or all(map(self.takes_sequence_slices, calls))
            else I
        )

    def takes_sequence_slices(self, call: LayerCall) -> bool:
        """Whether `call` takes in the stream where that goes through visits in slices; a head that is a block may too."""
        if call.block_call in self.sequence_sliced_calls or not call.takes_residual:
            return call.takes_residual
        behind = [
            passage.block_call
            for passage in (self.all_ranks or self).model_spec.residual_flows
            if passage.consumer == call.block_call
        ]
        return (
            call.role == "lm_head"
            and call.name == call.block_call
            and any(visit in self.sequence_sliced_calls for visit in behind)
        )

    def sequence_slice_ends(self) -> dict[str, tuple[bool, bool]]:
        """Of each visit through which the stream goes in slices, whether those are cut where it begins, and end with it."""
        logical = self.all_ranks or self  # what comes behind a part decides what the part hands on
        cut = {name for home in logical.param_shardings if home.sliced_dims for name in home.param.names}
        heads = [
            call
            for call in logical.model_spec.layer_calls
            if call.role == "lm_head" and f"{call.name}.weight" in cut
        ]
        slices = {
            *self.sequence_sliced_calls,
            *(call.block_call for call in heads if self.takes_sequence_slices(call)),
        }
        through = [
            passage
            for passage in logical.model_spec.residual_flows
            if passage.block_call in self.sequence_sliced_calls
        ]
        return {
            each.block_call: (each.producer not in self.sequence_sliced_calls, each.consumer not in slices)
            for each in through
        }

    def map_param_shardings(
        self, change: Callable[[ParamSharding], ParamSharding], *, frozen: bool = False
    ) -> "ShardingPlan":
        """This space with every trainable weight's home changed by `change`; with `frozen`, those of all others instead."""
        return replace(
            self,
            param_shardings=tuple(
                change(home) if home.param.trainable != frozen else home for home in self.param_shardings
            ),
        )

    def with_logits_placement(self, axis: str, placement: Placement) -> "ShardingPlan":
        """This space with what a head hands to the loss at `place` along `axis`."""
        return replace(self, logits_layout=self.logits_layout.with_placement(axis, placement))

    def with_pipeline(
        self, block_calls_by_pp_rank: Iterable[tuple[str, ...]], split_points: tuple[str, ...]
    ) -> "ShardingPlan":
        """This space with the visits of `stages` on the ranks along pp; what several of them use is summed over those."""
        staged = replace(
            self, block_calls_by_pp_rank=tuple(block_calls_by_pp_rank), split_points=split_points
        )

        def shared(home: ParamSharding) -> ParamSharding:
            tied = len(staged.pp_ranks_using(home.param)) > 1
            return (
                replace(
                    home,
                    layout=home.layout.with_placement("pp", R),
                    grad_layout=home.grad_layout.with_placement("pp", I),
                )
                if tied
                else home
            )

        return staged.map_param_shardings(shared)

    def pp_ranks_using(self, param: ParamSpec) -> tuple[int, ...]:
        """The indices along pp of the ranks that use `weight`, which is one of the whole model, in a block or in glue."""
        needing = (
            set((self.all_ranks or self).model_spec.block_calls_needing(param))
            if self.block_calls_by_pp_rank
            else set()
        )
        return tuple(
            i for i, stage in enumerate(self.block_calls_by_pp_rank) if not needing.isdisjoint(stage)
        ) or (0,)

    @property
    def logical_param_shardings(self) -> tuple[ParamSharding, ...]:
        """The homes of what this rank holds, as all ranks see them: before it was cut into slices."""
        own = {home.param.name for home in self.param_shardings}
        return tuple(home for home in (self.all_ranks or self).param_shardings if home.param.name in own)

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """The parts of the model, in order of the forward; none where ranks run it whole, or nothing is known of its borders."""
        borders = (self.all_ranks or self).model_spec.stage_boundaries
        return (
            borders.stages(self.split_points) if self.block_calls_by_pp_rank and borders is not None else ()
        )

    @property
    def computes_loss(self) -> bool:
        """Whether this rank runs what the loss follows."""
        return (self.all_ranks or self).model_spec.block_calls[-1] in self.model_spec.block_calls

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold different samples, outermost first."""
        return tuple(axis for axis in AXES if self.batch_layout.placement(axis).dim == 0)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold different tokens of the same samples, outermost first."""
        return tuple(axis for axis in AXES if self.batch_layout.placement(axis).dim == 1)

    def with_token_axes(self, *axes: str) -> tuple[str, ...]:
        """Where gradients are summed along `axes`: what ranks have of the tokens of a sample adds up like samples do."""
        return tuple(axis for axis in AXES if axis in axes or axis in self.token_axes)

    @property
    def grad_sum_axes(self) -> tuple[str, ...]:
        """The axes along which gradients are summands, for ranks have other samples, or other tokens of them."""
        return self.with_token_axes(*self.data_axes)

    @property
    def grad_norm_axes(self) -> tuple[str, ...]:
        """The axes along which ranks step different elements, so that no rank knows the norm of all gradients."""
        cut = {
            axis
            for home in (self.all_ranks or self).param_shardings
            if home.param.trainable
            for axis in home.grad_layout.axes_with("S")
        }
        return tuple(axis for axis in AXES if axis in cut or (axis == "pp" and self.block_calls_by_pp_rank))

    @property
    def param_slice_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have slices of weights, outermost first."""
        cut = {axis for home in (self.all_ranks or self).param_shardings for axis in home.sliced_dims}
        return tuple(axis for axis in AXES if axis in cut)

    @property
    def model_parallel_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have other weights, or other slices of them, for the same samples."""
        return tuple(
            axis
            for axis in AXES
            if axis in self.param_slice_axes or (axis == "pp" and self.block_calls_by_pp_rank)
        )

    def params_counted_in_sum(self, coordinate: Mapping[str, int]) -> Iterator[str]:
        """The weights that count at `coordinate` in what is added up along `weight_axes`: nobody else tells the same of them."""
        away = {axis for axis in self.param_slice_axes if coordinate[axis]}
        yield from (
            home.param.name for home in self._first_user_params(coordinate) if away <= home.sliced_dims.keys()
        )

    def params_counted_in_norm(self, coordinate: Mapping[str, int]) -> Iterator[str]:
        """The weights of which the rank at `coordinate` is the first to step its elements: those that count in the norm there."""
        away = {axis for axis in self.grad_norm_axes if coordinate[axis] and axis != "pp"}
        yield from (
            home.param.name
            for home in self._first_user_params(coordinate)
            if away <= set(home.grad_layout.axes_with("S"))
        )

    def _first_user_params(self, coordinate: Mapping[str, int]) -> Iterator[ParamSharding]:
        """The weights of which the rank at `coordinate` is the first along pp that uses them."""
        for home, logical in zip(self.param_shardings, self.logical_param_shardings, strict=True):
            if not self.block_calls_by_pp_rank or self.pp_ranks_using(logical.param)[0] == coordinate["pp"]:
                yield home

    def at_pp_rank(self, pp_rank: int) -> "ShardingPlan":
        """This space as the ranks at `index` along pp see it, at the same place along all other axes."""
        return self.at_coordinate({**dict(self.coordinate), "pp": pp_rank})

    def at_coordinate(self, coordinate: Mapping[str, int]) -> "ShardingPlan":
        """This space as the rank at `coordinate` sees it."""
        logical, anatomy = self.all_ranks or self, (self.all_ranks or self).model_spec
        homes = logical.param_shardings
        if logical.block_calls_by_pp_rank:
            anatomy = anatomy.restricted_to(logical.block_calls_by_pp_rank[coordinate["pp"]])
            own = {weight.name: weight.block_calls for weight in anatomy.params}
            mine = (home for home in homes if home.param.name in own)
            homes = tuple(
                replace(home, param=replace(home.param, block_calls=own[home.param.name])) for home in mine
            )
        homes = tuple(logical._sliced(home, coordinate) for home in homes)
        return replace(
            logical,
            model_spec=anatomy,
            param_shardings=homes,
            all_ranks=logical,
            coordinate=tuple(coordinate.items()),
        )

    def slice_range(self, name: str, axis: str) -> tuple[int, int]:
        """Of the weight `name`, which is cut along `axis`, the first index and the one behind the last of what this rank has."""
        home = next(home for home in (self.all_ranks or self).param_shardings if home.param.name == name)
        (found,) = home.param.dim_split(home.sliced_dims[axis]).ranges(
            dict(self.coordinate)[axis], self.mesh.size(axis)
        )
        return found

    def dim_shards(
        self, param_sharding: ParamSharding, coordinate: Mapping[str, int]
    ) -> tuple[DimShard, ...]:
        """How `home` is cut, dim by dim, and which slice the rank at `coordinate` has."""
        found = []
        for dim in dict.fromkeys(
            param_sharding.sliced_dims[axis] for axis in AXES if axis in param_sharding.sliced_dims
        ):
            axes = tuple(axis for axis in AXES if param_sharding.sliced_dims.get(axis) == dim)
            found.append(
                DimShard(
                    axes,
                    param_sharding.param.dim_split(dim),
                    self.mesh.group_size(axes),
                    self.mesh.index(coordinate, axes),
                )
            )
        return tuple(found)

    def _sliced(self, param_sharding: ParamSharding, coordinate: Mapping[str, int]) -> ParamSharding:
        shape = param_sharding.param.shape
        for side in self.dim_shards(param_sharding, coordinate):
            shape = side.dim_split.local_shape(shape, side.index, side.num_ranks)
        return (
            param_sharding
            if shape == param_sharding.param.shape
            else replace(param_sharding, param=replace(param_sharding.param, shape=shape))
        )

    def local_shape(
        self, shape: tuple[int, ...], layout: Layout, coordinate: Mapping[str, int]
    ) -> tuple[int, ...]:
        """The shape that the rank at `coordinate` holds of a tensor: dims split as evenly as can be, larger first."""
        sizes = list(shape)
        for axis in AXES:
            place = layout.placement(axis)
            if place.dim is not None:
                count, index = self.mesh.size(axis), coordinate[axis]
                sizes[place.dim] = sizes[place.dim] // count + (index < sizes[place.dim] % count)
        return tuple(sizes)

    def param_groups(self, *, frozen: bool = False) -> tuple[ParamGroup, ...]:
        """The bundles in the order in which backward completes them; with `frozen`, those of weights without gradients.

        What ranks along pp sum is in bundles of the same weights on all of these: of those that the same visits of all ranks use.
        """
        found: dict[tuple, list[ParamSharding]] = {}
        whole = self.logical_param_shardings
        logical = {home.param.name: home.param for home in whole}
        uneven = {home.param.name for home in whole if self._is_uneven(home)}
        for home in self.param_shardings:
            if home.param.trainable != frozen:
                weight, grain = (
                    home.param,
                    (home.shard_alignment, home.owner_axes) if home.flat_shard_axes else (),
                )
                apart, moves = weight.name in uneven, home.grad_reductions()
                using = (
                    (logical[weight.name].block_calls, self.pp_ranks_using(logical[weight.name]))
                    if "pp" in moves
                    else (weight.block_calls, ())
                )
                key = (
                    using,
                    weight.dtype,
                    tuple(moves.items()),
                    home.flat_shard_axes,
                    home.is_stored_sharded,
                    grain,
                    apart,
                )
                found.setdefault(key, []).append(home)
        bundles = [
            self._param_group(homes, *key[0], uneven=homes[0].param.name in uneven)
            for key, homes in found.items()
        ]
        return tuple(sorted(bundles, key=self._completion))

    def all_param_groups(self) -> tuple[ParamGroup, ...]:
        """The bundles that are trained, then the frozen ones."""
        return (*self.param_groups(), *self.param_groups(frozen=True))

    def flat_param_specs(self) -> dict[str, FlatParamSpec]:
        """The arenas, by the name of their bundle: those of bundles that are stepped or stored S(flat)."""
        found, whole = (
            {},
            {home.param.name: home.param.numel for home in (self.all_ranks or self).param_shardings},
        )
        for bundle in self.all_param_groups():
            axes = bundle.param_shardings[0].flat_shard_axes
            if axes:
                ranks, grain = self.mesh.group_size(axes), bundle.param_shardings[0].shard_alignment
                found[bundle.name] = FlatParamSpec.build(
                    bundle.name, bundle.params, axes, ranks, grain, whole
                )
        return found

    def unreduced_params(self) -> Iterator[ParamSharding]:
        """The weights whose gradients would reach the optimizer as summands."""
        return (
            home for home in self.param_shardings if home.param.trainable and home.grad_layout.axes_with("P")
        )

    def _is_uneven(self, param_sharding: ParamSharding) -> bool:
        """Whether ranks keep slices of unlike sizes in an arena, or sum them in a bucket: one of their own.

        So what is whole lies alike on all. Where it lies decides the last bit of products, sums and steps, and copies must stay
        equal to the bit. Owners step whole ones.
        """
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
        apart = [axis for axis in first.grad_reductions() if axis not in self.grad_sum_axes]
        apart = [f"pp {'+'.join(map(str, users))}" if axis == "pp" else axis for axis in apart]
        name += f" over {' '.join(apart)}" if apart else ""
        name += " in uneven slices" if uneven else ""
        if first.flat_shard_axes and first.shard_alignment != "element":
            name += (
                f" by owner along {' '.join(first.owner_axes)}"
                if first.owner_axes
                else f" by {first.shard_alignment}"
            )
        weights = [home.param for home in param_shardings]
        return ParamGroup(name, tuple(param_shardings), self.model_spec.last_backward(weights), users, uneven)

    def _completion(self, param_group: ParamGroup) -> int:
        visits = self.model_spec.block_calls
        return (
            len(visits)
            if param_group.last_block_call is None
            else len(visits) - 1 - visits.index(param_group.last_block_call)
        )
