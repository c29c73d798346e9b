"""What a program says of divided layers: the moves of their ways, in the forwards and backwards of the visits that call them.

    F(visit)    of each call in order: into, what it computes within, out              several that take in one tensor: one into
    B(visit)    in reverse: out, within, into once more where nobody has kept it, the gradients of what is shared, into
    I, W        of a backward in halves: W has the gradients of what is shared, and all of a visit that gives back no gradient;
                what is shared by a product that is one with its input's (`Way.joint`), or used twice, is summed in I

Of layers that end in one sum, the last has the moves of their output (joined.py).
A visit is the same in every micro-batch, so its moves are found once for each direction, and then handed out.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.parallel.tensor.comm_overlap import sizes
from meshwright.parallel.tensor.layer_sharding import Leaf, Move, Way, Ways, leaves_of, sums_of, uncut, way_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.layer_calls import Call
from meshwright.plan.model_spec.model_spec import NBYTES
from meshwright.plan.sharding.placement import I, P, R
from meshwright.plan.sharding.rank_share import own_share
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Program, Transfer, with_more
from meshwright.plan.step.single_device import FORWARDS, added_along, inside, micro_rows

Met = tuple[int, Call, Way]  # a call, with its number among those of the model
Taken = tuple[Move, int, int]  # a move, the elements of the value, and when: after the number of the call, backwards below 0


@dataclass(frozen=True)
class _Visit:
    """The collectives of one visit, and the bytes that its forward keeps inside because inputs were gathered.

    `first` and `late` are those of the halves of its backward.
    """

    forth: tuple[Transfer, ...]
    back: tuple[Transfer, ...]
    first: tuple[Transfer, ...]
    late: tuple[Transfer, ...]
    more: int

    def within(self, action: Action) -> Action:
        """`action`, one of the visit, with what is moved in it."""
        met = {**dict.fromkeys(FORWARDS, self.forth), "B": self.back, "I": self.first, "W": self.late}
        if action.kind not in met:
            return action
        inner = tuple(sorted((*action.inner, *met[action.kind]), key=lambda each: each.at))
        if action.kind not in FORWARDS or not self.more:
            return replace(action, inner=inner)
        name = inside(action.subject, action.micro)
        return replace(with_more(action, name, self.more), inner=inner)


def booked(program: Program, ways: Ways, space: Space, job: Job) -> Program:
    """`program` with the moves of all layers in the forwards and backwards in which they are taken."""

    def met(actions: list[Action]) -> list[Action]:
        visits = _visits(ways, space, job, micro_rows(actions, space, job))
        return [visits[action.subject].within(action) if action.subject in visits else action for action in actions]

    return program.edit(met)


def heard(program: Program, axis: str) -> Program:
    """`program` with COUNT taken along `axis` too: a wish to stop is heard by all."""
    return added_along(program, axis, ("COUNT",))


def _visits(ways: Ways, space: Space, job: Job, rows: int) -> dict[str, _Visit]:
    """What is booked of every visit that calls a layer with a way, in micro-batches of so many rows."""
    calls: dict[str, list[Met]] = {}
    sums = sums_of(space.anatomy.calls, ways)
    for at, call in enumerate(_own(space)):
        way = way_of(ways, call.name, call.role)
        if way is not None:
            last = sums.get(call.name, (call.name,))[-1]  # it moves the sum of all
            calls.setdefault(call.visit, []).append((at, call, way if call.name == last else replace(way, out=None)))
    leaves, learning, borders = leaves_of(space.homes), _learning(space), (space.whole or space).anatomy.borders

    def sent(taken: Iterable[Taken]) -> tuple[Transfer, ...]:
        return tuple(each for move, numel, at in taken for each in move.transfer(numel, space, job, at))

    def booked(visit: str, mine: Sequence[Met]) -> _Visit:
        back = list(_back(mine, rows, leaves, learning))
        if borders is not None and not borders.learns(visit):
            back = [(taken, True) for taken, _ in back]
        whole, first, late = (
            sent(taken for taken, each in back if each in halves) for halves in ((True, False), (False,), (True,))
        )
        more = _gathered(mine, rows, space, learning) * NBYTES[job.precision.compute]
        return _Visit(sent(_forth(mine, rows)), whole, first, late, more)

    return {visit: booked(visit, mine) for visit, mine in calls.items()}


def _own(space: Space) -> Iterator[Call]:
    """The calls of the model, as they are on the tokens that this rank has."""
    for call in space.anatomy.calls:
        share = own_share(space, call.visit, call.name)
        yield call if share == 1 else replace(call, into=int(call.into * share), out=int(call.out * share))


def _gathered(calls: Iterable[Met], rows: int, space: Space, learning: Collection[str]) -> int:
    """The elements that a forward keeps inside of inputs that were gathered, besides the slices that are counted already."""
    kept = {(call.source, way.into): call.into for _, call, way in calls if call.name in learning and not way.again}
    more = 0
    for (_, into), numel in kept.items():
        if into is not None and into.src.letter == "S" and into.dst == R:
            whole = numel // space.mesh.extent(into.apart)
            more += whole - whole // space.mesh.size(into.axis)
    return more * rows


def _forth(calls: Iterable[Met], rows: int) -> Iterator[Taken]:
    """The moves of `calls` in a forward of so many rows. Of what several take in there is one."""
    taken = set()
    for at, call, way in calls:
        if way.into is not None and (call.source, way.into) not in taken:
            taken.add((call.source, way.into))
            yield way.into, call.into * rows, at
        yield from ((move, numel * rows, at) for move, numel in way.within(call))
        if way.out is not None:
            yield from ((way.out, call.out * part, at) for part in sizes(rows, way.chunks))


def _back(
    calls: Sequence[Met], rows: int, leaves: Mapping[str, Sequence[Leaf]], learning: Collection[str]
) -> Iterator[tuple[Taken, bool]]:
    """Likewise in a backward: of gradients that are needed, of those of what is shared, and once more of what nobody has kept.

    Each with whether it is in the half for weights: of what is shared, and used in the visit once, by no joint product.
    """
    alike: dict[tuple[int, Move | None], list[Call]] = {}
    first: dict[tuple[str, str], int] = {}
    uses: Counter[tuple[str, str]] = Counter()
    for at, call, way in calls:
        alike.setdefault((call.source, way.into), []).append(call)
        for axis in way.shared:
            for _, home in uncut(leaves.get(call.name, ()), axis):
                first.setdefault((home.weight.name, axis), at)
                uses[home.weight.name, axis] += 1
    anew = set()
    for at, call, way in reversed(calls):
        into, taking = way.into, alike[call.source, way.into]
        if way.out is not None:
            yield from (((way.out.back, call.out * part, -at), False) for part in sizes(rows, way.chunks)[::-1])
        if call.needed:
            yield from (((move.back, numel * rows, -at), False) for move, numel in reversed(list(way.within(call))))
        if into is not None and way.again and (call.source, into) not in anew and call.name in learning:
            anew.add((call.source, into))
            yield (into, call.into * rows, -at), False
        for axis in reversed(way.shared):
            for _, home in reversed(uncut(leaves.get(call.name, ()), axis)):
                if home.weight.trainable and first[home.weight.name, axis] == at:
                    late = uses[home.weight.name, axis] == 1 and not (call.needed and way.joint)
                    yield (Move(axis, P, I, wide=True), home.weight.numel, -at), late
        if into is not None and call is taking[0] and any(each.needed for each in taking):
            yield (into.back, call.into * rows, -at), False


def _learning(space: Space) -> frozenset[str]:
    """The layers of which a matrix is trained: its gradient needs what went in."""
    matrices = [home.weight for home in space.homes if home.weight.trainable and len(home.weight.shape) > 1]
    return frozenset(layer for weight in matrices for layer in weight.layers)
