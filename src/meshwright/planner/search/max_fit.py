"""How far a machine goes: the largest batch, sequence or model that fits, and the fewest devices on which a model does.

    batch       rows that go through at once: one micro-batch per copy, and along pp as many as ranks. More rows go through one
                behind the other, and no memory limits them
    sequence    tokens of a row, at the given batch, in steps of 1,024 (below that, of 64); no more than positions were learnt
    layers      of the same hidden size
    devices     whole hosts, or parts of one, at the given batch

Each is found by bisection (of rows, on each mesh by itself: tensor ranks divide tokens only where these come out even), or by
going through all where more of something may fit less well (devices that come out odd), over the layouts of the search; so at the
limit there is a layout that fits, and one step further none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import lcm

from meshwright.planner.analytic.memory import Footprint, by_rank, footprint
from meshwright.planner.analytic.parallel_config import Layout
from meshwright.planner.search.candidates import batches, may_fit, meshes, over
from meshwright.planner.search.request import Wish
from meshwright.planner.search.search import Candidate, Found, search

LIMITS = ("batch", "sequence", "layers", "devices")
MOST = 1 << 40  # beyond which nobody looks
MOST_DEVICES = 1 << 17


@dataclass(frozen=True)
class Stopped:
    """The layout that comes nearest one step beyond a limit: on which rank along pp too much lies, and what it holds there."""

    layout: Layout
    rank: int
    held: Footprint

    @property
    def most(self) -> str:
        """The category that holds most of what a layout could spare: not what driver and allocator take."""
        held: dict[str, float] = vars(self.held)
        return max((name for name in held if name not in ("gaps", "context")), key=held.__getitem__)


@dataclass(frozen=True)
class Limit:
    """How far it goes: `value` of `what` fits, and `beyond` does not (`stopped`; None: no layout comes out even there).

    `wish` is what was searched at the limit, and `found` the best layouts there; `apart` is the best one whose rows need not go
    through at once, where that is the limit. `learnt`: not memory stops it, but the positions that the model has learnt.
    """

    what: str
    value: int
    wish: Wish
    found: Found
    beyond: int
    stopped: Stopped | None
    apart: Candidate | None = None
    learnt: bool = False


def limit(wish: Wish, what: str, keep: int = 3) -> Limit | None:
    """The limit of `what`, one of LIMITS, for all else as in `wish`; None where not even the least fits."""
    return {"batch": _batch, "sequence": _sequence, "layers": _layers, "devices": _devices}[what](wish, keep)


def fits(wish: Wish) -> bool:
    """Whether any layout fits."""
    return any(footprint(wish.shape, layout).total <= wish.memory for layout in _leanest(wish, fitting=True))


def stopped(wish: Wish) -> Stopped | None:
    """Of all layouts, the one that holds least; None where there is none at all."""
    layout = min(_leanest(wish), key=lambda layout: footprint(wish.shape, layout).total, default=None)
    return None if layout is None else _stopped(wish, layout)


def _stopped(wish: Wish, layout: Layout) -> Stopped:
    rank, held = max(by_rank(wish.shape, layout), key=lambda each: each[1].total)
    return Stopped(layout, rank, held)


def _leanest(wish: Wish, *, fitting: bool = False) -> Iterator[Layout]:
    """All layouts with the fewest rows at once; with `fitting` those on meshes where any may fit."""
    for mesh in meshes(wish):
        if not fitting or may_fit(wish, mesh):
            yield from _fewest(wish, mesh)


def _fewest(wish: Wish, mesh: Layout) -> Iterator[Layout]:
    """All layouts over a mesh with the fewest rows at once."""
    for sized in batches(wish, mesh):
        lean = [layout for layout, _ in over(wish, sized)]
        yield from lean
        if lean:
            break


def _sequence(wish: Wish, keep: int) -> Limit | None:
    def of(tokens: int) -> Wish:
        return replace(wish, shape=replace(wish.shape, sequence=tokens), least=1)

    most = wish.longest
    if most and fits(of(most)):
        return Limit("sequence", most, of(most), search(of(most), keep), most + 1, None, learnt=True)
    for unit in (1024, 64):
        longest = 0
        for mesh in meshes(of(MOST)):  # every number of ranks divides some row
            for step in {unit, lcm(unit, mesh.tp * mesh.cp)}:
                longest = max(longest, _longest(of, mesh, step, longest, most or MOST))
        if longest:
            there, beyond = of(longest), min(longest + unit, most or MOST)
            return Limit("sequence", longest, there, search(there, keep), beyond, stopped(of(beyond)))
    return None


def _longest(of: Callable[[int], Wish], mesh: Layout, step: int, beyond: int, most: int) -> int:
    """The longest row over a mesh that is longer than `beyond`, shorter than `most`, and comes in steps of `step`; 0: none fits.

    Tensor ranks divide tokens where these come out even: such rows hold less than shorter ones that do not, so that each kind is
    bisected by itself. A row of the other kind that happens to come out even fits all the more.
    """
    divided = replace(mesh, sequence=mesh.tp > 1 and step % (mesh.tp * mesh.cp) == 0)

    def enough(steps: int) -> bool:
        asked = of(steps * step)
        return (
            steps * step < most
            and may_fit(asked, divided)
            and any(_room(asked, layout) for layout in _fewest(asked, divided))
        )

    low = max(beyond, 2 * mesh.cp - 1) // step + 1
    return _most(enough, low) * step if enough(low) else 0


def _layers(wish: Wish, keep: int) -> Limit | None:
    def of(layers: int) -> Wish:
        return replace(wish, shape=replace(wish.shape, layers=layers))

    least = next((layers for layers in range(1, 1 + max(1, wish.fixed.get("pp", 8))) if fits(of(layers))), 0)
    if not least:
        return None
    layers = _most(lambda layers: fits(of(layers)), least)
    return Limit("layers", layers, of(layers), search(of(layers), keep), layers + 1, stopped(of(layers + 1)))


def _batch(wish: Wish, keep: int) -> Limit | None:
    best: tuple[int, int, Layout] | None = (
        None  # rows of a step, rows of one more row per micro-batch, and the layout
    )
    given = wish.fixed.get("micro")
    for mesh in meshes(replace(wish, batch=wish.machine.count)):  # every number of copies divides it
        micros = mesh.pp
        for layout, _ in over(wish, replace(mesh, micro_batch=given or 1, micros=micros)):
            each = mesh.dp * micros
            least = best[0] // each + 1 if best else 1
            if given is None and _room(wish, layout, least):
                rows = _most(partial(_room, wish, layout), least)
                best = rows * each, (rows + 1) * each, replace(layout, micro_batch=rows + 1)
            elif given is not None and given >= least and _room(wish, layout, given):
                best = given * each, (given + 1) * each, replace(layout, micro_batch=given + 1)
    if best is None:
        return None
    there = replace(wish, batch=best[0], at_once=True)
    freely = next(iter(search(replace(wish, batch=best[0]), 1).best), None)
    return Limit("batch", best[0], there, search(there, keep), best[1], _stopped(wish, best[2]), freely)


def _room(wish: Wish, layout: Layout, rows: float = 0) -> bool:
    """Whether it fits, with so many `rows` at once (0: its own)."""
    return footprint(wish.shape, replace(layout, micro_batch=rows or layout.micro_batch)).total <= wish.memory


def _most(enough: Callable[[int], bool], low: int) -> int:
    """The most of which there is `enough`, as there is of `low`: doubled until there is not, and bisected."""
    high = 2 * low
    while high < MOST and enough(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low


def _devices(wish: Wish, keep: int) -> Limit | None:
    def of(count: int) -> Wish:
        return replace(wish, machine=replace(wish.machine, count=count))

    host = wish.machine.host
    states = wish.shape.numel * 2  # bytes of nothing but weights, in 16 bits
    before = 0
    for count in _counts(host):
        if count * wish.memory < states:
            before = count
            continue
        if fits(of(count)):
            there = of(count)
            return Limit(
                "devices", count, there, search(there, keep), before, stopped(of(before)) if before else None
            )
        before = count
    return None


def _counts(host: int) -> Iterator[int]:
    """Numbers of devices that people have: parts of a host, then hosts; of many hosts, ever larger multiples."""
    yield from (count for count in range(1, host) if host % count == 0)
    hosts = 1
    while hosts * host <= MOST_DEVICES:
        yield hosts * host
        hosts += max(1, 2 ** (hosts.bit_length() - 5))  # steps of a sixteenth at most
