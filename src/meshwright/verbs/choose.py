"""`plan MODEL --devices N --hardware KIND --batch B`: the best layouts of a model that nobody has rented a device for.

MODEL is a shape in words ("175b: layers 96 hidden 12288 heads 96"), or a transformers config, whose sizes are read and whose
model is made without weights to count them. The winner is written as a config: mesh and strategies, for `verify` and `train`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import RenderableType

from meshwright.core.errors import Fault, PlanError, raise_faults
from meshwright.core.sources import ModelSource
from meshwright.model.declared import config_of
from meshwright.model.sources import load_model
from meshwright.planner.hardware import machine
from meshwright.planner.layout import Layout, Order
from meshwright.planner.search import Candidate, Found, Wish, search
from meshwright.planner.shapes import FORM, Shape, parse_shape
from meshwright.report.choice import Budget, choice_dict, choice_view

# what ranks along pp wait and hold under each schedule (strategies/pipeline), and the chunks it needs; 0: any
ORDERS: Mapping[str, tuple[Order, int]] = {
    "1f1b": (Order(), 1),
    "interleaved": (Order(), 0),
    "zb_h1": (Order(1.0, 1.0, -1.0, even=True), 1),
    "zb_v": (Order(0.0, 0.0, 0.0, even=True, folded=True), 2),
}


# what configs of transformers call sizes; those of families with other names say which theirs are (attribute_map)
THEIRS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "sequence": "max_position_embeddings",
}


@dataclass(frozen=True)
class Asked:
    """What the command was told: a model, devices, the rows of a step, and what is fixed."""

    model: str
    devices: int
    hardware: str
    batch: int
    sequence: int = 0
    fixed: tuple[str, ...] = ()
    keep: int = 8
    budget: Budget = field(default_factory=Budget)


@dataclass(frozen=True)
class Chosen:
    """What a search was asked, and what it found."""

    asked: Asked
    wish: Wish
    found: Found


def choose(asked: Asked) -> Chosen:
    """The layouts that are best for what was `asked`.

    Raises PlanError for a model, a device or an axis that is not understood, and where nothing fits: what is missing, and what
    comes nearest.
    """
    faults: list[Fault] = []
    fixed = dict(_fixed(asked.fixed, faults))
    shape = shape_of(asked.model, asked.sequence)
    wish = Wish(shape, machine(asked.hardware, asked.devices), asked.batch, ORDERS, fixed)
    raise_faults([*faults, *wish.faults()])
    found = search(wish, asked.keep)
    if not found.best:
        raise _nothing(wish, found)
    return Chosen(asked, wish, found)


def view(chosen: Chosen) -> RenderableType:
    """The scenario in words, the ranked layouts, why the first one wins, and what stops the others."""
    return choice_view(chosen.wish, chosen.found, chosen.asked.budget)


def as_dict(chosen: Chosen) -> dict[str, Any]:
    """The same as plain values."""
    return choice_dict(chosen.wish, chosen.found, chosen.asked.budget)


def write_config(chosen: Chosen, path: Path) -> None:
    """Write the winner as a config."""
    path.write_text(tomli_w.dumps(config_of_choice(chosen)), encoding="utf-8")


def config_of_choice(chosen: Chosen) -> dict[str, Any]:
    """The winner as the tables of a config: [model] where it is one that can be built, [mesh], [[strategies]], [train]."""
    best = chosen.found.best[0]
    model = {} if is_shape(chosen.asked.model) else {"model": {"source": chosen.asked.model}}
    return {
        "micro_batch": int(best.layout.micro_batch),
        **model,
        "precision": {"compute": best.layout.dtype},
        "data": {"sequence": chosen.wish.shape.sequence},
        "train": {"batch": chosen.wish.batch},
        "mesh": dict(_mesh(best.layout)),
        "strategies": list(_strategies(best)),
    }


def shape_of(model: str, sequence: int) -> Shape:
    """The sizes of `model`; `sequence` 0: what it says itself."""
    shape = parse_shape(model) if is_shape(model) else _of_config(model)
    return replace(shape, sequence=sequence) if sequence else shape


def is_shape(model: str) -> bool:
    """Whether it is sizes in words, not a file or a repository."""
    return "layers" in model.partition(":")[2]


def _of_config(source: str) -> Shape:
    loaded = load_model(ModelSource(source), seed=0)
    config = config_of(loaded.blueprint.instance())
    if config is None:
        text = f"{source} makes a model without a config: its sizes are not known"
        raise PlanError(text, fix=f"say them: {FORM}", where="MODEL")
    said = config.to_dict()
    sizes = {ours: said.get(config.attribute_map.get(theirs, theirs)) for ours, theirs in THEIRS.items()}
    lacking = [theirs for ours, theirs in THEIRS.items() if not isinstance(sizes[ours], int)]
    if lacking:
        text = f"the config of {source} does not say {', '.join(lacking)}"
        raise PlanError(text, fix=f"say the sizes in words: {FORM}", where="MODEL")
    plain = Shape(
        Path(source).stem,
        **sizes,
        kv_heads=said.get("num_key_value_heads") or 0,
        ffn=said.get("intermediate_size") or said.get("n_inner") or said.get("ffn_dim") or 0,
        tied=bool(said.get("tie_word_embeddings")),
    )
    matrices = sum(prod(entry.shape) for entry in loaded.blueprint.logical.values() if len(entry.shape) > 1)
    return min((plain, replace(plain, gated=True)), key=lambda shape: abs(shape.numel - matrices))


def _fixed(words: tuple[str, ...], faults: list[Fault]) -> Iterator[tuple[str, int]]:
    for word in words:
        axis, _, size = word.partition("=")
        if size.isdigit():
            yield axis, int(size)
        else:
            faults.append(Fault(f"'{word}' fixes nothing", "write AXIS=SIZE, for example tp=8", "--fix"))


def _nothing(wish: Wish, found: Found) -> PlanError:
    shape, kind = wish.shape, wish.machine
    if found.nearest is None:
        text = f"no mesh of {kind.count} devices takes {wish.batch} rows of {shape.name} as it is fixed"
        return PlanError(text, fix="fix fewer axes, or choose a batch that copies can share", where="plan")
    layout, held = found.nearest
    needed, there = held.total / 2**30, wish.memory / 2**30
    text = (
        f"nothing fits: {shape.name} needs {needed:.0f} GiB on the fullest device, and {kind.device.name} has {there:.0f} to give"
    )
    fix = f"more devices (about {_more(wish, layout)}), or ones with more memory; the nearest layout is {words_of(layout)}"
    return PlanError(text, fix=fix, where="plan")


def _more(wish: Wish, nearest: Layout) -> int:
    """The devices, times powers of two, on which something fits; a hundred times as many where they go no further."""
    count = wish.machine.count
    for _ in range(7):
        count *= 2
        larger = replace(wish, machine=replace(wish.machine, count=count), batch=max(wish.batch, count), fixed={})
        if search(larger, 1).best:
            return count
    return 100 * nearest.ranks


def words_of(layout: Layout) -> str:
    """A layout in a few words."""
    axes = [
        f"{axis} {size}"
        for axis, size in (("dp", layout.dp), ("tp", layout.tp), ("pp", layout.pp), ("cp", layout.cp))
        if size > 1
    ]
    return ", ".join(axes or ["one device"])


def _mesh(layout: Layout) -> Iterator[tuple[str, int]]:
    data = "dp_shard" if layout.shards else "dp_replicate"
    for axis, size in (("pp", layout.pp), (data, layout.dp), ("cp", layout.cp), ("tp", layout.tp)):
        if size > 1:
            yield axis, size


def _strategies(best: Candidate) -> Iterator[dict[str, Any]]:
    layout = best.layout
    if layout.pp > 1:
        chunks = {"chunks": layout.chunks} if best.schedule == "interleaved" else {}
        yield {"name": "pipeline", "schedule": best.schedule, **chunks}
    if layout.tp > 1:
        yield from ({"name": "line"}, {"name": "sequence"}, {"name": "vocabulary"})
    if layout.cp > 1:
        yield {"name": "ring"}
    if layout.reruns != "none":
        yield {"name": "recompute"}
    axis = "dp_shard" if layout.shards else "dp_replicate"
    if layout.dp > 1:
        yield {"name": "batch", "axis": axis}
    if layout.sharers > 1:
        store = axis if layout.dp > 1 else "cp"
        yield {"name": "zero", "axis": store, "stage": layout.shards} if layout.shards else {"name": "replicate", "axis": store}
