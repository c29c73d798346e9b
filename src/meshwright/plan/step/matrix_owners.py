"""Weights of which ranks have slices, and that are stepped whole: who steps which, and what travels for it.

Why: some rules look at more than an element: at rows and columns, at 256 elements together, at singular values. A slice that is
stepped by such a rule alone becomes something else than a part of the stepped whole. So each of these weights has one owner among
the ranks that have its slices. It gets the summed gradient of all of them, steps the whole weight as one device would, and hands
the slices back. The largest go first, each to the rank that owns the least: memory and work are divided as evenly as whole
weights can be.

    rank 0   g0[a] g0[b]            G[a] -> step -> W[a]             w0[a] w0[b]
    rank 1   g1[a] g1[b]   gather   G[b] -> step -> W[b]   scatter   w1[a] w1[b]

    BRING   slices of a bundle's summed gradients to their owners, before CLIP
    HAND    to each rank its slices of what the owners have stepped, behind STEP

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
from meshwright.plan.model_spec.model_spec import NBYTES, Weight
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Hold, Program, Transfer, index_of_last, with_waits


@dataclass(frozen=True)
class Parcel:
    """Slices that travel together: of weights of `bundle` that the rank at index `owner` along `axes` steps.

    `names` are the weights by the index along the axes `shards`, over which the bundle is cut into shards; ranks at different
    indices send different ones. `numel` elements are what each of them puts in.
    """

    bundle: str
    axes: tuple[str, ...]
    owner: int
    shards: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]
    numel: int


def parcels(space: Space) -> tuple[Parcel, ...]:
    """What travels between owners and the ranks that have slices, bundle after bundle; the same on every rank of a part."""
    logical = _uncut(space)
    arenas, found, loads = logical.arenas(), [], defaultdict[tuple, int](int)
    sizes = {axes: list(_sizes(space, axes)) for axes in dict.fromkeys(home.apart for home in logical.homes) if axes}
    for bundle in logical.bundles():
        apart = [home for home in bundle.homes if home.apart]
        arena = arenas.get(bundle.name)
        starts = {name: start // arena.shard for name, _, start in arena.weights} if arena is not None else {}
        num_shards = 1 if arena is None else arena.ranks
        given: dict[tuple[tuple[str, ...], int], list[list[str]]] = {}
        for home in sorted(apart, key=lambda home: -home.weight.numel):
            axes, name = home.apart, home.weight.name
            at = starts.get(name, 0)
            owner = min(range(space.mesh.extent(axes)), key=lambda index, at=at, axes=axes: loads[at, axes, index])
            loads[at, axes, owner] += home.weight.numel
            given.setdefault((axes, owner), [[] for _ in range(num_shards)])[at].append(name)
        for (axes, owner), names in sorted(given.items()):
            numel = max(sum(size[name] for name in mine) for mine in names for size in sizes[axes])
            shards = () if arena is None else arena.axes
            found.append(Parcel(bundle.name, axes, owner, shards, tuple(map(tuple, names)), numel))
    return tuple(found)


def coordinate_of(space: Space, axes: tuple[str, ...], index: int) -> dict[str, int]:
    """Where the rank at `index` along `axes` stands, in the part that `space` is of, and at 0 along all others."""
    found = {**dict.fromkeys(AXES, 0), "pp": dict(space.coordinate).get("pp", 0)}
    for axis in reversed([axis for axis in AXES if axis in axes]):
        index, found[axis] = divmod(index, space.mesh.size(axis))
    return found


def owned_by(space: Space, rank: int) -> Iterator[tuple[str, Weight]]:
    """The whole weights that `rank` steps of those of which it has slices, each with its bundle."""
    weights = {home.weight.name: home.weight for home in (space.whole or space).homes}
    space = space.stage(space.mesh.coordinate(rank)["pp"]) if space.stages else space
    for parcel in parcels(space):
        if space.mesh.index(space.mesh.coordinate(rank), parcel.axes) == parcel.owner:
            at = space.mesh.index(space.mesh.coordinate(rank), parcel.shards)
            yield from ((parcel.bundle, weights[name]) for name in parcel.names[at])


def brought(program: Program, space: Space, job: Job) -> Program:
    """`program` with a BRING and a HAND for each bundle of which some weights have owners."""
    found = parcels(space)
    return program.edit(lambda actions: _with_owners(actions, found, space, job)) if found else program


def _with_owners(actions: list[Action], found: tuple[Parcel, ...], space: Space, job: Job) -> list[Action]:
    precision, numels = job.precision.resolved, {home.weight.name: home.weight.numel for home in (space.whole or space).homes}
    brings, hands = [], []
    clip, step = index_of_last(actions, "CLIP") or 0, index_of_last(actions, "STEP") or 0
    square = actions[index_of_last(actions, "SQUARE") or clip]
    for bundle in dict.fromkeys(parcel.bundle for parcel in found):
        mine = [parcel for parcel in found if parcel.bundle == bundle]
        tensors = tuple(name for parcel in mine for names in parcel.names for name in names)
        largest = max(sum(numels[name] for name in names) for parcel in mine for names in parcel.names)
        held = Hold(f"owned gradient({bundle})", largest * NBYTES[precision.gradients])
        sent = tuple(_transfer("gather", parcel, precision.gradients) for parcel in mine)
        brings.append(Action("BRING", bundle, waits=square.waits, tensors=tensors, takes=(held,), inner=sent))
        back = tuple(_transfer("scatter", parcel, precision.parameters) for parcel in mine)
        hands.append(Action("HAND", bundle, waits=(actions[step].name,), tensors=tensors, inner=back))
    clips = with_waits(actions[clip], [action.name for action in brings])
    steps = replace(actions[step], frees=(*actions[step].frees, *(action.takes[0].name for action in brings)))
    return [*actions[:clip], *brings, clips, *actions[clip + 1 : step], steps, *hands, *actions[step + 1 :]]


def _transfer(collective: str, parcel: Parcel, dtype: str) -> Transfer:
    return Transfer(collective, parcel.axes, parcel.numel * NBYTES[dtype], dtype=dtype)


def _uncut(space: Space) -> Space:
    """What the ranks of the part that `space` is of hold, before it was cut into slices."""
    pairs = zip(space.homes, space.logical, strict=True)
    homes = tuple(replace(whole, weight=replace(whole.weight, visits=home.weight.visits)) for home, whole in pairs)
    return replace(space, homes=homes)


def _sizes(space: Space, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """The elements of each weight that a rank has, for every index along `axes`."""
    for index in range(space.mesh.extent(axes)):
        yield {home.weight.name: home.weight.numel for home in space.at(coordinate_of(space, axes, index)).homes}
