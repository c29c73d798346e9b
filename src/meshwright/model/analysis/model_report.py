"""Everything that was found out about a model, in one value: what `plan --explain-model` shows.

Blocks come in the order of their visits and sockets in module order; consecutive blocks, or the same socket of every
layer, are one row when they are alike. `advice` says what was not understood, and the two lines that would declare it.
When the trial forward fails, the survey holds what the module tree shows, and the faults.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from torch import nn

from meshwright.model.analysis.analyze import Example, Reading, read
from meshwright.model.blocks.discovery import WHOLE, find_blocks
from meshwright.model.blocks.loss_inputs import Judge
from meshwright.model.hf.metadata import attention_of
from meshwright.model.loading.loader import Loaded
from meshwright.model.tensor_parallel.layer_roles import NUMBERED, Socket, find_sockets
from meshwright.model.trial.divisible_layers import declaration, declare
from meshwright.plan.job.errors import Fault, PlanError
from meshwright.plan.model_spec.model_spec import ROOT, block_of

BY_TRIAL = "found by a trial run"
SHOWN = 6  # names in a list before "and 12 more"


@dataclass(frozen=True)
class BlockRow:
    """Visits of equal blocks: first and last name, how many, their class; elements, hand-over and work of each."""

    first: str
    last: str
    number: int
    kind: str
    numel: int
    stream_numel: int | None = None
    flops: int | None = None
    attends: bool = False
    dropout_sites: int = 0


@dataclass(frozen=True)
class SocketRow:
    """The same socket of all layers: its pattern, how many, kind, weight shape of each, elements of all, role, source."""

    pattern: str
    number: int
    kind: str
    shape: tuple[int, ...]
    numel: int
    role: str
    source: str


@dataclass(frozen=True)
class Survey:
    """What `survey` returns; `faults` are those of the trial, empty when the model can be trained as it is; then it has a
    `reading`.
    """

    name: str
    kind: str
    numel: int
    blocks: tuple[BlockRow, ...]
    sockets: tuple[SocketRow, ...]
    ties: tuple[tuple[str, ...], ...]
    attention: str
    glue: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    captured: tuple[tuple[str, int], ...] = ()
    buffers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    advice: tuple[Fault, ...] = ()
    faults: tuple[Fault, ...] = ()
    reading: Reading | None = None


def survey(loaded: Loaded, example: Example, targets: tuple[str, ...], judge: Judge | None = None) -> Survey:
    """What can be found out about the model that `loaded` builds; a trial that fails is among the faults.

    `example`, `targets` and `judge` are those of `reading.read`.
    """
    module = loaded.blueprint.instance()
    sockets = find_sockets(module, loaded.sockets)
    reading, faults = None, ()
    try:
        reading = read(loaded, example, targets, judge)
    except PlanError as error:
        faults = error.faults
    logical = loaded.blueprint.logical
    weights = () if reading is None else reading.anatomy.weights
    return Survey(
        name=loaded.name,
        kind=type(module).__name__,
        numel=sum(prod(entry.shape) for entry in logical.values()),
        blocks=tuple(_tree_rows(module, loaded) if reading is None else _visit_rows(module, reading)),
        sockets=tuple(_socket_rows(_as_found(reading, sockets))),
        ties=tuple((name, *entry.aliases) for name, entry in logical.items() if entry.aliases),
        attention=attention_of(module),
        glue=()
        if reading is None
        else tuple(w.name for w in weights if w.trainable and ROOT in w.visits and w.name not in reading.unused),
        frozen=tuple(name for name, entry in logical.items() if not entry.requires_grad),
        unused=() if reading is None else reading.unused,
        captured=() if reading is None else tuple(reading.captured.items()),
        buffers=() if reading is None else reading.stateful,
        notes=() if reading is None else reading.anatomy.notes,
        advice=tuple(_advice(module, loaded, reading, sockets)),
        faults=faults,
        reading=reading,
    )


def _tree_rows(module: nn.Module, loaded: Loaded) -> Iterator[BlockRow]:
    """The blocks as the module tree has them: the order in which they run is not known."""
    blocks = find_blocks(module, loaded.blocks or ())
    rows = [BlockRow(name, name, 1, type(block).__name__, _numel(block)) for name, block in blocks.items()]
    yield from _folded(rows)


def _visit_rows(module: nn.Module, reading: Reading) -> Iterator[BlockRow]:
    anatomy, rows = reading.anatomy, []
    sites = [site.rpartition("/")[0] for site in reading.sites.allowed]
    for visit, stream, flops in zip(anatomy.visits, anatomy.stream_numel, anatomy.flops, strict=True):
        name = block_of(visit)
        block = module if name == WHOLE else module.get_submodule(name)
        numel = sum(weight.numel for weight in anatomy.of(visit))
        kind = type(block).__name__
        rows.append(BlockRow(visit, visit, 1, kind, numel, stream, flops, visit in reading.attends, sites.count(visit)))
    yield from _folded(rows)


def _folded(rows: Sequence[BlockRow]) -> Iterator[BlockRow]:
    """Runs of rows that differ only by the number in their name, as one."""

    def alike(row: BlockRow) -> tuple[object, ...]:
        return (NUMBERED.sub("*", row.first), row.kind, row.numel, row.stream_numel, row.flops, row.attends, row.dropout_sites)

    for _, found in groupby(rows, key=alike):
        run = list(found)
        one = run[0]
        yield replace(one, last=run[-1].first, number=len(run))


def _socket_rows(sockets: Sequence[Socket]) -> Iterator[SocketRow]:
    alike: dict[tuple[object, ...], list[Socket]] = {}
    for socket in sockets:
        key = (socket.pattern, socket.kind, socket.shape, socket.role, socket.source)
        alike.setdefault(key, []).append(socket)
    for same in alike.values():
        one = same[0]
        name = one.name if len(same) == 1 else one.pattern
        numel = sum(socket.numel for socket in same)
        yield SocketRow(name or WHOLE, len(same), one.kind, one.shape, numel, one.role, one.source)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _advice(module: nn.Module, loaded: Loaded, reading: Reading | None, sockets: Sequence[Socket]) -> Iterator[Fault]:
    names = tuple(find_blocks(module, loaded.blocks or ())) if reading is None else reading.block_names
    if names == (WHOLE,) and not loaded.blocks:
        unused = () if reading is None else reading.unused
        inner = [name for name, child in module.named_children() if _reached(name, child, unused)] or ["layers.0"]
        text = "no chain of blocks was found: the model runs as one block, so nothing overlaps with its backward"
        yield Fault(text, declare(f"blocks={inner[:SHOWN]!r}"))
    unknown = {row.pattern: row.kind for row in _socket_rows(_unknown(reading, sockets)) if row.pattern != WHOLE}
    if unknown:
        named = ", ".join(list(unknown)[:SHOWN]) + (f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else "")
        text = f"no role is declared for {named}: such weights stay whole on every rank"
        linears, tables = ([name for name, kind in unknown.items() if kind == wanted] for wanted in ("linear", "embedding"))
        fix = declaration(linears or list(unknown), tables)
        yield Fault(text, f'{fix}  # or "rows", "packed columns"...: see docs/models.md')
    if reading is not None and reading.unused:
        names = ", ".join(reading.unused[:SHOWN]) + ("..." if len(reading.unused) > SHOWN else "")
        text = f"{len(reading.unused)} parameters are not used by the forward ({names}): they hold memory, and only decay"
        yield Fault(text, "remove them from the model, or freeze them: parameter.requires_grad_(False)")


def _as_found(reading: Reading | None, sockets: Sequence[Socket]) -> list[Socket]:
    """`sockets`, with the roles that were found for those of which nobody says one."""
    weights = () if reading is None else reading.anatomy.weights
    found = {layer: weight.role for weight in weights for layer in weight.layers}
    roles = {name: role for name, role in found.items() if role and role != "norm"}
    return [
        replace(socket, role=roles[socket.name], source=BY_TRIAL) if not socket.role and socket.name in roles else socket
        for socket in sockets
    ]


def _unknown(reading: Reading | None, sockets: Sequence[Socket]) -> list[Socket]:
    """Those of `sockets` for which nobody declares a role, and none was found."""
    return [socket for socket in _as_found(reading, sockets) if not socket.role]


def _reached(name: str, child: nn.Module, unused: Sequence[str]) -> bool:
    """Whether the forward may use a parameter of this child."""
    return any(f"{name}.{leaf}" not in unused for leaf, _ in child.named_parameters())
