"""How far a machine goes, in words: what fits, and what stops one more."""

from dataclasses import asdict
from typing import Any

from rich.text import Text

from meshwright.planner.search.max_fit import Limit
from meshwright.report.search.search_result import HELD, axes, gib, held_by, name

WORDS = {
    "batch": "The largest batch that goes through at once is {value:,} rows (more rows go one behind the other)",
    "sequence": "The longest rows are of {value:,} tokens, at {rows:,} rows of a step",
    "layers": "The largest model of this width has {value:,} layers, at {rows:,} rows of a step",
    "devices": "The fewest devices are {value:,}, at {rows:,} rows of a step",
}
BEYOND = {"batch": "{:,} rows", "sequence": "{:,} tokens", "layers": "{:,} layers", "devices": "{:,} devices"}


def limit_view(found: Limit) -> Text:
    """The limit, and what stops one step more."""
    text = f"{WORDS[found.what].format(value=found.value, rows=found.wish.batch)}. {stop(found)}"
    if found.apart is not None and found.found.best:
        once, freely = found.found.best[0].seconds, found.apart.seconds
        text += f" The same rows take {once:.3g} s at once, and {freely:.3g} s with {name(found.apart)}."
    return Text(text, style="bold")


def stop(found: Limit) -> str:
    """What stops one step beyond the limit: how much of what on which rank."""
    if found.learnt:
        return f"The model has learnt {found.value:,} positions, and none for token {found.beyond:,}: not memory stops it."
    beyond = BEYOND[found.what].format(found.beyond)
    beyond = beyond.removesuffix("s") if found.beyond == 1 else beyond
    if not found.beyond:
        return "There is nothing less."
    if found.stopped is None:
        return f"No layout of {beyond} comes out even."
    held, layout = found.stopped.held, found.stopped.layout
    parts = sorted(HELD, key=lambda part: -held_by(held, part))
    largest = ", ".join(f"{gib(held_by(held, part)):.1f} {part}" for part in parts[:3])
    where = f"on rank {found.stopped.rank} of pp {layout.pp}" if layout.pp > 1 else "on each device"
    named = ", ".join(axes(layout)) or "one device"
    need = "needs" if found.beyond == 1 else "need"
    text = f"{beyond} {need} {gib(held.total):.1f} GiB of {gib(found.wish.memory):.1f} {where}, at the least ({named})"
    return f"{text}: {largest}."


def limit_dict(found: Limit) -> dict[str, Any]:
    """The same as plain values."""
    stopped = None
    if found.stopped is not None:
        held = found.stopped.held
        stopped = {
            "layout": asdict(found.stopped.layout),
            "rank": found.stopped.rank,
            "bytes": {part: held_by(held, part) for part in HELD},
            "most": found.stopped.most,
            "peak_bytes": held.total,
        }
    return {
        "what": found.what,
        "value": found.value,
        "beyond": found.beyond,
        "stopped": stopped,
        "words": stop(found),
    }
