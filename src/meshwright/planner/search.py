"""Which layout is best: of all that a machine allows, those that fit, in order of the seconds that a step takes.

    for every mesh      tp on a host, pp up to the layers, cp where a row is long, dp the rest
    micro-batches       every divisor of a copy's rows
    and what lies over  shares of states 0 .. 3, what is rerun, orders along pp with their chunks

Two bounds keep this short, and neither can lose the best: a mesh of which nothing fits with one row at a time fits with no more;
and what a mesh computes at a micro-batch size, without any transfer or waiting, is less than any of its steps takes: where that
is more than the worst that is kept, the rest is not looked at.

Layouts are sketched (planner/sketch.py); the one that is chosen is made a plan, whose program is priced action by action.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappush, heappushpop
from itertools import count, product

from meshwright.core.errors import Fault
from meshwright.planner.footprint import Footprint, footprint
from meshwright.planner.hardware import Machine
from meshwright.planner.layout import Layout, Order, Rerun
from meshwright.planner.shapes import Shape
from meshwright.planner.sketch import Step, entry, head, layer, step

LONG = 4096  # tokens of a rank below which dividing a row further is not tried
SHARE = 0.96  # of a device's memory that a plan may count on: the rest is the driver's
AXES = ("dp", "tp", "pp", "cp")
RERUNS: tuple[Rerun, ...] = ("none", "attention", "layers")


@dataclass(frozen=True)
class Wish:
    """What is looked for: `batch` rows of `shape` per step on `machine`.

    `orders` are those that ranks along pp may take turns in, by name, with the chunks each needs (0: any). `fixed` says axes
    whose size is given. `base` is what every layout has (its dtype, its kernels).
    """

    shape: Shape
    machine: Machine
    batch: int
    orders: Mapping[str, tuple[Order, int]] = field(default_factory=lambda: {"1f1b": (Order(), 1)})
    fixed: Mapping[str, int] = field(default_factory=dict)
    base: Layout = field(default_factory=Layout)

    @property
    def memory(self) -> float:
        """Bytes of a device that a plan may count on."""
        return SHARE * self.machine.device.memory

    def faults(self) -> Iterator[Fault]:
        """What contradicts itself in it."""
        yield from self.shape.faults()
        if self.batch < 1:
            yield Fault(f"a batch of {self.batch} rows", "write a whole number above 0", "batch")
        for axis, size in self.fixed.items():
            if axis not in AXES:
                yield Fault(f"'{axis}' is no axis that a search divides", f"fix one of {', '.join(AXES)}", axis)
            elif size < 1 or self.machine.count % size:
                text = f"{axis} {size} on {self.machine.count} devices"
                yield Fault(text, "every rank has a device: write a divisor of their number", axis)


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, the name of its order, the seconds of a step and the bytes of the fullest rank."""

    layout: Layout
    schedule: str
    step: Step
    footprint: Footprint

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.step.seconds


@dataclass(frozen=True)
class Found:
    """The best candidates, the best one first; how many layouts were `seen`, and of those that do not fit the `nearest`."""

    best: tuple[Candidate, ...]
    seen: int
    nearest: tuple[Layout, Footprint] | None


def search(wish: Wish, keep: int = 10, *, prune: bool = True) -> Found:
    """The `keep` best layouts of `wish`. With `prune` False all are sketched: slow, and the same."""
    kept: list[tuple[float, int, Candidate]] = []
    ties, seen = count(), 0
    nearest: tuple[Layout, Footprint] | None = None
    for mesh in meshes(wish):
        smallest, held = _smallest(wish, mesh)
        if held.total > wish.memory:
            if nearest is None or held.total < nearest[1].total:
                nearest = smallest, held
            if prune:
                continue
        for rows in _divisors(wish.batch // mesh.dp):
            sized = replace(mesh, micro_batch=rows, micros=wish.batch // mesh.dp // rows)
            if prune and _smallest(wish, sized)[1].total > wish.memory:
                break  # more rows hold more
            if prune and len(kept) == keep and _computed(wish, sized) > -kept[0][0]:
                continue
            for layout, schedule in _over(wish, sized):
                seen += 1
                held = footprint(wish.shape, layout)
                if held.total > wish.memory:
                    continue
                found = Candidate(layout, schedule, step(wish.shape, layout, wish.machine), held)
                ranked = (-found.seconds, -next(ties), found)
                if len(kept) < keep:
                    heappush(kept, ranked)
                else:
                    heappushpop(kept, ranked)
    best = tuple(found for _, _, found in sorted(kept, key=lambda each: (-each[0], -each[1])))
    return Found(best, seen, None if best else nearest)


def meshes(wish: Wish) -> Iterator[Layout]:
    """Every mesh of the machine's devices on which the shape can be laid."""
    shape, machine = wish.shape, wish.machine
    tensor = [size for size in _divisors(machine.count) if size <= machine.host and shape.heads % size == 0]
    stages = [size for size in _divisors(machine.count) if size <= shape.layers]
    rows = [size for size in _divisors(machine.count) if size == 1 or shape.sequence / size >= LONG]
    choices = {"tp": tensor, "pp": stages, "cp": rows}
    lists = [[wish.fixed[axis]] if axis in wish.fixed else sizes for axis, sizes in choices.items()]
    for tp, pp, cp in product(*lists):
        dp, rest = divmod(machine.count, tp * pp * cp)
        if rest or wish.fixed.get("dp", dp) != dp or wish.batch % dp or dp > wish.batch:
            continue
        yield replace(wish.base, dp=dp, tp=tp, pp=pp, cp=cp, sequence=tp > 1, micro_batch=1, micros=wish.batch // dp)


def _over(wish: Wish, sized: Layout) -> Iterator[tuple[Layout, str]]:
    """All that may lie over a mesh with its micro-batches."""
    stages = range(4) if sized.sharers > 1 else (0,)
    for shards, reruns in product(stages, RERUNS):
        base = replace(sized, shards=shards, reruns=reruns)
        if sized.pp == 1:
            yield base, ""
            continue
        for schedule, (order, chunks) in wish.orders.items():
            for parts in [chunks] if chunks else [2, 4, 8]:
                layout = replace(base, order=order, chunks=parts)
                if not any(layout.faults(wish.shape)):
                    yield layout, schedule


def _smallest(wish: Wish, sized: Layout) -> tuple[Layout, Footprint]:
    """Of all that may lie over a mesh with its micro-batches, what holds least."""
    least = min((order for order, _ in wish.orders.values()), key=lambda order: (order.held, order.even))
    tried = [replace(sized, shards=shards, reruns=reruns, order=least) for shards in range(4) for reruns in RERUNS]
    return min(((layout, footprint(wish.shape, layout)) for layout in tried), key=lambda each: each[1].total)


def _computed(wish: Wish, sized: Layout) -> float:
    """Seconds that a rank computes at least: without what is rerun, sent or waited for."""
    shape, machine = wish.shape, wish.machine
    ends = head(shape, sized, machine) + entry(shape, sized, machine)
    layers = layer(shape, sized, machine).all * shape.layers / sized.pp
    return sized.micros * (layers + (ends.all if sized.pp == 1 else 0.0))


def _divisors(number: int) -> list[int]:
    """Of `number`, rising."""
    low = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*low, *(number // each for each in low)})
