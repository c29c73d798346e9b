"""Collects everything that is known about a model in one value, shown by `meshwright inspect`.

Blocks are listed in the order of their calls and layers in module order; consecutive equal blocks, or the
same layer of every block, share a row. `advice` names what was not recognized, with the lines that declare
it. If the trial forward fails, the report holds what the module tree shows, and the diagnostics.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from torch import nn

from meshwright.model.analysis.analyze import AnalyzedModel, Example, analyze
from meshwright.model.analysis.repeated_forward import ResizedForward
from meshwright.model.blocks.discovery import WHOLE_MODEL, find_blocks
from meshwright.model.hf.declared_tp_plan import attention_implementation
from meshwright.model.loading.loader import LoadedModel
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.tensor_parallel.layer_roles import LAYER_NUMBER, LayerRole, find_layer_roles
from meshwright.model.trial.shardable_layers import VALUE_DEPENDENT_REASON, suggest_declaration, suggest_roles
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.model_spec.model_spec import ROOT, block_of

FOUND_BY_TRIAL = "found by a trial"
MAX_LISTED_NAMES = 6  # names in a list before "and 12 more"


@dataclass(frozen=True)
class BlockRow:
    """One row of equal block calls: first and last name, count, class; elements, output and flops of each."""

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
    """One row of equal layers: name pattern, count, kind, weight shape of each, elements of all, role, and
    its source.
    """

    pattern: str
    num_layers: int
    kind: str
    shape: tuple[int, ...]
    numel: int
    role: str
    source: str


@dataclass(frozen=True)
class ModelReport:
    """The report of a model.

    `diagnostics` are those of the trial, empty if the model can be trained as it is; `analyzed` is then set.
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
    loss: Loss,
    resized: ResizedForward | None = None,
) -> ModelReport:
    """Returns the report of the model that `loaded_model` builds; a failed trial is among the diagnostics.

    The arguments are those of `analyze`.
    """
    module = loaded_model.deferred_init.instantiate()
    layer_roles = find_layer_roles(module, loaded_model.layer_roles)
    analyzed, diagnostics = None, ()
    try:
        analyzed = analyze(loaded_model, example, loss, resized)
    except PlanError as error:
        diagnostics = error.diagnostics
    logical = loaded_model.deferred_init.logical_params
    weights = () if analyzed is None else analyzed.model_spec.params
    return ModelReport(
        name=loaded_model.name,
        class_name=type(module).__name__,
        numel=sum(prod(entry.shape) for entry in logical.values()),
        blocks=tuple(
            _tree_rows(module, loaded_model) if analyzed is None else _block_call_rows(module, analyzed)
        ),
        layers=tuple(_layer_rows(_with_found_roles(analyzed, layer_roles))),
        tied_params=tuple((name, *entry.aliases) for name, entry in logical.items() if entry.aliases),
        attention=attention_implementation(module),
        glue_params=()
        if analyzed is None
        else tuple(
            w.name
            for w in weights
            if w.trainable and ROOT in w.block_calls and w.name not in analyzed.unused_params
        ),
        frozen_params=tuple(name for name, entry in logical.items() if not entry.requires_grad),
        unused_params=() if analyzed is None else analyzed.unused_params,
        num_captured=() if analyzed is None else tuple(analyzed.num_captured.items()),
        written_buffers=() if analyzed is None else analyzed.written_buffers,
        notes=() if analyzed is None else analyzed.model_spec.notes,
        advice=tuple(_advice(module, loaded_model, analyzed, layer_roles)),
        diagnostics=diagnostics,
        analyzed=analyzed,
    )


def _tree_rows(module: nn.Module, loaded_model: LoadedModel) -> Iterator[BlockRow]:
    blocks = find_blocks(module, loaded_model.blocks or ())
    rows = [BlockRow(name, name, 1, type(block).__name__, _numel(block)) for name, block in blocks.items()]
    yield from _merge_equal_rows(rows)


def _block_call_rows(module: nn.Module, analyzed: AnalyzedModel) -> Iterator[BlockRow]:
    model_spec, rows = analyzed.model_spec, []
    sites = [site.rpartition("/")[0] for site in analyzed.draw_sites.layouts]
    for block_call, output_numel, flops in zip(
        model_spec.block_calls, model_spec.output_numel, model_spec.flops, strict=True
    ):
        name = block_of(block_call)
        block = module if name == WHOLE_MODEL else module.get_submodule(name)
        numel = sum(weight.numel for weight in model_spec.params_of(block_call))
        kind = type(block).__name__
        rows.append(
            BlockRow(
                block_call,
                block_call,
                1,
                kind,
                numel,
                output_numel,
                flops,
                block_call in analyzed.attention_calls,
                sites.count(block_call),
            )
        )
    yield from _merge_equal_rows(rows)


