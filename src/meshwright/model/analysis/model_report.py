"""Everything that was found out about a model, in one value: what `inspect` shows.

Blocks come in the order of their visits and sockets in module order; consecutive blocks, or the same socket of every
layer, are one row when they are alike. `advice` says what was not understood, and the two lines that would declare it.
When the trial forward fails, the survey holds what the module tree shows, and the faults.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from torch import nn

from meshwright.model.analysis.analyze import AnalyzedModel, Example, analyze
from meshwright.model.blocks.discovery import WHOLE_MODEL, find_blocks
from meshwright.model.blocks.loss_inputs import LossSpec
from meshwright.model.hf.metadata import attention_implementation
from meshwright.model.loading.loader import LoadedModel
from meshwright.model.tensor_parallel.layer_roles import LAYER_NUMBER, LayerRole, find_layer_roles
from meshwright.model.trial.divisible_layers import suggest_declaration, suggest_roles
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.model_spec.model_spec import ROOT, block_of

FOUND_BY_TRIAL = "found by a trial run"
MAX_LISTED_NAMES = 6  # names in a list before "and 12 more"


@dataclass(frozen=True)
class BlockRow:
    """Visits of equal blocks: first and last name, how many, their class; elements, hand-over and work of each."""

    first_block_call: str
    last_block_call: str
    num_block_calls: int
    class_name: str
    numel: int
    output_numel: int | None = None
    flops: int | None = None
    calls_attention: bool = False
    num_dropout_sites: int = 0


@dataclass(frozen=True)
class LayerRow:
    """The same socket of all layers: its pattern, how many, kind, weight shape of each, elements of all, role, source."""

    pattern: str
    num_layers: int
    kind: str
    shape: tuple[int, ...]
    numel: int
    role: str
    source: str


@dataclass(frozen=True)
class ModelReport:
    """What `survey` returns; `faults` are those of the trial, empty when the model can be trained as it is; then it has a
    `reading`.
    """

    name: str
    class_name: str
    numel: int
    blocks: tuple[BlockRow, ...]
    layers: tuple[LayerRow, ...]
    tied_params: tuple[tuple[str, ...], ...]
    attention: str
    glue_params: tuple[str, ...] = ()
    frozen_params: tuple[str, ...] = ()
    unused_params: tuple[str, ...] = ()
    num_captured: tuple[tuple[str, int], ...] = ()
    written_buffers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    advice: tuple[Diagnostic, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()
    analyzed: AnalyzedModel | None = None


def make_model_report(
    loaded_model: LoadedModel,
    example: Example,
    target_names: tuple[str, ...],
    loss_spec: LossSpec | None = None,
) -> ModelReport:
    """What can be found out about the model that `loaded` builds; a trial that fails is among the faults.

    `example`, `targets` and `judge` are those of `reading.read`.
    """
    module = loaded_model.deferred_init.instantiate()
    sockets = find_layer_roles(module, loaded_model.layer_roles)
    reading, faults = None, ()
    try:
        reading = analyze(loaded_model, example, target_names, loss_spec)
    except PlanError as error:
        faults = error.diagnostics
    logical = loaded_model.deferred_init.logical_params
    weights = () if reading is None else reading.model_spec.params
    return ModelReport(
        name=loaded_model.name,
        class_name=type(module).__name__,
        numel=sum(prod(entry.shape) for entry in logical.values()),
        blocks=tuple(
            _tree_rows(module, loaded_model) if reading is None else _block_call_rows(module, reading)
        ),
        layers=tuple(_layer_rows(_with_found_roles(reading, sockets))),
        tied_params=tuple((name, *entry.aliases) for name, entry in logical.items() if entry.aliases),
        attention=attention_implementation(module),
        glue_params=()
        if reading is None
        else tuple(
            w.name
            for w in weights
            if w.trainable and ROOT in w.block_calls and w.name not in reading.unused_params
        ),
        frozen_params=tuple(name for name, entry in logical.items() if not entry.requires_grad),
        unused_params=() if reading is None else reading.unused_params,
        num_captured=() if reading is None else tuple(reading.num_captured.items()),
        written_buffers=() if reading is None else reading.written_buffers,
        notes=() if reading is None else reading.model_spec.notes,
        advice=tuple(_advice(module, loaded_model, reading, sockets)),
        diagnostics=faults,
        analyzed=reading,
    )


def _tree_rows(module: nn.Module, loaded: LoadedModel) -> Iterator[BlockRow]:
    """The blocks as the module tree has them: the order in which they run is not known."""
    blocks = find_blocks(module, loaded.blocks or ())
    rows = [BlockRow(name, name, 1, type(block).__name__, _numel(block)) for name, block in blocks.items()]
    yield from _merge_equal_rows(rows)


def _block_call_rows(module: nn.Module, reading: AnalyzedModel) -> Iterator[BlockRow]:
    anatomy, rows = reading.model_spec, []
    sites = [site.rpartition("/")[0] for site in reading.draw_sites.layouts]
    for visit, stream, flops in zip(anatomy.block_calls, anatomy.output_numel, anatomy.flops, strict=True):
        name = block_of(visit)
        block = module if name == WHOLE_MODEL else module.get_submodule(name)
        numel = sum(weight.numel for weight in anatomy.params_of(visit))
        kind = type(block).__name__
        rows.append(
            BlockRow(
                visit,
                visit,
                1,
                kind,
                numel,
                stream,
                flops,
                visit in reading.attention_calls,
                sites.count(visit),
            )
        )
    yield from _merge_equal_rows(rows)


def _merge_equal_rows(rows: Sequence[BlockRow]) -> Iterator[BlockRow]:
    """Runs of rows that differ only by the number in their name, as one."""

    def alike(row: BlockRow) -> tuple[object, ...]:
        return (
            LAYER_NUMBER.sub("*", row.first_block_call),
            row.class_name,
            row.numel,
            row.output_numel,
            row.flops,
            row.calls_attention,
            row.num_dropout_sites,
        )

    for _, found in groupby(rows, key=alike):
        run = list(found)
        one = run[0]
        yield replace(one, last_block_call=run[-1].first_block_call, num_block_calls=len(run))


def _layer_rows(sockets: Sequence[LayerRole]) -> Iterator[LayerRow]:
    alike: dict[tuple[object, ...], list[LayerRole]] = {}
    for socket in sockets:
        key = (socket.pattern, socket.kind, socket.shape, socket.role, socket.source)
        alike.setdefault(key, []).append(socket)
    for same in alike.values():
        one = same[0]
        name = one.name if len(same) == 1 else one.pattern
        numel = sum(socket.numel for socket in same)
        yield LayerRow(name or WHOLE_MODEL, len(same), one.kind, one.shape, numel, one.role, one.source)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _advice(
    module: nn.Module, loaded: LoadedModel, reading: AnalyzedModel | None, sockets: Sequence[LayerRole]
) -> Iterator[Diagnostic]:
    names = tuple(find_blocks(module, loaded.blocks or ())) if reading is None else reading.block_names
    if names == (WHOLE_MODEL,) and not loaded.blocks:
        unused = () if reading is None else reading.unused_params
        inner = [name for name, child in module.named_children() if _may_be_used(name, child, unused)] or [
            "layers.0"
        ]
        text = (
            "no chain of blocks was found: the model runs as one block, so nothing overlaps with its backward"
        )
        yield Diagnostic(text, suggest_declaration(f"blocks={inner[:MAX_LISTED_NAMES]!r}"))
    unknown = {
        row.pattern: row.kind
        for row in _layer_rows(_layers_without_role(reading, sockets))
        if row.pattern != WHOLE_MODEL
    }
    if unknown:
        named = ", ".join(list(unknown)[:MAX_LISTED_NAMES]) + (
            f" and {len(unknown) - MAX_LISTED_NAMES} more" if len(unknown) > MAX_LISTED_NAMES else ""
        )
        text = f"no role is declared for {named}: such weights stay whole on every rank"
        linears, tables = (
            [name for name, kind in unknown.items() if kind == wanted] for wanted in ("linear", "embedding")
        )
        fix = suggest_roles(linears or list(unknown), tables)
        yield Diagnostic(text, f'{fix}  # or "rowwise", "packed_colwise"...: see docs/reference/models.md')
    if reading is not None and reading.unused_params:
        names = ", ".join(reading.unused_params[:MAX_LISTED_NAMES]) + (
            "..." if len(reading.unused_params) > MAX_LISTED_NAMES else ""
        )
        text = f"{len(reading.unused_params)} parameters are not used by the forward ({names}): they hold memory, and only decay"
        yield Diagnostic(text, "remove them from the model, or freeze them: parameter.requires_grad_(False)")


def _with_found_roles(reading: AnalyzedModel | None, sockets: Sequence[LayerRole]) -> list[LayerRole]:
    """`sockets`, with the roles that were found for those of which nobody says one."""
    weights = () if reading is None else reading.model_spec.params
    found = {layer: weight.role for weight in weights for layer in weight.layers}
    roles = {name: role for name, role in found.items() if role and role != "norm"}
    return [
        replace(socket, role=roles[socket.name], source=FOUND_BY_TRIAL)
        if not socket.role and socket.name in roles
        else socket
        for socket in sockets
    ]


def _layers_without_role(reading: AnalyzedModel | None, sockets: Sequence[LayerRole]) -> list[LayerRole]:
    """Those of `sockets` for which nobody declares a role, and none was found."""
    return [socket for socket in _with_found_roles(reading, sockets) if not socket.role]


def _may_be_used(name: str, child: nn.Module, unused: Sequence[str]) -> bool:
    """Whether the forward may use a parameter of this child."""
    return any(f"{name}.{leaf}" not in unused for leaf, _ in child.named_parameters())
