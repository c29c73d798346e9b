"""GATHER_GRAD and SCATTER_PARAM: one rank steps a whole matrix of which several hold slices.

    gradient slice --gather--> full gradient --optimizer--> full weight --scatter--> weight slice

An owner keeps the full weight, in the dtype that is stepped: it is the master, and the slices are rounded
copies. Weights are rounded before they are sent. Full gradients exist from GATHER_GRAD to SCATTER_PARAM.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.engine.params.flat_param import FlatParam
from meshwright.engine.params.master_weights import UpdateGroup, has_any
from meshwright.engine.params.tensor_parallel_slices import copy_slice_into
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.tensor_parallel.split_proposal import slice_dims
from meshwright.plan.model_spec.param_dim_split import DimRanges
from meshwright.plan.plan import RankPlan
from meshwright.plan.sharding.flat_param import round_up
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.matrix_owner_actions import MatrixParcel, matrix_parcels, owner_coordinate
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler


@dataclass(frozen=True)
class _ParamSlice:
    shape: tuple[int, ...]
    spans: tuple[DimRanges, ...]

    @property
    def numel(self) -> int:
        """The number of elements of the slice."""
        return torch.Size(self.shape).numel()


class MatrixOwners:
    """The weights that this rank owns, made while `state.trained_module` still holds full values."""

    def __init__(self, state: RankState, flat_params: Mapping[str, FlatParam]) -> None:
        self._state, self._flat_params, plan = state, flat_params, state.plan
        roles = {role: getattr(torch, dtype) for role, dtype in plan.job.precision.roles.items()}
        self._grad_dtype, self._param_dtype, stepped = (
            roles["gradients"],
            roles["parameters"],
            roles["master"],
        )
        self._casts_gradients, self._align_numel = self._grad_dtype != stepped, plan.sharding.align_numel
        # by param group; the names sent here
        self._parcels: dict[str, list[tuple[MatrixParcel, tuple[str, ...]]]] = defaultdict(list)
        self._slices_of_rank: dict[
            tuple[str, ...], list[dict[str, _ParamSlice]]
        ] = {}  # by axes, of every rank along them
        # no memory: shards come and go
        self._example_param = state.trained_module.example_param.detach().new_empty(0)
        self._gradients: dict[str, torch.Tensor] = {}
        self.param_names: set[str] = set()
        self.optimizer_params: dict[str, nn.Parameter] = {}
        self._owned_names: dict[str, list[str]] = defaultdict(list)  # stepped here, by param group
        for parcel in matrix_parcels(plan.view):
            names = parcel.names_by_shard[_mesh_index(plan.mesh, state.world.rank, parcel.shard_axes)]
            self._parcels[parcel.param_group].append((parcel, names))
            self.param_names |= {name for param_slice in parcel.names_by_shard for name in param_slice}
            if parcel.axes not in self._slices_of_rank:
                ranks = range(plan.mesh.group_size(parcel.axes))
                self._slices_of_rank[parcel.axes] = [
                    dict(_slices_of_rank(plan, parcel.axes, index)) for index in ranks
                ]
            if _mesh_index(plan.mesh, state.world.rank, parcel.axes) == parcel.owner:
                self._owned_names[parcel.param_group] += names
        for name in (name for names in self._owned_names.values() for name in names):
            blank = state.trained_module.initial_values
            value = blank[name] if name in blank else state.trained_module.parameters[name].detach()
            self.optimizer_params[name] = nn.Parameter(value.to(stepped, copy=True))
        self.handlers: dict[str, Handler] = {
            "GATHER_GRAD": self.gather_grads,
            "SCATTER_PARAM": self.scatter_params,
        }

    @property
    def nbytes(self) -> int:
        """The bytes of the full weights."""
        return sum(weight.nbytes for weight in self.optimizer_params.values())

    def update_groups(self, chosen: Set[str] | None = None) -> Iterator[UpdateGroup]:
        """Yields the owned parameters, one group at a time, with the gradients of the last GATHER_GRAD; with
        `chosen`, the groups that have one of these names.
        """
        for names in (each for each in self._owned_names.values() if has_any(each, chosen)):
            gradients = tuple(self._gradients.get(name) for name in names)
            yield UpdateGroup(tuple(self.optimizer_params[name] for name in names), gradients, _no_finish)

    @torch.no_grad()
    def load_values(self, name: str, values: torch.Tensor) -> None:
        """Copies `values` into the full weight `name`, if this rank owns it."""
        if name in self.optimizer_params:
            self.optimizer_params[name].copy_(values)

    @torch.no_grad()
    def gather_grads(self, action: Action) -> None:
        """Gathers the slices of a group's summed gradients, each on the owner of its weight."""
        for parcel, names in self._parcels[action.subject]:
            group, slices = self._state.world.group(parcel.axes), self._slices_of_rank[parcel.axes]
            send_buffer, at = self._example_param.new_zeros(parcel.numel, dtype=self._grad_dtype), 0
            for name in names:
                numel, gradient = slices[group.index][name].numel, self._local_gradient(name)
                if gradient is not None:
                    send_buffer[at : at + numel].copy_(gradient.reshape(-1))
                at += round_up(numel, self._align_numel)
            gathered = (
                send_buffer.new_empty(group.size * parcel.numel) if group.index == parcel.owner else None
            )
            group.gather(gathered, send_buffer, target=parcel.owner, action=action.name).wait()
            if gathered is not None:
                self._gradients |= {
                    name: send_buffer.new_empty(self.optimizer_params[name].shape) for name in names
                }
                for name, param_slice, part in self._rank_slices(parcel, names, gathered):
                    copy_slice_into(self._gradients[name], param_slice.spans, part)
        for name in () if self._casts_gradients else self._owned_names[action.subject]:
            self.optimizer_params[name].grad = self._gradients[name]

    @torch.no_grad()
    def scatter_params(self, action: Action) -> None:
        """Scatters the slices of the weights that this rank owns, and receives those of other owners."""
        for name in self._owned_names[action.subject]:
            self.optimizer_params[name].grad = None
            self._gradients.pop(name, None)
        for parcel, names in self._parcels[action.subject]:
            group, send_buffer = self._state.world.group(parcel.axes), None
            if group.index == parcel.owner:
                send_buffer = self._example_param.new_zeros(
                    group.size * parcel.numel, dtype=self._param_dtype
                )
                for name, param_slice, part in self._rank_slices(parcel, names, send_buffer):
                    part.copy_(slice_dims(self.optimizer_params[name], param_slice.spans))
            received, at = self._example_param.new_empty(parcel.numel, dtype=self._param_dtype), 0
            group.scatter(received, send_buffer, source=parcel.owner, action=action.name).wait()
            for name in names:
                place = self._local_param(name)
                place.copy_(received[at : at + place.numel()].view(place.shape))
                at += round_up(place.numel(), self._align_numel)

    def _local_gradient(self, name: str) -> torch.Tensor | None:
        slices = self._flat_params.get(name)
        return (
            self._state.trained_module.parameters[name].grad
            if slices is None
            else slices.param_gradient(name)
        )

    def _local_param(self, name: str) -> torch.Tensor:
        slices = self._flat_params.get(name)
        return (
            self._state.trained_module.parameters[name].data
            if slices is None
            else slices.shard_values(slices.param_shard(name))
        )

    def _rank_slices(
        self, parcel: MatrixParcel, names: tuple[str, ...], flat: torch.Tensor
    ) -> Iterator[tuple[str, _ParamSlice, torch.Tensor]]:
        for index, slices in enumerate(self._slices_of_rank[parcel.axes]):
            at = index * parcel.numel
            for name in names:
                param_slice = slices[name]
                yield name, param_slice, flat[at : at + param_slice.numel].view(param_slice.shape)
                at += round_up(param_slice.numel, self._align_numel)


def _slices_of_rank(plan: RankPlan, axes: tuple[str, ...], index: int) -> Iterator[tuple[str, _ParamSlice]]:
    view = RankView(plan.sharding, owner_coordinate(plan.view, axes, index))
    for local, unsliced in zip(view.param_shardings, view.unsliced_param_shardings, strict=True):
        if local.owner_axes == axes:
            spans = tuple(shard.dim_ranges for shard in view.dim_shards(unsliced))
            yield local.param.name, _ParamSlice(local.param.shape, spans)


def _mesh_index(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> int:
    return mesh.index(mesh.coordinate(rank), axes)


def _no_finish() -> None:
    """Does nothing: SCATTER_PARAM updates the slices."""
