"""Shows a model as tables: its blocks, shardable layers, tied parameters, what was not recognized; and the
graphs that a compiler makes of its blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.model.analysis.model_report import MAX_LISTED_NAMES, BlockRow, LayerRow, ModelReport
from meshwright.plan.compiled_graphs import BlockKindGraphs, GraphAhead, PlannedGraphs
from meshwright.plan.job.errors import Diagnostic, format_nbytes
from meshwright.report.table import Column, Table
from meshwright.report.terminal.action_table import format_flops

UNKNOWN_ROLE = "unknown: replicated"


def model_report_view(report: ModelReport, itemsize: int) -> RenderableType:
    """Returns the tables of a model report; `itemsize` is the bytes of one parameter element."""
    parts: list[RenderableType] = [
        _summary(report, itemsize),
        _blocks(report, itemsize),
        _layers(report.layers, itemsize),
    ]
    if report.advice or report.notes:
        parts.append(Text("\nnot recognized, and how to declare it", style="bold yellow"))
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


def compiled_graphs_view(found: PlannedGraphs) -> RenderableType:
    """Returns the graphs of each kind of block as a table, and below it why there are more than one."""
    title = "graphs of blocks under torch.compile, on one rank"
    title += "" if found.is_planned else "; this plan compiles none (strategy compile)"
    note = "equal steps: further graphs in steps of equal shapes, of which a run should have none"
    if found.lengths:
        more = " and ".join(map(str, found.lengths[1:]))
        note += f"; lengths: further graphs for sequences of {more} tokens, after {found.lengths[0]}"
    columns = [
        *("class", "blocks"),
        *(Column(name, "{:,}") for name in ("graphs", "graph breaks", "equal steps")),
        *(["lengths"] if found.lengths else []),
    ]
    rows = [
        (
            *(kind.class_name, _short_list(kind.blocks), kind.num_graphs, len(kind.breaks), len(kind.late)),
            *([", ".join(map(str, kind.by_length))] if found.lengths else []),
        )
        for kind in found.kinds
    ]
    parts: list[RenderableType] = [Table(columns, rows, title=title, note=note)] if rows else [Text(title)]
    parts += [Text(f"  {kind.class_name} {text}") for kind in found.kinds for text in _graph_causes(kind)]
    if found.as_written:
        text = "uncompiled, as a strategy replaces them or does not select them"
        parts.append(Text(f"  {text}: {', '.join(found.as_written)}"))
    parts += [Text(f"  {each}", style="yellow") for each in found.unknown]
    if found.compile_s:
        text = (
            f"compilation: about {found.compile_s:.0f} s of one core for Inductor on a CPU, once per cache "
        )
        parts.append(Text(f"  {text}folder (on a GPU it was not measured); --compile does it now"))
    return Group(*parts)


def graphs_ahead_view(found: Sequence[GraphAhead]) -> RenderableType:
    """Returns how many graphs of which ranks are in the cache folder, and the seconds that it took."""
    rows = []
    for rank in dict.fromkeys(each.rank for each in found):
        of_rank = [each for each in found if each.rank == rank]
        loaded = sum(each.is_loaded for each in of_rank)
        rows.append((rank, len(of_rank) - loaded, loaded, sum(each.seconds for each in of_rank)))
    columns = [Column("rank", "{}"), *(Column(name, "{:,}") for name in ("compiled", "were there"))]
    return Table(
        [*columns, Column("seconds", "{:.1f}")],
        rows,
        title="graphs of blocks in torch's cache folder, forward and backward",
        note="ranks with the program of one that is shown load its graphs",
    )


def _graph_causes(kind: BlockKindGraphs) -> Iterator[str]:
    for each in kind.breaks:
        cause, _, place = each.rpartition(" at ")
        yield f"breaks at {Path(place).name}: {cause}"
    yield from (f"has another graph for {each}" for each in kind.differences)
    yield from (f"is compiled again in step {step + 1}: {each}" for step, each in kind.late.items())
    yield from (f"runs uncompiled: {each}" for each in kind.uncompiled)


def _short_list(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} .. {names[-1]} ({len(names)})"


def _summary(report: ModelReport, width: int) -> Table:
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
    unknown = ("side channels", "dropout") if report.diagnostics else ()
    return Table.of_pairs({name: text for name, text in rows.items() if text and name not in unknown})


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


def _blocks(report: ModelReport, width: int) -> Table:
    order = "of their calls" if not report.diagnostics else "of the module tree"
    note = "output: elements per sample that the block call returns; forward: operations per sample"
    return Table(
        [
            *("block", "class"),
            *(Column("parameters", "{:,}"), Column("bytes", format_nbytes)),
            *(Column("output", "{:,}"), Column("forward", format_flops)),
        ],
        [
            (_block_name(row), row.class_name, row.numel, row.numel * width, row.output_numel, row.flops)
            for row in report.blocks
        ],
        title=f"blocks, in the order {order}",
        note=note if any(row.output_numel is not None for row in report.blocks) else "",
    )


def _block_name(row: BlockRow) -> str:
    if row.num_block_calls == 1:
        return row.first_block_call
    return f"{row.first_block_call} .. {row.last_block_call}  ({row.num_block_calls} equal, each:)"


def _layers(rows: Sequence[LayerRow], width: int) -> Table:
    return Table(
        ["module", "kind", "weight", "role", "declared by"],
        [
            (
                row.pattern if row.num_layers == 1 else f"{row.pattern} x{row.num_layers}",
                row.kind,
                " x ".join(map(str, row.shape)),
                row.role or UNKNOWN_ROLE,
                row.source if row.role else f"none: {format_nbytes(row.numel * width)} on every rank",
            )
            for row in rows
        ],
        title="shardable layers",
        row_style=lambda row: "yellow" if row[3] == UNKNOWN_ROLE else "",
    )


def _diagnostic_lines(diagnostic: Diagnostic) -> Iterator[Text]:
    yield Text(f"  {diagnostic.problem}")
    yield Text(f"    repair: {diagnostic.fix}", style="green")
