"""What a search for a layout found, in words and tables: the scenario, the ranking, why the first one wins."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.planner.analytic.memory import Footprint, footprint
from meshwright.planner.analytic.model_shape import Shape
from meshwright.planner.analytic.parallel_config import Layout
from meshwright.planner.machine.machine import Machine
from meshwright.planner.search.request import SHARE, Wish
from meshwright.planner.search.search import Candidate, Found

# of a step, by what a reader can change
PARTS = {
    "compute": "computing",
    "tensor": "communication within layers",
    "waiting": "the bubble along pp",
    "copies": "communication of copies",
    "optimizer": "the optimizer",
    "fixed": "what every step takes",
}
# of the fullest rank, by what they are of; what a block's backward needs is counted with activations
HELD = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "moments": ("moments",),
    "activations": ("activations", "inside"),
    "gathered": ("gathered",),
    "loss": ("logits",),
    "margin": ("gaps", "context"),
}


@dataclass(frozen=True)
class Budget:
    """What training on so many `tokens` costs, at `price` per device and hour; 0: not asked."""

    tokens: float = 0.0
    price: float = 0.0


@dataclass(frozen=True)
class Beside:
    """What a winner is compared with: the devices of each kind; the fastest layout if memory were no limit (`roomy`), where that
    is another one; seconds of the winner `turned`, copies inside hosts and tensor ranks across; each kind `alone`.
    """

    kinds: tuple[Machine, ...] = ()
    roomy: Candidate | None = None
    turned: float | None = None
    alone: Sequence[tuple[Machine, Candidate | None]] = field(default_factory=tuple)


ALONE = Beside()


def gib(nbytes: float) -> float:
    """Bytes in GiB."""
    return nbytes / 2**30


def choice_view(wish: Wish, found: Found, budget: Budget, beside: Beside = ALONE) -> RenderableType:
    """All of it."""
    best = found.best[0]
    return Group(
        Text(
            f"{wish.shape.name}: {wish.shape.numel / 1e9:.3g} B weights on {_devices(wish, beside)}",
            style="bold",
        ),
        Text(scenario(wish, beside.kinds)),
        "",
        _table(wish, found, beside.kinds),
        "",
        Text("GiB of the fullest rank"),
        _held_table(found),
        "",
        *(Text(line) for line in reasons(wish, found, beside)),
        *(["", Text(_paid(wish, best, budget)), _paid_table(wish, found, budget)] if budget.tokens else []),
    )


def choice_dict(wish: Wish, found: Found, budget: Budget, beside: Beside = ALONE) -> dict[str, Any]:
    """The same as plain values: the scenario, and a row per layout with seconds and bytes by where they go."""
    return {
        "shape": asdict(wish.shape),
        "device": wish.machine.device.name,
        "devices": wish.machine.count,
        "batch": wish.batch,
        "scenario": scenario(wish, beside.kinds),
        "reasons": list(reasons(wish, found, beside)),
        "sketched": found.seen,
        "layouts": [row(wish, each, budget, beside.kinds) for each in found.best],
    }


def _devices(wish: Wish, beside: Beside) -> str:
    several = len(beside.kinds) > 1  # then the machine's name has the numbers
    return wish.machine.device.name if several else f"{wish.machine.count} {wish.machine.device.name}"


def scenario(wish: Wish, kinds: Sequence[Machine] = ()) -> str:
    """Which of the three it is (on each device, on one at least, not even a layer on the largest), and what follows."""
    one = Layout(micro_batch=1, micros=wish.batch)
    rooms = sorted(gib(SHARE * each.device.memory) for each in kinds or [wish.machine])
    least, most = rooms[0], rooms[-1]
    whole = gib(footprint(wish.shape, one).total)
    if whole <= least:
        return f"Everything fits on each device ({whole:.1f} of {least:.1f} GiB): copies of it, that sum their gradients."
    if whole <= most:
        text = f"Everything fits on at least one device ({whole:.1f} of {most:.1f} GiB), and not on each ({least:.1f})"
        return f"{text}: layers dealt by memory, shares of states, or copies on the large ones alone."
    shape = replace(wish.shape, layers=1)
    held = footprint(shape, one)
    single = gib(held.total)
    if single <= most:
        text = f"The model does not fit on a device ({whole:.0f} GiB of {most:.1f}), a layer of it does ({single:.1f})"
        return f"{text}: layers on several devices, or shares of states."
    largest = "the largest device" if most > least else "a device"
    text = f"Not even a layer with its output and its optimizer's states fits on {largest} ({single:.0f} GiB of {most:.1f})"
    return f"{text}. {_too_much(shape, held, most)}"


def _too_much(shape: Shape, held: Footprint, most: float) -> str:
    """What of a layer, `held` with its tables and a row, is more than `most` GiB and has to be divided, and how."""
    layer = gib(held.states) * shape.layer_numel / shape.numel
    tables, row = gib(held.states) - layer, gib(held.total - held.states)
    rest = _most(replace(held, weights=0.0, gradients=0.0, moments=0.0))
    text = f"Its states are {layer:.1f} GiB, those of embedding and head {tables:.1f}; with a row of {shape.sequence:,} tokens"
    text += f" come {row:.1f}, the most of them for {rest}"
    states = "matrices among tensor ranks, or shares of their states among copies"
    ways = {
        "the layer": (layer, states),
        "embedding and head": (tables, states),
        "the row": (row, "its tokens along cp, or what is computed of them among tensor ranks"),
    }
    over = [f"{part} ({way})" for part, (nbytes, way) in ways.items() if nbytes > most]
    return f"{text}. To be divided: {' and '.join(over) or 'any of these, as none is too much alone'}."


def reasons(wish: Wish, found: Found, beside: Beside = ALONE) -> Iterator[str]:
    """Why the first layout wins, and what costs the others more: computing, the bubble, communication, or memory."""
    best = found.best[0]
    yield f"{found.seen} layouts were priced. {name(best)} wins: {_where(best)}."
    for number, other in enumerate(found.best[1:4], start=2):
        more = 100 * (other.seconds / best.seconds - 1)
        longer = f"{more:.1f} % longer" if more >= 0.05 else "as long"
        yield f"{number}. {name(other)} takes {longer}: {_changes(best, other)}."
    if beside.roomy is not None:
        held, saved = beside.roomy.footprint, 100 * (1 - beside.roomy.seconds / best.seconds)
        text = f"Memory stops {name(beside.roomy)}: {saved:.1f} % faster, and {gib(held.total):.0f} GiB"
        yield f"{text} of {gib(wish.memory):.1f}, most of them {_most(held)}."
    if beside.turned is not None:
        more, other = (
            100 * (beside.turned / best.seconds - 1),
            "tensor ranks" if best.layout.outside else "copies",
        )
        longer = "longer" if more > 0 else "less"
        yield f"With {other} side by side on hosts instead the first one takes {abs(more):.1f} % {longer}."
    for kind, other in beside.alone:
        text = f"The {kind.count} {kind.device.name} alone"
        if other is None:
            yield f"{text}: nothing fits."
        else:
            yield f"{text} take {other.seconds:.3g} s, {100 * (other.seconds / best.seconds - 1):.0f} % longer: {name(other)}."


def spent_on(candidate: Candidate, part: str) -> float:
    """The seconds of a step that go to one of `PARTS`."""
    return float(vars(candidate.step)[part])


def held_by(found: Footprint, part: str) -> float:
    """The bytes that go to one of `HELD`."""
    return float(sum(vars(found)[each] for each in HELD[part]))


def _where(best: Candidate) -> str:
    shares = [(spent_on(best, part) / best.seconds, words) for part, words in PARTS.items()]
    return ", ".join(
        f"{100 * share:.0f} % {words}" for share, words in sorted(shares, reverse=True) if share >= 0.005
    )


def _changes(best: Candidate, other: Candidate) -> str:
    """What makes another one slower, in hundredths of the best one's step, largest first; what it saves; what it holds."""
    changes = [
        ((spent_on(other, part) - spent_on(best, part)) / best.seconds, words)
        for part, words in PARTS.items()
    ]
    shown = [
        f"{words} {100 * change:+.1f}"
        for change, words in sorted(changes, key=lambda each: -each[0])
        if abs(change) > 5e-4
    ]
    more = gib(other.footprint.total - best.footprint.total)
    shown += [f"{abs(more):.1f} GiB {'more' if more > 0 else 'less'}"] if abs(more) >= 0.05 else []
    return ", ".join(shown) or "nothing to be seen"


