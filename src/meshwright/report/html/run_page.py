"""A run, or two beside each other, as one HTML file that needs no network: everything it shows is inside it.

    what differs            two runs only: the keys of their plans that differ, first of all
    curves                  loss, gradient norm, learning rate, speed, the gradient's noise if measured, over
                            the global step
    per run, in a column    the plan in words, predicted beside measured, where the time went, a step on its
                            lanes, memory,
                            bytes, versions and machine

Every text that comes from a run is escaped. What a run has not recorded is said in its place, and how to get
it.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.step.action import Program
from meshwright.report.html.charts import curves_figure, stacked_figure, timeline_figure
from meshwright.report.html.predicted_vs_measured import compare_run
from meshwright.report.timeline.gantt_svg import schedule_svg
from meshwright.report.timeline.memory_and_bytes import planned_memory, sent_by_action
from meshwright.report.timeline.run_record import RunRecord, plan_differences
from meshwright.report.timeline.step_timeline import step_timeline

MAX_SHOWN_RANKS, MAX_SHOWN_ACTIONS = 8, 24
NO_TRACE_HINT = "Train with <code>--run.trace_steps 3</code> to have some steps timed act by act."
NO_PREDICTION_HINT = (
    "Seconds are predicted where run.hardware names what <code>meshwright "
    "bench "
    "device</code> has measured, or a kind."
)
SCHEDULE_NOTE = (
    '<p class="note">Forwards and backwards of each part of the model, by micro-batch. Red '
    "ground: the rank waits. Amber: it "
    "waits for what has been sent. Below: the activations that it holds, as the program has them.</p>"
)
PAGE_STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #f4f4f5; color: #27272a; font: 15px/1.5 system-ui, sans-serif; }
header { background: #18181b; color: #fafafa; padding: 22px 32px; }
header h1 { margin: 0; font-size: 24px; } header p { margin: 4px 0 0; color: #a1a1aa; }
main { max-width: 1240px; margin: 0 auto; padding: 8px 24px 48px; } main.pair { max-width: 1800px; }
section { background: white; border: 1px solid #e4e4e7; border-radius: 10px; padding: 16px 20px; }
section { margin: 8px 0; min-width: 0; }
h2 { font-size: 17px; margin: 0 0 8px; } h3 { font-size: 20px; margin: 22px 0 0; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(0, 1fr)); gap: 0 24px; }
.columns.two { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); }
@media (max-width: 1100px) { .columns.two { grid-template-columns: minmax(0, 1fr); } }
table { border-collapse: collapse; width: 100%; font-size: 14px; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid #f0f0f1; }
th, td { overflow-wrap: anywhere; }
td { vertical-align: top; } td:first-child { overflow-wrap: normal; }
th { color: #71717a; font-weight: 500; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
.note { color: #52525b; font-size: 13.5px; margin: 6px 0; } .warning { color: #b45309; }
code { background: #f4f4f5; padding: 1px 5px; border-radius: 4px; font-size: 13px; }
.run-0 { color: #2563eb; } .run-1 { color: #ea580c; }
"""


def run_page(records: Sequence[RunRecord], version: str) -> str:
    """The report on one run, or on two, as the text of an HTML file; `version` is that of meshwright."""
    pair = len(records) == 2
    title = " and ".join(escape(record.name) for record in records)
    rows = zip(
        *(_run_sections(record, place, pair=pair) for place, record in enumerate(records)), strict=True
    )
    columns = "".join(f'<div class="columns {"two" if pair else "one"}">{"".join(row)}</div>' for row in rows)
    headline = " &middot; ".join(_run_headline(record, pair=pair) for record in records)
    body = [
        f"<header><h1>{title}</h1><p>{headline}</p></header>",
        f'<main class="{"pair" if pair else "one"}">',
        _plan_differences(*records) if pair else "",
        _section("Curves", _figure(curves_figure(records), "curves") + _thinning_note(records)),
        columns,
        f'<p class="note">Written by meshwright {escape(version)}. This file needs no network.</p></main>',
    ]
    return html_document(title, PAGE_STYLE, "".join(body))


def html_document(title: str, style: str, body: str) -> str:
    """A whole page round `body`, with plotly inside; `title` is HTML."""
    head = (
        f'<meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{title}</title><style>{style}</style>'
    )
    script = f"<script>{get_plotlyjs()}</script>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}{script}</head><body>{body}</body></html>\n'


