"""Weights of which ranks have slices, and that are stepped whole: who steps which, and what travels for it.

Why: some rules look at more than an element: at rows and columns, at 256 elements together, at singular values. A slice that is
stepped by such a rule alone becomes something else than a part of the stepped whole. So each of these weights has one owner among
the ranks that have its slices. It gets the summed gradient of all of them, steps the whole weight as one device would, and hands
the slices back. The largest go first, each to the rank that owns the least: memory and work are divided as evenly as whole
weights can be.

    rank 0   g0[a] g0[b]            G[a] -> step -> W[a]             w0[a] w0[b]
    rank 1   g1[a] g1[b]   gather   G[b] -> step -> W[b]   scatter   w1[a] w1[b]

    GATHER_GRAD   slices of a bundle's summed gradients to their owners, before CLIP
    SCATTER_PARAM    to each rank its slices of what the owners have stepped, behind STEP

Where a bundle lies in shards too, a slice is never cut by them, and all slices of a weight lie in the shards of one index,
however large they are: their owner is found among the ranks of that index. Where ranks run parts of the model, the owner of a
weight is one of those that run its part.

Cost: per bundle and owner one message each way, as long as the largest rank's slices; per rank and step the slices' bytes twice.
An owner keeps what it steps: 1/n of these weights, and their moments. Nothing hides the messages: they come when all is summed.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ParamSpec
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.action import Action, Allocation, Program, Transfer, index_of_last, with_waits


@dataclass(frozen=True)
class MatrixParcel:
    """Slices that travel together: of weights of `bundle` that the rank at index `owner` along `axes` steps.

    `names` are the weights by the index along the axes `shards`, over which the bundle is cut into shards; ranks at different
    indices send different ones. `numel` elements are what each of them puts in.
    """

    param_group: str
    axes: tuple[str, ...]
    owner: int
    shard_axes: tuple[str, ...]
    names_by_shard: tuple[tuple[str, ...], ...]
    numel: int


def matrix_parcels(sharding: ShardingPlan) -> tuple[MatrixParcel, ...]:
    """What travels between owners and the ranks that have slices, bundle after bundle; the same on every rank of a part."""
    logical = _uncut(sharding)
    arenas, found, loads = logical.flat_param_specs(), [], defaultdict[tuple, int](int)
    sizes = {
        axes: list(_sizes(sharding, axes))
        for axes in dict.fromkeys(home.owner_axes for home in logical.param_shardings)
        if axes
    }
    for bundle in logical.param_groups():
        apart = [home for home in bundle.param_shardings if home.owner_axes]
        arena = arenas.get(bundle.name)
        starts = (
            {name: start // arena.shard_numel for name, _, start in arena.params} if arena is not None else {}
        )
        num_shards = 1 if arena is None else arena.num_ranks
        given: dict[tuple[tuple[str, ...], int], list[list[str]]] = {}
        for home in sorted(apart, key=lambda home: -home.param.numel):
            axes, name = home.owner_axes, home.param.name
            at = starts.get(name, 0)
            owner = min(
                range(sharding.mesh.group_size(axes)),
                key=lambda index, at=at, axes=axes: loads[at, axes, index],
            )
            loads[at, axes, owner] += home.param.numel
            given.setdefault((axes, owner), [[] for _ in range(num_shards)])[at].append(name)
        for (axes, owner), names in sorted(given.items()):
            numel = max(sum(size[name] for name in mine) for mine in names for size in sizes[axes])
            shards = () if arena is None else arena.axes
            found.append(MatrixParcel(bundle.name, axes, owner, shards, tuple(map(tuple, names)), numel))
    return tuple(found)


def owner_coordinate(sharding: ShardingPlan, axes: tuple[str, ...], index: int) -> dict[str, int]:
    """Where the rank at `index` along `axes` stands, in the part that `space` is of, and at 0 along all others."""
    found = {**dict.fromkeys(AXES, 0), "pp": dict(sharding.coordinate).get("pp", 0)}
    for axis in reversed([axis for axis in AXES if axis in axes]):
        index, found[axis] = divmod(index, sharding.mesh.size(axis))
    return found


def owned_params(sharding: ShardingPlan, rank: int) -> Iterator[tuple[str, ParamSpec]]:
    """The whole weights that `rank` steps of those of which it has slices, each with its bundle."""
    weights = {home.param.name: home.param for home in (sharding.all_ranks or sharding).param_shardings}
    sharding = (
        sharding.at_pp_rank(sharding.mesh.coordinate(rank)["pp"])
        if sharding.block_calls_by_pp_rank
        else sharding
    )
    for parcel in matrix_parcels(sharding):
        if sharding.mesh.index(sharding.mesh.coordinate(rank), parcel.axes) == parcel.owner:
            at = sharding.mesh.index(sharding.mesh.coordinate(rank), parcel.shard_axes)
            yield from ((parcel.param_group, weights[name]) for name in parcel.names_by_shard[at])


def add_matrix_owner_actions(program: Program, sharding: ShardingPlan, job: Job) -> Program:
    """`program` with a GATHER_GRAD and a SCATTER_PARAM for each bundle of which some weights have owners."""
    found = matrix_parcels(sharding)
    return program.edit(lambda actions: _with_owners(actions, found, sharding, job)) if found else program


def _with_owners(
    actions: list[Action], found: tuple[MatrixParcel, ...], sharding: ShardingPlan, job: Job
) -> list[Action]:
    precision, numels = (
        job.precision.effective,
        {home.param.name: home.param.numel for home in (sharding.all_ranks or sharding).param_shardings},
    )
    brings, hands = [], []
    clip, step = index_of_last(actions, "CLIP") or 0, index_of_last(actions, "STEP") or 0
    square = actions[index_of_last(actions, "LOCAL_NORM") or clip]
    for bundle in dict.fromkeys(parcel.param_group for parcel in found):
        mine = [parcel for parcel in found if parcel.param_group == bundle]
        tensors = tuple(name for parcel in mine for names in parcel.names_by_shard for name in names)
        largest = max(
            sum(numels[name] for name in names) for parcel in mine for names in parcel.names_by_shard
        )
        held = Allocation(f"owned gradient({bundle})", largest * FLOAT_NBYTES[precision.gradients])
        sent = tuple(_transfer("gather", parcel, precision.gradients) for parcel in mine)
        brings.append(
            Action(
                "GATHER_GRAD",
                bundle,
                waits=square.waits,
                tensors=tensors,
                allocations=(held,),
                inner_transfers=sent,
            )
        )
        back = tuple(_transfer("scatter", parcel, precision.parameters) for parcel in mine)
        hands.append(
            Action(
                "SCATTER_PARAM", bundle, waits=(actions[step].name,), tensors=tensors, inner_transfers=back
            )
        )
    clips = with_waits(actions[clip], [action.name for action in brings])
    steps = replace(actions[step], frees=(*actions[step].frees, *(action.takes[0].name for action in brings)))
    return [*actions[:clip], *brings, clips, *actions[clip + 1 : step], steps, *hands, *actions[step + 1 :]]


def _transfer(collective: str, parcel: MatrixParcel, dtype: str) -> Transfer:
    return Transfer(collective, parcel.axes, parcel.numel * FLOAT_NBYTES[dtype], dtype=dtype)


def _uncut(sharding: ShardingPlan) -> ShardingPlan:
    """What the ranks of the part that `space` is of hold, before it was cut into slices."""
    pairs = zip(sharding.param_shardings, sharding.logical_param_shardings, strict=True)
    homes = tuple(
        replace(whole, param=replace(whole.param, block_calls=home.param.block_calls))
        for home, whole in pairs
    )
    return replace(sharding, param_shardings=homes)


def _sizes(sharding: ShardingPlan, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """The elements of each weight that a rank has, for every index along `axes`."""
    for index in range(sharding.mesh.group_size(axes)):
        yield {
            home.param.name: home.param.numel
            for home in sharding.at_coordinate(owner_coordinate(sharding, axes, index)).param_shardings
        }