def _most(held: Footprint) -> str:
    return max((part for part in HELD if part != "margin"), key=lambda part: held_by(held, part))


def axes(layout: Layout) -> list[str]:
    """The axes of `layout` along which there is more than one rank, each with its size."""
    sizes = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "cp": layout.cp}
    return [f"{axis} {size}" for axis, size in sizes.items() if size > 1]


def name(each: Candidate) -> str:
    """A layout in a line."""
    layout = each.layout
    words = axes(layout)
    words += [_attention(layout)] if layout.cp > 1 else []
    words += (
        [f"ZeRO {layout.shards}" + (f" among {layout.within}" if layout.within else "")]
        if layout.shards
        else []
    )
    words += [each.schedule + (f" x {layout.chunks}" if layout.chunks > 1 else "")] if each.schedule else []
    words += [{"none": "", "attention": "attention rerun", "layers": "layers rerun"}[layout.reruns]]
    words += [_dealt(each)] if each.dealt else []
    words += [f"{layout.micros:g} x {layout.micro_batch:g} rows"]
    return ", ".join(word for word in words if word)


def _attention(layout: Layout) -> str:
    if layout.swaps == 1:
        return "ring"
    return "Ulysses" if layout.swaps == layout.cp else f"Ulysses {layout.swaps} in rings"