def _merge_equal_rows(rows: Sequence[BlockRow]) -> Iterator[BlockRow]:

    def row_key(row: BlockRow) -> tuple[object, ...]:
        return (
            LAYER_NUMBER.sub("*", row.first_block_call),
            row.class_name,
            row.numel,
            row.output_numel,
            row.flops,
            row.calls_attention,
            row.num_dropout_sites,
        )

    for _, equal_rows in groupby(rows, key=row_key):
        rows_of_run = list(equal_rows)
        first_row = rows_of_run[0]
        yield replace(
            first_row, last_block_call=rows_of_run[-1].first_block_call, num_block_calls=len(rows_of_run)
        )


def _layer_rows(layer_roles: Sequence[LayerRole]) -> Iterator[LayerRow]:
    row_key: dict[tuple[object, ...], list[LayerRole]] = {}
    for layer_role in layer_roles:
        key = (layer_role.pattern, layer_role.kind, layer_role.shape, layer_role.role, layer_role.source)
        row_key.setdefault(key, []).append(layer_role)
    for equal_layers in row_key.values():
        first_row = equal_layers[0]
        name = first_row.name if len(equal_layers) == 1 else first_row.pattern
        numel = sum(layer_role.numel for layer_role in equal_layers)
        yield LayerRow(
            name or WHOLE_MODEL,
            len(equal_layers),
            first_row.kind,
            first_row.shape,
            numel,
            first_row.role,
            first_row.source,
        )


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _advice(
    module: nn.Module,
    loaded_model: LoadedModel,
    analyzed: AnalyzedModel | None,
    layer_roles: Sequence[LayerRole],
) -> Iterator[Diagnostic]:
    names = (
        tuple(find_blocks(module, loaded_model.blocks or ())) if analyzed is None else analyzed.block_names
    )
    if names == (WHOLE_MODEL,) and not loaded_model.blocks:
        unused = () if analyzed is None else analyzed.unused_params
        inner = [name for name, child in module.named_children() if _may_be_used(name, child, unused)] or [
            "layers.0"
        ]
        text = (
            "no chain of blocks was found: the model runs as one block, so nothing overlaps with its backward"
        )
        yield Diagnostic(text, suggest_declaration(f"blocks={inner[:MAX_LISTED_NAMES]!r}"))
    unknown = {
        row.pattern: row.kind
        for row in _layer_rows(_layers_without_role(analyzed, layer_roles))
        if row.pattern != WHOLE_MODEL
    }
    if unknown:
        named = ", ".join(list(unknown)[:MAX_LISTED_NAMES]) + (
            f" and {len(unknown) - MAX_LISTED_NAMES} more" if len(unknown) > MAX_LISTED_NAMES else ""
        )
        text = f"no role is declared for {named}: such weights stay unsharded on every rank"
        linears, embeddings = (
            [name for name, kind in unknown.items() if kind == wanted] for wanted in ("linear", "embedding")
        )
        fix = suggest_roles(linears or list(unknown), embeddings)
        yield Diagnostic(text, f'{fix}  # or "rowwise", "packed_colwise"...: see docs/reference/models.md')
    if analyzed is not None and analyzed.unused_params:
        names = ", ".join(analyzed.unused_params[:MAX_LISTED_NAMES]) + (
            "..." if len(analyzed.unused_params) > MAX_LISTED_NAMES else ""
        )
        text = (
            f"{len(analyzed.unused_params)} parameters are not used by the forward ({names}): "
            f"they hold memory, and only decay"
        )
        yield Diagnostic(text, "remove them from the model, or freeze them: parameter.requires_grad_(False)")


def _with_found_roles(analyzed: AnalyzedModel | None, layer_roles: Sequence[LayerRole]) -> list[LayerRole]:
    weights = () if analyzed is None else analyzed.model_spec.params
    equal_rows = {layer: weight.role for weight in weights for layer in weight.layers}
    roles = {name: role for name, role in equal_rows.items() if role and role != "norm"}
    return [
        replace(layer_role, role=roles[layer_role.name], source=FOUND_BY_TRIAL)
        if not layer_role.role and layer_role.name in roles
        else layer_role
        for layer_role in layer_roles
    ]


def _layers_without_role(analyzed: AnalyzedModel | None, layer_roles: Sequence[LayerRole]) -> list[LayerRole]:
    """Returns the layers without a role, less those for which a declaration would change nothing."""
    weights = () if analyzed is None else analyzed.model_spec.params
    fixed = {
        layer
        for weight in weights
        if weight.not_shardable_reason == VALUE_DEPENDENT_REASON
        for layer in weight.layers
    }
    with_roles = _with_found_roles(analyzed, layer_roles)
    return [each for each in with_roles if not each.role and each.name not in fixed]


def _may_be_used(name: str, child: nn.Module, unused: Sequence[str]) -> bool:
    return any(f"{name}.{leaf}" not in unused for leaf, _ in child.named_parameters())