def _run_sections(record: RunRecord, place: int, *, pair: bool) -> Iterator[str]:
    """The sections on one run, the same for each, so that those of two stand beside each other."""
    yield f'<h3 class="run-{place}">{escape(record.name)}</h3>' if pair else ""
    notes = "".join(f'<p class="note warning">{escape(note)}</p>' for note in record.notes)
    yield _section("Notes", notes) if notes else "<div></div>"
    yield _section("The plan", _plan_summary(record))
    yield _section("Predicted and measured", _prediction_section(record))
    yield _section("Where the time went", _time_section(record, place))
    yield _section("One step", _timeline_section(record, place))
    drawn = schedule_svg(record)
    yield (
        _section("Who works when", f'<div class="wide">{drawn}</div>{SCHEDULE_NOTE}')
        if drawn
        else "<div></div>"
    )
    yield _section("Memory per rank", _memory_section(record, place))
    yield _section("Bytes by action, per rank and step", _nbytes_section(record))
    yield _section("Versions and machine", _machine_section(record))


def _run_headline(record: RunRecord, *, pair: bool) -> str:
    name = f"{escape(record.name)}: " if pair else ""
    if not record.steps:
        return f"{name}no step yet"
    last, steps = record.steps[-1], record.settings.get("train.steps")
    of = f" of {steps:,}" if isinstance(steps, int) else ""
    mark = f"plan {escape(str(record.run_info['hash']))}, " if "hash" in record.run_info else ""
    return f"{name}{mark}step {last['step']:,}{of}, loss {_number(last.get('loss'))}"


def _plan_differences(one: RunRecord, other: RunRecord) -> str:
    found = plan_differences(one, other)
    if not found:
        return _section("What differs", '<p class="note">Nothing: the two plans are the same.</p>')
    names = [
        f'<span class="run-{place}">{escape(record.name)}</span>' for place, record in enumerate((one, other))
    ]
    rows = [[escape(text) for text in row] for row in found]
    return _section("What differs", _table(["key", *names], rows))


def _thinning_note(records: Sequence[RunRecord]) -> str:
    most = max(len(record.steps) for record in records)
    return f'<p class="note">Of {most:,} steps, evenly chosen ones are drawn.</p>' if most > 4000 else ""


def _plan_summary(record: RunRecord) -> str:
    words = record.run_info.get("summary")
    if not isinstance(words, Mapping):
        words = {
            key: value
            for key, value in record.settings.items()
            if key.startswith(("model.", "mesh.", "train.", "strategies"))
        }
    return _table([], [[f"<b>{escape(str(key))}</b>", escape(str(value))] for key, value in words.items()])


def _time_section(record: RunRecord, place: int) -> str:
    traced = {
        rank: trace.get("otherData", {}).get("seconds", {})
        for rank, trace in list(record.traces.items())[:MAX_SHOWN_RANKS]
    }
    rows: dict[str, dict[str, float]] = {}
    for rank, steps in traced.items():
        if steps:
            parts = dict.fromkeys(part for step in steps.values() for part in step)
            rows[f"rank {rank}"] = {
                part: 1e3 * fmean(step.get(part, 0.0) for step in steps.values()) for part in parts
            }
    if rows:
        count = max(len(steps) for steps in traced.values())
        note = f"Mean of {count} traced step{'s' if count > 1 else ''}. {_mean_times_text(record)}"
        return (
            _figure(stacked_figure(rows, "milliseconds per step"), f"time-{place}")
            + f'<p class="note">{note}</p>'
        )
    for rank, said in list(record.rank_accounts.items())[:MAX_SHOWN_RANKS]:
        if said.get("steps"):
            rows[f"rank {rank}"] = {
                part: 1e3 * seconds / said["steps"] for part, seconds in said.get("seconds", {}).items()
            }
    if not rows:
        return f'<p class="note">The run has not recorded where its time went. {NO_TRACE_HINT}</p>'
    note = f"Means over all steps of the last start. {NO_TRACE_HINT}"
    return (
        _figure(stacked_figure(rows, "milliseconds per step"), f"time-{place}")
        + f'<p class="note">{note}</p>'
    )


def _prediction_section(record: RunRecord) -> str:
    found = compare_run(record)
    if not found:
        return '<p class="note">Nothing was predicted, or nothing measured yet.</p>'
    rows = [[escape(text) for text in each.cells] for each in found]
    note = "Per rank and step. " + (
        "" if "step_s" in record.run_info.get("prediction", {}) else NO_PREDICTION_HINT
    )
    return _table(["", "predicted", "measured", "off by"], rows, numbers=True) + f'<p class="note">{note}</p>'


def _mean_times_text(record: RunRecord) -> str:
    """The means over all steps, which cost nothing to know, in words."""
    said = record.rank_accounts.get(0, {})
    if not said.get("steps"):
        return ""
    each = [
        f"{part} {1e3 * seconds / said['steps']:.3g} ms" for part, seconds in said.get("seconds", {}).items()
    ]
    return escape(f"Over all {said['steps']:,} steps of the last start, rank 0: {', '.join(each)}.")


