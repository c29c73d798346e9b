"""What a search for a layout found, in words and tables: the scenario, the ranking, why the first one wins."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from meshwright.planner.footprint import Footprint, footprint
from meshwright.planner.layout import Layout
from meshwright.planner.search import Candidate, Found, Wish

GIB = 2**30
PARTS = {
    "compute": "computing",
    "tensor": "meetings of tensor ranks",
    "waiting": "waiting along pp",
    "copies": "sums over copies",
    "optimizer": "the optimizer",
}


@dataclass(frozen=True)
class Budget:
    """What training on so many `tokens` costs, at `price` per device and hour; 0: not asked."""

    tokens: float = 0.0
    price: float = 0.0


def choice_view(wish: Wish, found: Found, budget: Budget) -> RenderableType:
    """All of it."""
    return Group(
        Text(
            f"{wish.shape.name}: {wish.shape.numel / 1e9:.3g} B weights on {wish.machine.count} {wish.machine.device.name}",
            style="bold",
        ),
        Text(scenario(wish)),
        "",
        _table(wish, found),
        "",
        *(Text(line) for line in reasons(wish, found)),
        Text(_held(found.best[0].footprint)),
        *([Text(_paid(wish, found.best[0], budget))] if budget.tokens else []),
    )


def choice_dict(wish: Wish, found: Found, budget: Budget) -> dict[str, Any]:
    """The same as plain values: the scenario, and a row per layout with seconds and bytes by where they go."""
    return {
        "shape": asdict(wish.shape),
        "device": wish.machine.device.name,
        "devices": wish.machine.count,
        "batch": wish.batch,
        "scenario": scenario(wish),
        "reasons": list(reasons(wish, found)),
        "sketched": found.seen,
        "layouts": [_row(wish, each, budget) for each in found.best],
    }


def scenario(wish: Wish) -> str:
    """Which of the three it is, and the family of plans that follows."""
    one, room = Layout(micro_batch=1, micros=wish.batch), wish.memory / GIB
    whole = footprint(wish.shape, one).total / GIB
    if whole <= room:
        return f"Everything fits on each device ({whole:.1f} of {room:.1f} GiB): copies of it, that sum their gradients."
    single = footprint(replace(wish.shape, layers=1), one).total / GIB
    if single <= room:
        text = f"The model does not fit on a device ({whole:.0f} GiB of {room:.1f}), a layer of it does ({single:.1f})"
        return f"{text}: layers on several devices, or shares of states."
    text = f"Not even a layer with its output and its optimizer's states fits on a device ({single:.0f} GiB of {room:.1f})"
    return f"{text}: its matrices have to be divided."


def reasons(wish: Wish, found: Found) -> Iterator[str]:
    """Why the first layout wins, and what costs the others more."""
    best = found.best[0]
    yield f"{found.seen} layouts were priced. {_name(best)} wins: {_where(best)}."
    for number, other in enumerate(found.best[1:4], start=2):
        more = 100 * (other.seconds / best.seconds - 1)
        parts = {name: spent_on(other, name) - spent_on(best, name) for name in PARTS}
        worst = max(parts, key=lambda name: parts[name])
        yield f"{number}. {_name(other)} takes {more:.1f} % longer, most of it in {PARTS[worst]}."


def spent_on(candidate: Candidate, name: str) -> float:
    """The seconds of a step that go to one of `PARTS`."""
    return float(vars(candidate.step)[name])


def _where(best: Candidate) -> str:
    shares = [(spent_on(best, name) / best.seconds, words) for name, words in PARTS.items()]
    return ", ".join(f"{100 * share:.0f} % {words}" for share, words in sorted(shares, reverse=True) if share >= 0.005)


def _name(each: Candidate) -> str:
    layout = each.layout
    words = [
        f"{axis} {size}"
        for axis, size in (("dp", layout.dp), ("tp", layout.tp), ("pp", layout.pp), ("cp", layout.cp))
        if size > 1
    ]
    words += [f"ZeRO {layout.shards}"] if layout.shards else []
    words += [each.schedule + (f" x {layout.chunks}" if layout.chunks > 1 else "")] if each.schedule else []
    words += [{"none": "", "attention": "attention rerun", "layers": "layers rerun"}[layout.reruns]]
    words += [f"{layout.micros:g} x {layout.micro_batch:g} rows"]
    return ", ".join(word for word in words if word)


def _row(wish: Wish, each: Candidate, budget: Budget) -> dict[str, Any]:
    tokens = wish.batch * wish.shape.sequence
    peak = wish.machine.peak(each.layout.dtype)
    flops = wish.shape.flops(tokens)
    row = {
        "layout": asdict(each.layout),
        "schedule": each.schedule,
        "name": _name(each),
        "step_s": each.seconds,
        "tokens_per_s": tokens / each.seconds,
        "mfu": flops / (each.seconds * wish.machine.count * peak),
        "waiting": each.step.waiting / each.seconds,
        "exposed": (each.step.tensor + each.step.copies) / each.seconds,
        "seconds": asdict(each.step),
        "bytes": asdict(each.footprint),
        "peak_bytes": each.footprint.total,
    }
    if budget.tokens:
        hours = budget.tokens / row["tokens_per_s"] / 3600
        row["days"] = hours / 24
        row["cost"] = hours * wish.machine.count * budget.price
        row["cost_of_waiting"] = row["cost"] * (row["waiting"] + row["exposed"])
    return row


def _table(wish: Wish, found: Found) -> Table:
    table = Table(*("", "s", "tokens/s", "mfu %", "waits %", "sends %", "GiB"), Column("layout", overflow="fold"), pad_edge=False)
    for number, each in enumerate(found.best, start=1):
        row = _row(wish, each, Budget())
        figures = [f"{row['step_s']:.3g}", f"{row['tokens_per_s']:,.0f}"]
        figures += [f"{100 * row[name]:.1f}" for name in ("mfu", "waiting", "exposed")]
        table.add_row(str(number), *figures, f"{each.footprint.total / GIB:.1f}", _name(each))
    return table


def _held(found: Footprint) -> str:
    parts = {"states": found.states, "activations": found.activations, "a block's backward": found.inside}
    parts |= {"logits": found.logits, "gathered weights": found.gathered, "gaps": found.gaps, "context": found.context}
    shares = ", ".join(f"{held / GIB:.1f} {name}" for name, held in parts.items() if held / GIB >= 0.05)
    return f"Its fullest device holds {found.total / GIB:.1f} GiB: {shares}."


def _paid(wish: Wish, best: Candidate, budget: Budget) -> str:
    row = _row(wish, best, budget)
    text = f"{budget.tokens:.3g} tokens take {row['days']:,.1f} days"
    return f"{text} and cost {row['cost']:,.0f}, of which waiting {row['cost_of_waiting']:,.0f}." if budget.price else f"{text}."
