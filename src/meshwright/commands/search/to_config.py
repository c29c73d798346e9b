"""The winner of a search as a config: its mesh, its strategies, its precision, as `plan`, `verify` and `train` read them.

What is priced is what is written: weights and their gradients in 16 bits, float32 masters and moments; gathered inputs of divided
matrices not kept; layers run again but for the last block. What a mesh cannot say is told (`unwritten`).
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from meshwright.planner.analytic.parallel_config import Layout
from meshwright.planner.search.search import Candidate


def config_tables(
    model: str, batch: int, sequence: int, best: Candidate, layers: Sequence[str]
) -> dict[str, Any]:
    """The tables of a config; `model` "": none is named. `layers` are the names of the model's blocks, for unequal parts."""
    named = {"model": {"source": model}} if model else {}
    dtype = best.layout.dtype
    roles = {"parameters": dtype, "compute": dtype, "reduce": dtype, "master": "float32", "gradients": dtype}
    return {
        "micro_batch": int(best.layout.micro_batch),
        **named,
        "precision": roles,
        "data": {"sequence": sequence},
        "train": {"batch": batch},
        "mesh": dict(_mesh(best.layout)),
        "strategies": list(_strategies(best, layers)),
    }


def unwritten_notes(best: Candidate, layers: Sequence[str]) -> Iterator[str]:
    """What the config of `best` does not say, in words."""
    if best.layout.outside:
        yield "A mesh lays tensor ranks side by side: that copies stand inside hosts is not written; start ranks in that order."
    if best.dealt:
        kinds = list(dict.fromkeys(kind for kind, _ in best.dealt))
        yield f"Ranks are laid on devices in their order: start them on the {', then on the '.join(kinds)}."
        if not layers:
            counts = ", ".join(str(count) for _, count in best.dealt)
            yield f"The model is known by its sizes alone: the cuts of its layers ({counts}) are not written."


def _mesh(layout: Layout) -> Iterator[tuple[str, int]]:
    outer, inner = _copies(layout)
    sizes = (
        ("pp", layout.pp),
        ("dp_replicate", outer),
        ("dp_shard", inner),
        ("cp", layout.cp),
        ("tp", layout.tp),
    )
    for axis, size in sizes:
        if size > 1:
            yield axis, size


def _copies(layout: Layout) -> tuple[int, int]:
    """Copies that share nothing, and those that share states."""
    if not layout.shards:
        return layout.dp, 1
    inner = layout.within or layout.dp
    return layout.dp // inner, inner


def _strategies(best: Candidate, layers: Sequence[str]) -> Iterator[dict[str, Any]]:
    layout = best.layout
    if layout.pp > 1:
        yield {"name": "pipeline", "schedule": best.schedule, **_parts(best, layers)}
    if layout.tp > 1:
        yield {"name": "line"}
        yield from [{"name": "sequence", "again": True}] if layout.sequence else []
        yield {"name": "vocabulary"}
    if layout.cp > 1:
        yield _attention(layout)
    if layout.reruns != "none":
        yield {"name": "recompute"}
    outer, inner = _copies(layout)
    yield from [{"name": "batch", "axis": "dp_replicate"}] if outer > 1 else []
    yield from [{"name": "batch", "axis": "dp_shard"}] if inner > 1 else []
    if layout.sharers > 1:
        yield _store(layout, outer, inner)


def _parts(best: Candidate, layers: Sequence[str]) -> dict[str, Any]:
    if best.dealt and layers:
        begins = list(accumulate(count for _, count in best.dealt))[:-1]
        return {"cuts": [layers[begin] for begin in begins]}
    return {"chunks": best.layout.chunks} if best.schedule == "interleaved" else {}


def _attention(layout: Layout) -> dict[str, Any]:
    if layout.swaps == 1:
        return {"name": "ring"}
    return {"name": "ulysses"} if layout.swaps == layout.cp else {"name": "hybrid", "inner": layout.swaps}


def _store(layout: Layout, outer: int, inner: int) -> dict[str, Any]:
    if not layout.shards:
        return {"name": "replicate", "axis": "dp_replicate" if outer > 1 else "cp"}
    across = {"across": "dp_replicate"} if outer > 1 else {}
    return {"name": "zero", "axis": "dp_shard" if inner > 1 else "cp", "stage": layout.shards, **across}