def _timeline_section(record: RunRecord, place: int) -> str:
    found = step_timeline(record)
    if found is None:
        return f'<p class="note">The run has recorded neither its program nor a trace. {NO_TRACE_HINT}</p>'
    texts = []
    if found.planned and found.has_times:
        texts.append(
            "Planned: the program on paper, in its order and under its waits, each act as long "
            "as "
            "it took on average (on the "
            "wire: where it was quickest). Measured: as each rank played it; a message lasts "
            "from "
            "its issue until its result has "
            "come, and what the compute lane stands still for it is drawn as waiting."
        )
    elif found.planned:
        texts.append(
            f"The program in its order and under its waits, to the scale of its operations. {NO_TRACE_HINT}"
        )
    if found.num_hidden_ranks:
        texts.append(
            f"{found.num_hidden_ranks} more ranks are not drawn; their traces lie in the run's folder."
        )
    return _figure(timeline_figure(found), f"timeline-{place}") + "".join(
        f'<p class="note">{text}</p>' for text in texts
    )


def _memory_section(record: RunRecord, place: int) -> str:
    held = record.run_info.get("resident_memory")
    rows: dict[str, Mapping[str, Any]] = {}
    if record.program is not None and isinstance(held, Mapping):
        for role, actions in record.program.roles:
            name = f"{role} planned" if len(record.program.roles) > 1 else "planned"
            each = held.get(role, held)  # of an older run: those of rank 0
            rows[f"{name}, at its fullest"], rows[f"{name}, most of each"] = planned_memory(
                Program.from_dict({role: actions}), each
            )
    for rank, said in list(record.rank_accounts.items())[:MAX_SHOWN_RANKS]:
        if isinstance(said.get("memory"), Mapping):
            rows[f"rank {rank}"] = said["memory"]
    if not rows:
        return '<p class="note">The run has not recorded its memory.</p>'
    drawn = {
        name: {part: nbytes / 2**20 for part, nbytes in parts.items() if part != "peak"}
        for name, parts in rows.items()
        if not name.endswith("planned, most of each")  # which never are there together
    }
    parts = dict.fromkeys(part for each in rows.values() for part in each)
    heads = ["", *(escape(name) for name in rows)]
    lines = []
    for part in parts:
        name = "high-water mark of the process" if part == "peak" else part
        lines.append(
            [escape(name), *(format_nbytes(each[part]) if part in each else "" for each in rows.values())]
        )
    note = (
        "Planned activations are what blocks hand on; what a block keeps inside for its "
        "backward is not in the plan."
    )
    return (
        _figure(stacked_figure(drawn, "MiB"), f"memory-{place}")
        + _table(heads, lines, numbers=True)
        + f'<p class="note">{note}</p>'
    )


def _nbytes_section(record: RunRecord) -> str:
    found = sent_by_action(record)
    if not found:
        return '<p class="note">Nothing is sent: the run has one rank, or has not recorded its program.</p>'
    rows = [
        [
            escape(each.action),
            escape(each.description),
            *("" if n is None else f"{n:,.0f} B" for n in (each.planned, each.measured)),
        ]
        for each in found
    ]
    more = (
        f'<p class="note">and {len(rows) - MAX_SHOWN_ACTIONS} more actions</p>'
        if len(rows) > MAX_SHOWN_ACTIONS
        else ""
    )
    return (
        _table(["action", "what", "program", "ledger"], rows[:MAX_SHOWN_ACTIONS], numbers=True, first=2)
        + more
    )


def _machine_section(record: RunRecord) -> str:
    said = {**record.run_info.get("versions", {}), **record.run_info.get("machine", {})}
    if not said:
        return '<p class="note">The run has not recorded them.</p>'
    words = {
        key: format_nbytes(value) if key == "memory" and isinstance(value, int) else str(value)
        for key, value in said.items()
    }
    return _table([], [[f"<b>{escape(key)}</b>", escape(value)] for key, value in words.items()])


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False, first: int = 1
) -> str:
    """A table of texts that are HTML already; with `numbers`,
    columns from `first` on are set to the right.
    """
    marks = [
        ' class="number"' if numbers and place >= first else ""
        for place in range(max(map(len, [heads, *rows])))
    ]
    head = "".join(f"<th{mark}>{text}</th>" for mark, text in zip(marks, heads, strict=False))
    lines = "".join(
        f"<tr>{''.join(f'<td{mark}>{text}</td>' for mark, text in zip(marks, row, strict=False))}</tr>"
        for row in rows
    )
    return f'<div class="wide"><table>{f"<tr>{head}</tr>" if head else ""}{lines}</table></div>'


def _figure(figure: go.Figure, name: str) -> str:
    config = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}
    return figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config)


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "unknown"