def _dealt(each: Candidate) -> str:
    """The layers of ranks along pp, by kind."""
    runs = [
        (kind, [count for _, count in group]) for kind, group in groupby(each.dealt, key=lambda each: each[0])
    ]
    said = [
        f"{len(counts)} {kind} of {'/'.join(map(str, sorted(set(counts), reverse=True)))}"
        for kind, counts in runs
    ]
    return f"layers on {', '.join(said)}"


def row(wish: Wish, each: Candidate, budget: Budget, kinds: Sequence[Machine] = ()) -> dict[str, Any]:
    """What is known of a layout, as plain values: seconds, bytes, shares of the step; days and cost where they are asked for."""
    tokens = wish.batch * wish.shape.sequence
    peak = sum(kind.count * kind.peak(each.layout.dtype) for kind in kinds or [wish.machine])
    said = {
        "layout": asdict(each.layout),
        "schedule": each.schedule,
        "name": name(each),
        "dealt": list(each.dealt),
        "step_s": each.seconds,
        "tokens_per_s": tokens / each.seconds,
        "mfu": wish.shape.flops(tokens) / (each.seconds * peak),
        "waiting": each.step.waiting / each.seconds,
        "exposed": (each.step.tensor + each.step.copies) / each.seconds,
        "seconds": asdict(each.step),
        "bytes": {part: held_by(each.footprint, part) for part in HELD},
        "peak_bytes": each.footprint.total,
    }
    if budget.tokens:
        hours = budget.tokens / said["tokens_per_s"] / 3600
        said["days"] = hours / 24
        said["hours_waiting"] = hours * (said["waiting"] + said["exposed"])
        said["cost"] = hours * wish.machine.count * budget.price
        said["cost_of_waiting"] = said["cost"] * (said["waiting"] + said["exposed"])
    return said


def _table(wish: Wish, found: Found, kinds: Sequence[Machine]) -> Table:
    table = _plain("", "s", "tokens/s", "mfu %", "waits %", "sends %", "GiB")
    table.add_column("layout", overflow="fold")
    for number, each in enumerate(found.best, start=1):
        said = row(wish, each, Budget(), kinds)
        figures = [f"{said['step_s']:.3g}", f"{said['tokens_per_s']:,.0f}"]
        figures += [f"{100 * said[part]:.1f}" for part in ("mfu", "waiting", "exposed")]
        table.add_row(str(number), *figures, f"{gib(each.footprint.total):.1f}", name(each))
    return table


def _paid_table(wish: Wish, found: Found, budget: Budget) -> Table:
    """What so many tokens cost under each layout, and how much of it is waiting."""
    table = _plain("", "days", "hours waiting", *(["cost", "of it waiting"] if budget.price else []))
    for number, each in enumerate(found.best, start=1):
        said = row(wish, each, budget)
        paid = [f"{said[part]:,.0f}" for part in ("cost", "cost_of_waiting")] if budget.price else []
        table.add_row(str(number), f"{said['days']:,.1f}", f"{said['hours_waiting']:,.1f}", *paid)
    return table


def _plain(*heads: str) -> Table:
    """An empty table of figures, which are never cut."""
    table = Table(pad_edge=False, collapse_padding=True, box=SIMPLE_HEAD)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _held_table(found: Found) -> Table:
    table = _plain("", *HELD, "all")
    for number, each in enumerate(found.best, start=1):
        parts = [f"{gib(held_by(each.footprint, part)):.1f}" for part in HELD]
        table.add_row(str(number), *parts, f"{gib(each.footprint.total):.1f}")
    return table


def _paid(wish: Wish, best: Candidate, budget: Budget) -> str:
    said = row(wish, best, budget)
    text = f"{budget.tokens:.3g} tokens take {said['days']:,.1f} days, {said['hours_waiting']:,.0f} hours of them waiting"
    cost = (
        f" and cost {said['cost']:,.0f}, of which waiting {said['cost_of_waiting']:,.0f}"
        if budget.price
        else ""
    )
    return f"{text}{cost}: along pp, and for what nothing hides of the sending."
