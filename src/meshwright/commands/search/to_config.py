"""The winner of a search as a config: its mesh, its strategies, its precision, as `plan`, `verify` and `train` read them.

What is priced is what is written: weights and their gradients in 16 bits, float32 masters and moments; gathered inputs of divided
matrices not kept; layers run again but for the last block. What a mesh cannot say is told (`unwritten`).
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.search.search import Candidate


def config_tables(
    model: str, batch: int, sequence: int, best: Candidate, layers: Sequence[str]
) -> dict[str, Any]:
    """The tables of a config; `model` "": none is named. `layers` are the names of the model's blocks, for unequal parts."""
    named = {"model": {"source": model}} if model else {}
    dtype = best.config.dtype
    roles = {"parameters": dtype, "compute": dtype, "reduce": dtype, "master": "float32", "gradients": dtype}
    return {
        "micro_batch": int(best.config.micro_batch),
        **named,
        "precision": roles,
        "data": {"sequence": sequence},
        "train": {"batch": batch},
        "mesh": dict(_mesh(best.config)),
        "strategies": list(_strategies(best, layers)),
    }


def unwritten_notes(best: Candidate, layers: Sequence[str]) -> Iterator[str]:
    """What the config of `best` does not say, in words."""
    if best.config.tp_across_hosts:
        yield "A mesh lays tensor ranks side by side: that copies stand inside hosts is not written; start ranks in that order."
    if best.layer_assignment:
        kinds = list(dict.fromkeys(kind for kind, _ in best.layer_assignment))
        yield f"Ranks are laid on devices in their order: start them on the {', then on the '.join(kinds)}."
        if not layers:
            counts = ", ".join(str(count) for _, count in best.layer_assignment)
            yield f"The model is known by its sizes alone: the cuts of its layers ({counts}) are not written."


def _mesh(layout: ParallelConfig) -> Iterator[tuple[str, int]]:
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


def _copies(layout: ParallelConfig) -> tuple[int, int]:
    """Copies that share nothing, and those that share states."""
    if not layout.zero_stage:
        return layout.dp, 1
    inner = layout.zero_group_size or layout.dp
    return layout.dp // inner, inner


def _strategies(best: Candidate, layers: Sequence[str]) -> Iterator[dict[str, Any]]:
    layout = best.config
    if layout.pp > 1:
        yield {"name": "pipeline", "schedule": best.schedule, **_parts(best, layers)}
    if layout.tp > 1:
        yield {"name": "tensor_parallel"}
        yield from [{"name": "sequence_parallel", "regather": True}] if layout.sequence_parallel else []
        yield {"name": "vocab_parallel"}
    if layout.cp > 1:
        yield _attention(layout)
    if layout.recompute != "none":
        yield {"name": "activation_checkpointing"}
    outer, inner = _copies(layout)
    yield from [{"name": "batch_split", "axis": "dp_replicate"}] if outer > 1 else []
    yield from [{"name": "batch_split", "axis": "dp_shard"}] if inner > 1 else []
    if layout.data_parallel_size > 1:
        yield _store(layout, outer, inner)


def _parts(best: Candidate, layers: Sequence[str]) -> dict[str, Any]:
    if best.layer_assignment and layers:
        begins = list(accumulate(count for _, count in best.layer_assignment))[:-1]
        return {"split_points": [layers[begin] for begin in begins]}
    return {"virtual_stages": best.config.virtual_stages} if best.schedule == "interleaved" else {}


def _attention(layout: ParallelConfig) -> dict[str, Any]:
    if layout.ulysses_degree == 1:
        return {"name": "ring"}
    return {"name": "ulysses"} if layout.ulysses_degree == layout.cp else {"name": "hybrid_context_parallel", "ulysses_degree": layout.ulysses_degree}


def _store(layout: ParallelConfig, outer: int, inner: int) -> dict[str, Any]:
    if not layout.zero_stage:
        return {"name": "ddp", "axis": "dp_replicate" if outer > 1 else "cp"}
    across = {"replicate_axis": "dp_replicate"} if outer > 1 else {}
    return {"name": "zero", "axis": "dp_shard" if inner > 1 else "cp", "stage": layout.zero_stage, **across}
