"""Text on the largest size that fits, and on what limits it."""

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
    "batch": "The largest batch without gradient accumulation is {value:,} samples",
    "sequence": "The longest sequences have {value:,} tokens, at a global batch of {batch:,} samples",
    "layers": "The largest model of this width has {value:,} layers, at a global batch of {batch:,} samples",
    "devices": "The fewest devices are {value:,}, at a global batch of {batch:,} samples",
}
NEXT_TEXTS = {
    "batch": "{:,} samples",
    "sequence": "{:,} tokens",
    "layers": "{:,} layers",
    "devices": "{:,} devices",
}


def max_fit_view(max_fit: MaxFit) -> Text:
    """Returns the limit, and what prevents one step more."""
    text = (
        f"{FIT_TEXTS[max_fit.quantity].format(value=max_fit.value, batch=max_fit.request.batch)}. "
        f"{limiting_reason(max_fit)}"
    )
    if max_fit.best_sequential is not None and max_fit.result.best:
        one_microbatch_s, best_s = max_fit.result.best[0].seconds, max_fit.best_sequential.seconds
        text += (
            f" A step of this batch takes {one_microbatch_s:.3g} s in one microbatch, and "
            f"{best_s:.3g} s with {config_text(max_fit.best_sequential)}."
        )
    return Text(text, style="bold")


def limiting_reason(max_fit: MaxFit) -> str:
    """Returns what prevents one step beyond the limit: which memory on which rank."""
    if max_fit.limited_by_positions:
        return (
            f"The limit is the {max_fit.value:,} positions that the model has, not memory: there is none "
            f"for token {max_fit.next_value:,}."
        )
    following = NEXT_TEXTS[max_fit.quantity].format(max_fit.next_value)
    following = following.removesuffix("s") if max_fit.next_value == 1 else following
    if not max_fit.next_value:
        return "There is no smaller value."
    if max_fit.nearest_miss is None:
        return f"No configuration divides {following} evenly."
    memory, config = max_fit.nearest_miss.memory, max_fit.nearest_miss.config
    parts = sorted(MEMORY_CATEGORIES, key=lambda part: -category_nbytes(memory, part))
    largest = ", ".join(
        f"{to_gib(category_nbytes(memory, part)):.1f} {part.replace('_', ' ')}" for part in parts[:3]
    )
    where = f"on rank {max_fit.nearest_miss.pp_rank} of pp {config.pp}" if config.pp > 1 else "on each device"
    named = ", ".join(axis_texts(config)) or "one device"
    need = "needs" if max_fit.next_value == 1 else "need"
    text = (
        f"{following} {need} {to_gib(memory.total):.1f} GiB of {to_gib(max_fit.request.usable_memory):.1f} "
        f"{where}, in the smallest configuration ({named})"
    )
    return f"{text}: {largest}."


def max_fit_dict(max_fit: MaxFit) -> dict[str, Any]:
    """Returns the limit, and what prevents one step more, as plain values."""
    next_size = None
    if max_fit.nearest_miss is not None:
        memory = max_fit.nearest_miss.memory
        next_size = {
            "configuration": asdict(max_fit.nearest_miss.config),
            "rank": max_fit.nearest_miss.pp_rank,
            "bytes": {part: category_nbytes(memory, part) for part in MEMORY_CATEGORIES},
            "largest_category": max_fit.nearest_miss.largest_category,
            "peak_bytes": memory.total,
        }
    return {
        "quantity": max_fit.quantity,
        "value": max_fit.value,
        "next_value": max_fit.next_value,
        "next_size": next_size,
        "reason": limiting_reason(max_fit),
    }
