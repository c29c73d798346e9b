"""Assigns owners to sliced matrices whose optimizer needs the full matrix, and adds the communication for it.

Some optimizers read more than one element at a time: rows and columns, 256 elements together, singular
values. A slice updated by such a rule would differ from a slice of the updated matrix. So each of these
parameters has one owner among the ranks that hold its slices. The owner gathers the summed gradient, updates
the full matrix as one device would, and scatters the slices back. The largest parameters are assigned first,
each to the rank that owns the least, so memory and work are balanced as well as full matrices allow.

    rank 0   g0[a] g0[b]            G[a] -> step -> W[a]             w0[a] w0[b]
    rank 1   g1[a] g1[b]   gather   G[b] -> step -> W[b]   scatter   w1[a] w1[b]

    GATHER_GRAD    sends slices of a group's summed gradients to their owners, before CLIP
    SCATTER_PARAM  sends each rank its slices of the updated parameters, after STEP

If the group is also sharded flat, a slice is never cut by shards, and all slices of a parameter lie in the
shards of one index: its owner is one of the ranks with that index. In a pipeline, the owner is one of the
ranks of its stage.

Cost: per group and owner one message each way, as long as the slices of the largest rank; per rank and step
the bytes of the slices twice. An owner keeps what it updates: 1/n of these parameters, and their optimizer
states. The messages are not overlapped: they come when all gradients are summed.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ParamSpec
from meshwright.plan.sharding.mesh import AXES, in_mesh_order
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.program import Action, Allocation, Program, Transfer, index_of_last, with_waits


@dataclass(frozen=True)
class MatrixParcel:
    """Slices that are sent together: of parameters of `param_group` that the rank at index `owner` along
    `axes` updates.

    `names_by_shard` are the parameters by index along `shard_axes`, over which the group is sharded flat;
    ranks at different indices send different ones. Each rank puts in `numel` elements, padding included.
    """

    param_group: str
    axes: tuple[str, ...]
    owner: int
    shard_axes: tuple[str, ...]
    names_by_shard: tuple[tuple[str, ...], ...]
    numel: int


def matrix_parcels(view: RankView) -> tuple[MatrixParcel, ...]:
    """Returns the parcels between owners and ranks with slices, group by group; equal on every rank of a
    stage.
    """
    mesh, unsliced = view.plan.mesh, view.unsliced_param_shardings
    groups = view.plan.group_params(unsliced, view.stage_spec)
    flat_params = view.plan.build_flat_params(groups)
    parcels, loads = list[MatrixParcel](), defaultdict[tuple, int](int)
    sizes = {
        axes: list(_sizes(view, axes))
        for axes in dict.fromkeys(param_sharding.owner_axes for param_sharding in unsliced)
        if axes
    }
    for group in groups:
        owned = [param_sharding for param_sharding in group.param_shardings if param_sharding.owner_axes]
        flat_param = flat_params.get(group.name)
        starts = (
            {name: start // flat_param.shard_numel for name, _, start in flat_param.params}
            if flat_param is not None
            else {}
        )
        num_shards = 1 if flat_param is None else flat_param.num_ranks
        names_by_owner: dict[tuple[tuple[str, ...], int], list[list[str]]] = {}
        for param_sharding in sorted(owned, key=lambda param_sharding: -param_sharding.param.numel):
            axes, name = param_sharding.owner_axes, param_sharding.param.name
            shard_index = starts.get(name, 0)
            owner = min(
                range(mesh.group_size(axes)),
                key=lambda index, shard_index=shard_index, axes=axes: loads[shard_index, axes, index],
            )
            loads[shard_index, axes, owner] += param_sharding.param.numel
            names_by_owner.setdefault((axes, owner), [[] for _ in range(num_shards)])[shard_index].append(
                name
            )
        for (axes, owner), names in sorted(names_by_owner.items()):
            numel = max(
                sum(size[name] for name in group_parcels) for group_parcels in names for size in sizes[axes]
            )
            shards = () if flat_param is None else flat_param.axes
            parcels.append(MatrixParcel(group.name, axes, owner, shards, tuple(map(tuple, names)), numel))
    return tuple(parcels)


def owner_coordinate(view: RankView, axes: tuple[str, ...], index: int) -> dict[str, int]:
    """Returns the coordinate of rank `index` along `axes`, at the pp rank of `view` and at 0 along all other
    axes.
    """
    parcels = {**dict.fromkeys(AXES, 0), "pp": view.coordinate.get("pp", 0)}
    for axis in reversed(in_mesh_order(axes)):
        index, parcels[axis] = divmod(index, view.plan.mesh.size(axis))
    return parcels


def owned_params(view: RankView) -> Iterator[tuple[str, ParamSpec]]:
    """Yields the full parameters that the rank of `view` owns, each with its group."""
    params, mesh = {each.param.name: each.param for each in view.plan.param_shardings}, view.plan.mesh
    for parcel in matrix_parcels(view):
        if mesh.index(view.coordinate, parcel.axes) == parcel.owner:
            shard_index = mesh.index(view.coordinate, parcel.shard_axes)
            yield from ((parcel.param_group, params[name]) for name in parcel.names_by_shard[shard_index])


def add_matrix_owner_actions(program: Program, view: RankView, job: Job) -> Program:
    """Returns `program` with GATHER_GRAD and SCATTER_PARAM for each group with matrix owners."""
    parcels = matrix_parcels(view)
    return (
        program.edit(lambda actions: _insert_owner_actions(actions, parcels, view, job))
        if parcels
        else program
    )


def _insert_owner_actions(
    actions: list[Action], parcels: tuple[MatrixParcel, ...], view: RankView, job: Job
) -> list[Action]:
    dtypes = job.precision.effective
    numels = {
        param_sharding.param.name: param_sharding.param.numel for param_sharding in view.plan.param_shardings
    }
    gathers, scatters = list[Action](), list[Action]()
    clip, step = index_of_last(actions, "CLIP") or 0, index_of_last(actions, "STEP") or 0
    square = actions[index_of_last(actions, "LOCAL_NORM") or clip]
    for group in dict.fromkeys(parcel.param_group for parcel in parcels):
        group_parcels = [parcel for parcel in parcels if parcel.param_group == group]
        tensors = tuple(name for parcel in group_parcels for names in parcel.names_by_shard for name in names)
        largest = max(
            sum(numels[name] for name in names) for parcel in group_parcels for names in parcel.names_by_shard
        )
        allocation = Allocation(f"owned gradient({group})", largest * FLOAT_NBYTES[dtypes.gradients])
        slices = tuple(_transfer("gather", parcel, dtypes.gradients) for parcel in group_parcels)
        gathers.append(
            Action(
                "GATHER_GRAD",
                group,
                waits=square.waits,
                tensors=tensors,
                allocations=(allocation,),
                inner_transfers=slices,
            )
        )
        slices_back = tuple(_transfer("scatter", parcel, dtypes.parameters) for parcel in group_parcels)
        scatters.append(
            Action(
                "SCATTER_PARAM",
                group,
                waits=(actions[step].name,),
                tensors=tensors,
                inner_transfers=slices_back,
            )
        )
    clips = with_waits(actions[clip], [action.name for action in gathers])
    steps = replace(
        actions[step], frees=(*actions[step].frees, *(action.allocations[0].name for action in gathers))
    )
    return [
        *actions[:clip],
        *gathers,
        clips,
        *actions[clip + 1 : step],
        steps,
        *scatters,
        *actions[step + 1 :],
    ]


def _transfer(collective: str, parcel: MatrixParcel, dtype: str) -> Transfer:
    return Transfer(collective, parcel.axes, parcel.numel * FLOAT_NBYTES[dtype], dtype=dtype)


def _sizes(view: RankView, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    for index in range(view.plan.mesh.group_size(axes)):
        yield {
            param_sharding.param.name: view.plan.packed_numel([param_sharding.param])
            for param_sharding in RankView(view.plan, owner_coordinate(view, axes, index)).param_shardings
        }
