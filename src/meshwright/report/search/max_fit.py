"""How far a machine goes, in words: what fits, and what stops one more."""

from dataclasses import asdict
from typing import Any

from rich.text import Text

from meshwright.planner.search.max_fit import MaxFit
from meshwright.report.search.search_result import (
    MEMORY_CATEGORIES,
    axis_texts,
    category_nbytes,
    config_text,
    to_gib,
)

FIT_TEXTS = {
    "batch": (
        "The largest batch that goes through at once is {value:,} rows (more rows go one behind the other)"
    ),
    "sequence": "The longest rows are of {value:,} tokens, at {rows:,} rows of a step",
    "layers": "The largest model of this width has {value:,} layers, at {rows:,} rows of a step",
    "devices": "The fewest devices are {value:,}, at {rows:,} rows of a step",
}
NEXT_TEXTS = {
    "batch": "{:,} rows",
    "sequence": "{:,} tokens",
    "layers": "{:,} layers",
    "devices": "{:,} devices",
}


def max_fit_view(max_fit: MaxFit) -> Text:
    """The limit, and what stops one step more."""
    text = (
        f"{FIT_TEXTS[max_fit.quantity].format(value=max_fit.value, rows=max_fit.request.batch)}. "
        f"{limiting_reason(max_fit)}"
    )
    if max_fit.best_sequential is not None and max_fit.result.best:
        once, freely = max_fit.result.best[0].seconds, max_fit.best_sequential.seconds
        text += (
            f" The same rows take {once:.3g} s at once, and {freely:.3g} s with "
            f"{config_text(max_fit.best_sequential)}."
        )
    return Text(text, style="bold")


def limiting_reason(max_fit: MaxFit) -> str:
    """What stops one step beyond the limit: how much of what on which rank."""
    if max_fit.limited_by_positions:
        return (
            f"The model has learnt {max_fit.value:,} positions, and none for token "
            f"{max_fit.next_value:,}: not memory stops "
            f"it."
        )
    beyond = NEXT_TEXTS[max_fit.quantity].format(max_fit.next_value)
    beyond = beyond.removesuffix("s") if max_fit.next_value == 1 else beyond
    if not max_fit.next_value:
        return "There is nothing less."
    if max_fit.nearest_miss is None:
        return f"No layout of {beyond} comes out even."
    held, layout = max_fit.nearest_miss.memory, max_fit.nearest_miss.config
    parts = sorted(MEMORY_CATEGORIES, key=lambda part: -category_nbytes(held, part))
    largest = ", ".join(f"{to_gib(category_nbytes(held, part)):.1f} {part}" for part in parts[:3])
    where = f"on rank {max_fit.nearest_miss.pp_rank} of pp {layout.pp}" if layout.pp > 1 else "on each device"
    named = ", ".join(axis_texts(layout)) or "one device"
    need = "needs" if max_fit.next_value == 1 else "need"
    text = (
        f"{beyond} {need} {to_gib(held.total):.1f} GiB of "
        f"{to_gib(max_fit.request.usable_memory):.1f} "
        f"{where}, at the least ({named})"
    )
    return f"{text}: {largest}."


def max_fit_dict(max_fit: MaxFit) -> dict[str, Any]:
    """The same as plain values."""
    stopped = None
    if max_fit.nearest_miss is not None:
        held = max_fit.nearest_miss.memory
        stopped = {
            "layout": asdict(max_fit.nearest_miss.config),
            "rank": max_fit.nearest_miss.pp_rank,
            "bytes": {part: category_nbytes(held, part) for part in MEMORY_CATEGORIES},
            "most": max_fit.nearest_miss.largest_category,
            "peak_bytes": held.total,
        }
    return {
        "what": max_fit.quantity,
        "value": max_fit.value,
        "beyond": max_fit.next_value,
        "stopped": stopped,
        "words": limiting_reason(max_fit),
    }
