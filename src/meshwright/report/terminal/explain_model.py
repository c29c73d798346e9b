"""What a model is made of, as tables: blocks, sockets, ties, what leaves blocks sideways, and what was not
understood.
"""

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
    """The tables of a survey; `width` is the bytes of one parameter element."""
    order = (
        "blocks, in the order of their visits"
        if not report.diagnostics
        else "blocks, as the module tree has them"
    )
    parts = [
        _summary(report, itemsize),
        Text(f"\n{order}", style="bold"),
        _blocks(report.blocks, itemsize),
        Text("\nsockets: where weights may be split", style="bold"),
        _layers(report.layers, itemsize),
    ]
    if report.advice or report.notes:
        parts.append(Text("\nwhat was not understood, and how to declare it", style="bold yellow"))
        parts += [
            Text(f"  {note}")
            for note in report.notes
            if not any(note == fault.problem for fault in report.advice)
        ]
        parts += [line for fault in report.advice for line in _diagnostic_lines(fault)]
    return Group(*parts)


def model_report_dict(report: ModelReport, itemsize: int) -> dict[str, Any]:
    """The survey as plain values for JSON; `bytes_per_element` is the width of one parameter element."""
    plain = asdict(replace(report, analyzed=None))
    return {
        **{key: value for key, value in plain.items() if key != "analyzed"},
        "bytes_per_element": itemsize,
    }


def _summary(found: ModelReport, width: int) -> Table:
    table = Table.grid(Column(min_width=14), Column(overflow="fold"), padding=(0, 2))
    count = sum(row.num_block_calls for row in found.blocks)
    rows = {
        "model": (
            f"{found.name}: {found.class_name}, {found.numel:,} parameters "
            f"({format_nbytes(found.numel * width)}), {count} "
            f"blocks"
        ),
        "attention": _attention(found),
        "ties": "; ".join(" = ".join(names) for names in found.tied_params) or "none",
        "glue": _names(
            found.glue_params, "used between blocks: their gradients are complete after the last backward"
        ),
        "frozen": _names(found.frozen_params, "not trained"),
        "not used": _names(found.unused_params, "not reached by the forward"),
        "side channels": _side_channels(found),
        "dropout": _dropout(found.blocks),
        "buffers": _names(found.written_buffers, "written by the forward: every rank writes its own"),
    }
    for name, text in rows.items():
        if text and not (found.diagnostics and name in ("side channels", "dropout")):
            table.add_row(Text(name, style="bold"), Text(text))
    return table


def _attention(found: ModelReport) -> str:
    visits = sum(row.num_block_calls for row in found.blocks if row.calls_attention)
    seen = f"; torch's attention is called in {visits} visits" if visits else ""
    if found.attention:
        return f"by transformers' attention interface ({found.attention}){seen}"
    return (
        f"by the model's own code{seen}"
        if seen
        else "none was seen that could be exchanged: the model's own code runs as it is"
    )


def _side_channels(found: ModelReport) -> str:
    if not found.num_captured:
        return "none"
    channels = ", ".join(f"{channel} ({number} tensors)" for channel, number in found.num_captured)
    return f"{channels}: captured inside blocks, and outputs of the block that makes them"


def _dropout(blocks: Sequence[BlockRow]) -> str:
    sites = sum(row.num_block_calls * row.num_dropout_sites for row in blocks)
    return (
        (
            f"drawn at {sites} {'place' if sites == 1 else 'places'} of blocks; masks belong to "
            f"samples, not to ranks"
        )
        if sites
        else "none drawn in blocks"
    )


def _names(names: Sequence[str], meaning: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return f"{', '.join(names[:MAX_LISTED_NAMES])}{more} ({meaning})"


def _blocks(rows: Sequence[BlockRow], width: int) -> Table:
    right = [Column(name, justify="right") for name in ("parameters", "bytes", "hands on", "forward")]
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
            else f"{row.first_block_call} .. {row.last_block_call}  ({row.num_block_calls} alike, each:)"
        )
        stream = "" if row.output_numel is None else f"{row.output_numel:,}"
        flops = "" if row.flops is None else format_flops(row.flops)
        cells = (name, row.class_name, f"{row.numel:,}", format_nbytes(row.numel * width), stream, flops)
        table.add_row(*(Text(cell) for cell in cells))
    if any(row.output_numel is not None for row in rows):
        table.caption = (
            "hands on: elements per sample that go from the visit to what follows; forward: work per sample"
        )
        table.caption_justify = "left"
    return table


def _layers(rows: Sequence[LayerRow], width: int) -> Table:
    columns = (Column(name, overflow="fold") for name in ("module", "kind", "weight", "role", "said by"))
    table = Table(*columns, box=None, header_style="bold", padding=(0, 2, 0, 0))
    for row in rows:
        name = row.pattern if row.num_layers == 1 else f"{row.pattern} x{row.num_layers}"
        shape = " x ".join(map(str, row.shape))
        role, source = row.role, row.source
        if not role:
            role, source = (
                "not known: replicated",
                f"nobody: {format_nbytes(row.numel * width)} on every rank",
            )
        cells = (name, row.kind, shape, role, source)
        table.add_row(*(Text(cell) for cell in cells), style="" if row.role else "yellow")
    return table


def _diagnostic_lines(fault: Diagnostic) -> Iterator[Text]:
    yield Text(f"  {fault.problem}")
    yield Text(f"    repair: {fault.fix}", style="green")
