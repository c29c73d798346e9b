"""Shows a model as tables: its blocks, shardable layers, tied parameters, and what was not recognised."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from meshwright.model.analysis.model_report import MAX_LISTED_NAMES, BlockRow, LayerRow, ModelReport
from meshwright.plan.job.errors import Diagnostic, format_nbytes
from meshwright.report.terminal.plan_table import format_flops


def model_report_view(report: ModelReport, itemsize: int) -> RenderableType:
    """Returns the tables of a model report; `itemsize` is the bytes of one parameter element."""
    order = (
        "blocks, in the order of their calls"
        if not report.diagnostics
        else "blocks, in the order of the module tree"
    )
    parts = [
        _summary(report, itemsize),
        Text(f"\n{order}", style="bold"),
        _blocks(report.blocks, itemsize),
        Text("\nshardable layers", style="bold"),
        _layers(report.layers, itemsize),
    ]
    if report.advice or report.notes:
        parts.append(Text("\nnot recognised, and how to declare it", style="bold yellow"))
        parts += [
            Text(f"  {note}")
            for note in report.notes
            if not any(note == diagnostic.problem for diagnostic in report.advice)
        ]
        parts += [line for diagnostic in report.advice for line in _diagnostic_lines(diagnostic)]
    return Group(*parts)


def model_report_dict(report: ModelReport, itemsize: int) -> dict[str, Any]:
    """Returns the model report as plain values for JSON."""
    plain = asdict(replace(report, analyzed=None))
    return {
        **{key: value for key, value in plain.items() if key != "analyzed"},
        "bytes_per_element": itemsize,
    }


def _summary(report: ModelReport, width: int) -> Table:
    table = Table.grid(Column(min_width=15), Column(overflow="fold"), padding=(0, 2))
    count = sum(row.num_block_calls for row in report.blocks)
    rows = {
        "model": (
            f"{report.name}: {report.class_name}, {report.numel:,} parameters "
            f"({format_nbytes(report.numel * width)}), {count} blocks"
        ),
        "attention": _attention(report),
        "tied parameters": "; ".join(" = ".join(names) for names in report.tied_params) or "none",
        "glue": _names(
            report.glue_params, "used between blocks; their gradients are complete after the last backward"
        ),
        "frozen": _names(report.frozen_params, "not trained"),
        "unused": _names(report.unused_params, "not reached by the forward"),
        "side channels": _side_channels(report),
        "dropout": _dropout(report.blocks),
        "buffers": _names(report.written_buffers, "written by the forward; each rank writes its own copy"),
    }
    for name, text in rows.items():
        if text and not (report.diagnostics and name in ("side channels", "dropout")):
            table.add_row(Text(name, style="bold"), Text(text))
    return table


def _attention(report: ModelReport) -> str:
    calls = sum(row.num_block_calls for row in report.blocks if row.calls_attention)
    calls_text = f"; {calls} block calls use torch's attention" if calls else ""
    if report.attention:
        return f"by transformers' attention interface ({report.attention}){calls_text}"
    if calls:
        return f"by the model's own code{calls_text}"
    return "no attention call that could be replaced was found: the model's own code runs unchanged"


def _side_channels(report: ModelReport) -> str:
    if not report.num_captured:
        return "none"
    channels = ", ".join(f"{channel} ({number} tensors)" for channel, number in report.num_captured)
    return f"{channels}: captured inside blocks; they become outputs of their blocks"


def _dropout(blocks: Sequence[BlockRow]) -> str:
    sites = sum(row.num_block_calls * row.num_dropout_sites for row in blocks)
    return (
        (
            f"{sites} draw {'site' if sites == 1 else 'sites'} in blocks; masks depend on the sample, not "
            f"on the rank"
        )
        if sites
        else "none in blocks"
    )


def _names(names: Sequence[str], meaning: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return f"{', '.join(names[:MAX_LISTED_NAMES])}{more} ({meaning})"


def _blocks(rows: Sequence[BlockRow], width: int) -> Table:
    right = [Column(name, justify="right") for name in ("parameters", "bytes", "output", "forward")]
    table = Table(
        Column("block", overflow="fold"),
        Column("class", overflow="fold"),
        *right,
        box=None,
        header_style="bold",
        padding=(0, 2, 0, 0),
    )
    for row in rows:
        name = (
            row.first_block_call
            if row.num_block_calls == 1
            else f"{row.first_block_call} .. {row.last_block_call}  ({row.num_block_calls} equal, each:)"
        )
        output = "" if row.output_numel is None else f"{row.output_numel:,}"
        flops = "" if row.flops is None else format_flops(row.flops)
        cells = (name, row.class_name, f"{row.numel:,}", format_nbytes(row.numel * width), output, flops)
        table.add_row(*(Text(cell) for cell in cells))
    if any(row.output_numel is not None for row in rows):
        table.caption = (
            "output: elements per sample that the block call returns; forward: operations per sample"
        )
        table.caption_justify = "left"
    return table


def _layers(rows: Sequence[LayerRow], width: int) -> Table:
    columns = (Column(name, overflow="fold") for name in ("module", "kind", "weight", "role", "declared by"))
    table = Table(*columns, box=None, header_style="bold", padding=(0, 2, 0, 0))
    for row in rows:
        name = row.pattern if row.num_layers == 1 else f"{row.pattern} x{row.num_layers}"
        shape = " x ".join(map(str, row.shape))
        role, source = row.role, row.source
        if not role:
            role, source = (
                "unknown: replicated",
                f"none: {format_nbytes(row.numel * width)} on every rank",
            )
        cells = (name, row.kind, shape, role, source)
        table.add_row(*(Text(cell) for cell in cells), style="" if row.role else "yellow")
    return table


def _diagnostic_lines(diagnostic: Diagnostic) -> Iterator[Text]:
    yield Text(f"  {diagnostic.problem}")
    yield Text(f"    repair: {diagnostic.fix}", style="green")
