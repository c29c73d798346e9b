"""GATHER_GRAD and SCATTER_PARAM: the whole weights that this rank steps of those of which it has slices (core/owners.py).

    slice of the summed gradient --gather--> whole gradient --optimizer--> whole weight --scatter--> slice of the weight

An owner keeps the whole weight, in the dtype that is stepped: it is the master, and the slices are that, rounded. What travels
back is rounded before it is sent. Whole gradients come with GATHER_GRAD and go with SCATTER_PARAM.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.engine.params.flat_param import FlatParam, UpdateGroup
from meshwright.engine.params.param_slices import copy_slice_into
from meshwright.engine.runtime.state import RankState
from meshwright.model.tensor_parallel.slice_plan import slice_dims
from meshwright.plan.model_spec.dim_split import DimRanges
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.action import Action
from meshwright.plan.step.matrix_owners import MatrixParcel, matrix_parcels, owner_coordinate
from meshwright.plan.strategy import Handler


@dataclass(frozen=True)
class _ParamSlice:
    """What one rank has of a weight."""

    shape: tuple[int, ...]
    spans: tuple[DimRanges, ...]

    @property
    def numel(self) -> int:
        """How many elements that is."""
        return torch.Size(self.shape).numel()


class MatrixOwners:
    """What this rank owns, made while the values of `state.subject` are still whole; `held` are the arenas, by weight."""

    def __init__(self, plan: Plan, state: RankState, flat_params: Mapping[str, FlatParam]) -> None:
        self._state, self._held = state, flat_params
        roles = {role: getattr(torch, dtype) for role, dtype in plan.job.precision.roles.items()}
        self._sent, self._back, stepped = roles["gradients"], roles["parameters"], roles["master"]
        self._casts = self._sent != stepped
        self._parcels: dict[str, list[tuple[MatrixParcel, tuple[str, ...]]]] = defaultdict(
            list
        )  # by bundle; the names sent here
        self._slices: dict[
            tuple[str, ...], list[dict[str, _ParamSlice]]
        ] = {}  # by axes, of every rank along them
        self._like = (
            next(iter(state.trained_module.parameters.values())).detach().new_empty(0)
        )  # no memory: shards come and go
        self._gradients: dict[str, torch.Tensor] = {}
        self.param_names: set[str] = set()
        self.optimizer_params: dict[str, nn.Parameter] = {}
        self._mine: dict[str, list[str]] = defaultdict(list)  # what is stepped here, by bundle
        for parcel in matrix_parcels(plan.sharding):
            names = parcel.names_by_shard[_index(plan.mesh, state.world.rank, parcel.shard_axes)]
            self._parcels[parcel.param_group].append((parcel, names))
            self.param_names |= {name for each in parcel.names_by_shard for name in each}
            if parcel.axes not in self._slices:
                ranks = range(plan.mesh.group_size(parcel.axes))
                self._slices[parcel.axes] = [dict(_slices(plan, parcel.axes, index)) for index in ranks]
            if _index(plan.mesh, state.world.rank, parcel.axes) == parcel.owner:
                self._mine[parcel.param_group] += names
        for name in (name for names in self._mine.values() for name in names):
            blank = state.trained_module.initial_values
            value = blank[name] if name in blank else state.trained_module.parameters[name].detach()
            self.optimizer_params[name] = nn.Parameter(value.to(stepped, copy=True))
        self.handlers: dict[str, Handler] = {
            "GATHER_GRAD": self.gather_grads,
            "SCATTER_PARAM": self.scatter_params,
        }

    @property
    def nbytes(self) -> int:
        """The bytes of the whole weights."""
        return sum(weight.nbytes for weight in self.optimizer_params.values())

    def update_groups(self) -> Iterator[UpdateGroup]:
        """What is stepped, one bundle after the other, with the gradients that the last GATHER_GRAD has left."""
        for names in self._mine.values():
            gradients = tuple(self._gradients.get(name) for name in names)
            yield UpdateGroup(tuple(self.optimizer_params[name] for name in names), gradients, _nothing)

    @torch.no_grad()
    def load_values(self, name: str, values: torch.Tensor) -> None:
        """Have the whole weight `name` be `values`, if it is owned here."""
        if name in self.optimizer_params:
            self.optimizer_params[name].copy_(values)

    @torch.no_grad()
    def gather_grads(self, action: Action) -> None:
        """Bring the slices of the summed gradients of a bundle together, each on the owner of its weight."""
        for parcel, names in self._parcels[action.subject]:
            group, held = self._state.world.group(parcel.axes), self._slices[parcel.axes]
            sent, at = self._like.new_zeros(parcel.numel, dtype=self._sent), 0
            for name in names:
                numel, gradient = held[group.index][name].numel, self._summed(name)
                if gradient is not None:
                    sent[at : at + numel].copy_(gradient.reshape(-1))
                at += numel
            arrived = sent.new_empty(group.size * parcel.numel) if group.index == parcel.owner else None
            group.gather(arrived, sent, target=parcel.owner, action=action.name).wait()
            if arrived is not None:
                self._gradients |= {name: sent.new_empty(self.optimizer_params[name].shape) for name in names}
                for name, each, part in self._parts(parcel, names, arrived):
                    copy_slice_into(self._gradients[name], each.spans, part)
        for name in () if self._casts else self._mine[action.subject]:
            self.optimizer_params[name].grad = self._gradients[name]

    @torch.no_grad()
    def scatter_params(self, action: Action) -> None:
        """Hand out the slices of what this rank steps of a bundle, and take those of what others step."""
        for name in self._mine[action.subject]:
            self.optimizer_params[name].grad = None
            self._gradients.pop(name, None)
        for parcel, names in self._parcels[action.subject]:
            group, sent = self._state.world.group(parcel.axes), None
            if group.index == parcel.owner:
                sent = self._like.new_zeros(group.size * parcel.numel, dtype=self._back)
                for name, each, part in self._parts(parcel, names, sent):
                    part.copy_(slice_dims(self.optimizer_params[name], each.spans))
            mine, at = self._like.new_empty(parcel.numel, dtype=self._back), 0
            group.scatter(mine, sent, source=parcel.owner, action=action.name).wait()
            for name in names:
                place = self._place(name)
                place.copy_(mine[at : at + place.numel()].view(place.shape))
                at += place.numel()

    def _summed(self, name: str) -> torch.Tensor | None:
        """This rank's slice of the summed gradient of a weight; None where that is zero."""
        held = self._held.get(name)
        return self._state.trained_module.parameters[name].grad if held is None else held.param_gradient(name)

    def _place(self, name: str) -> torch.Tensor:
        """Where this rank keeps its slice of a weight."""
        held = self._held.get(name)
        return (
            self._state.trained_module.parameters[name].data
            if held is None
            else held.shard_values(held.param_shard(name))
        )

    def _parts(
        self, parcel: MatrixParcel, names: tuple[str, ...], flat: torch.Tensor
    ) -> Iterator[tuple[str, _ParamSlice, torch.Tensor]]:
        """The slices of `names` in `flat`, which holds those of every rank, one after the other."""
        for index, held in enumerate(self._slices[parcel.axes]):
            at = index * parcel.numel
            for name in names:
                each = held[name]
                yield name, each, flat[at : at + each.numel].view(each.shape)
                at += each.numel


def _slices(plan: Plan, axes: tuple[str, ...], index: int) -> Iterator[tuple[str, _ParamSlice]]:
    """What the rank at `index` along `axes` has of each weight that has an owner among them."""
    coordinate, logical = (
        owner_coordinate(plan.sharding, axes, index),
        plan.sharding.all_ranks or plan.sharding,
    )
    local = {home.param.name: home.param.shape for home in logical.at_coordinate(coordinate).param_shardings}
    for home in (
        home for home in logical.param_shardings if home.owner_axes == axes and home.param.name in local
    ):
        spans = tuple(side.dim_ranges for side in logical.dim_shards(home, coordinate))
        yield home.param.name, _ParamSlice(local[home.param.name], spans)


def _index(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> int:
    return mesh.index(mesh.coordinate(rank), axes)


def _nothing() -> None:
    """SCATTER_PARAM brings the slices up to date."""
