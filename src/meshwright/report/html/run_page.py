"""Writes the report on one run, or on two side by side, as one HTML file that needs no network.

    what differs            two runs only: the keys in which their plans differ
    curves                  loss, gradient norm, learning rate, speed, gradient noise if measured, over the
                            step
    per run, in a column    the plan, predicted and measured values, time by category, the timeline of a
                            step, memory, bytes, versions and machine

Every text from a run is escaped. What a run has not recorded is named in its place, with how to get it.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.step.program import Program
from meshwright.report.html.charts import curves_figure, stacked_figure, timeline_figure
from meshwright.report.html.page_elements import PAGE_STYLE, figure_html, html_document, note, section
from meshwright.report.html.predicted_vs_measured import compare_run, comparison_table
from meshwright.report.table import Column, Table
from meshwright.report.timeline.gantt_svg import schedule_svg
from meshwright.report.timeline.planned_vs_measured_bytes import planned_memory, sent_by_action
from meshwright.report.timeline.planned_vs_measured_spans import step_timeline
from meshwright.report.timeline.run_folder_reader import RunRecord, plan_differences

MAX_SHOWN_RANKS, MAX_SHOWN_ACTIONS = 8, 24
NO_TRACE_HINT = "Train with <code>--run.trace_steps 3</code> to time every action of some steps."
NO_PREDICTION_HINT = (
    "Seconds are predicted if run.hardware names a profile that <code>meshwright bench device</code> wrote, "
    "or a kind of device."
)
SCHEDULE_NOTE = (
    "Forwards and backwards of each stage, by microbatch. Red: the rank waits (bubble). Amber: it waits for "
    "a message in flight. Below: the activations in memory, from the program."
)


def run_page(records: Sequence[RunRecord], version: str) -> str:
    """Returns the report on one or two runs as the text of an HTML file; `version` is that of meshwright."""
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
        section("Curves", figure_html(curves_figure(records), "curves"), _thinning_note(records)),
        columns,
        note(f"Written by meshwright {escape(version)}. This file needs no network."),
        "</main>",
    ]
    return html_document(title, PAGE_STYLE, "".join(body))


def _run_sections(record: RunRecord, place: int, *, pair: bool) -> Iterator[str]:
    """The sections on one run, the same for each, so that two runs can be compared side by side."""
    yield f'<h3 class="run-{place}">{escape(record.name)}</h3>' if pair else ""
    notes = "".join(note(escape(text), "note warning") for text in record.notes)
    yield section("Notes", notes) if notes else "<div></div>"
    yield section("The plan", _plan_summary(record))
    yield section("Predicted and measured", *_prediction_section(record))
    yield section("Time by category", *_time_section(record, place))
    yield section("Timeline of a step", *_timeline_section(record, place))
    drawn = schedule_svg(record)
    parts = f'<div class="wide">{drawn}</div>', note(SCHEDULE_NOTE)
    yield section("Pipeline schedule", *parts) if drawn else "<div></div>"
    yield section("Memory per rank", *_memory_section(record, place))
    yield section("Bytes by action, per rank and step", _nbytes_section(record))
    yield section("Versions and machine", _machine_section(record))


def _run_headline(record: RunRecord, *, pair: bool) -> str:
    name = f"{escape(record.name)}: " if pair else ""
    if not record.steps:
        return f"{name}no step yet"
    last, steps = record.steps[-1], record.settings.get("train.steps")
    of = f" of {steps:,}" if isinstance(steps, int) else ""
    mark = f"plan {escape(str(record.run_info['hash']))}, " if "hash" in record.run_info else ""
    return f"{name}{mark}step {last['step']:,}{of}, loss {_number(last.get('loss'))}"


def _plan_differences(one: RunRecord, other: RunRecord) -> str:
    differences = plan_differences(one, other)
    if not differences:
        return section("What differs", note("Nothing: the two plans are the same."))
    table = Table(["key", one.name, other.name], differences)
    return section("What differs", f'<div class="differences">{table.html()}</div>')


def _thinning_note(records: Sequence[RunRecord]) -> str:
    most = max(len(record.steps) for record in records)
    return note(f"Of {most:,} steps, evenly chosen ones are drawn." if most > 4000 else "")


def _plan_summary(record: RunRecord) -> str:
    words = record.run_info.get("summary")
    if not isinstance(words, Mapping):
        words = {
            key: value
            for key, value in record.settings.items()
            if key.startswith(("model.", "mesh.", "train.", "strategies"))
        }
    return Table.of_pairs(words).html()


def _time_section(record: RunRecord, place: int) -> tuple[str, ...]:
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
        text = f"Mean of {count} traced step{'s' if count > 1 else ''}. {_mean_times_text(record)}"
    else:
        text = f"Means over all steps of the last start. {NO_TRACE_HINT}"
        for rank, account in list(record.rank_accounts.items())[:MAX_SHOWN_RANKS]:
            if account.get("steps"):
                seconds = account.get("seconds", {})
                rows[f"rank {rank}"] = {part: 1e3 * seconds[part] / account["steps"] for part in seconds}
    if not rows:
        return (note(f"The run has not recorded its time by category. {NO_TRACE_HINT}"),)
    return figure_html(stacked_figure(rows, "milliseconds per step"), f"time-{place}"), note(text)


def _prediction_section(record: RunRecord) -> tuple[str, ...]:
    comparisons = compare_run(record)
    if not comparisons:
        return (note("Nothing was predicted, or nothing measured yet."),)
    hint = "" if "step_s" in record.run_info.get("prediction", {}) else NO_PREDICTION_HINT
    return comparison_table(comparisons).html(), note(f"Per rank and step. {hint}")


def _mean_times_text(record: RunRecord) -> str:
    account = record.rank_accounts.get(0, {})
    if not account.get("steps"):
        return ""
    texts = [
        f"{part} {1e3 * seconds / account['steps']:.3g} ms"
        for part, seconds in account.get("seconds", {}).items()
    ]
    return escape(f"Over all {account['steps']:,} steps of the last start, rank 0: {', '.join(texts)}.")


def _timeline_section(record: RunRecord, place: int) -> tuple[str, ...]:
    timeline = step_timeline(record)
    if timeline is None:
        return (note(f"The run has recorded neither its program nor a trace. {NO_TRACE_HINT}"),)
    texts = []
    if timeline.planned and timeline.has_times:
        texts.append(
            "Planned: the program, simulated in its order and with its waits; each action takes its mean "
            "measured time (on the comm stream: its shortest). Measured: as each rank executed it; a "
            "collective lasts from its issue until its result has arrived, and the time that the compute "
            "stream waits for it is drawn as waiting."
        )
    elif timeline.planned:
        texts.append(f"The program in its order and with its waits, scaled by operations. {NO_TRACE_HINT}")
    if timeline.num_hidden_ranks:
        texts.append(
            f"{timeline.num_hidden_ranks} more ranks are not drawn; the folder of the run has their traces."
        )
    return figure_html(timeline_figure(timeline), f"timeline-{place}"), *map(note, texts)


def _memory_section(record: RunRecord, place: int) -> tuple[str, ...]:
    resident = record.run_info.get("resident_memory")
    rows: dict[str, Mapping[str, Any]] = {}
    if record.program is not None and isinstance(resident, Mapping):
        for role, actions in record.program.roles:
            name = f"{role} planned" if len(record.program.roles) > 1 else "planned"
            each = resident.get(role, resident)  # of an older run: those of rank 0
            rows[f"{name}, at its peak"], rows[f"{name}, peak of each category"] = planned_memory(
                Program.from_dict({role: actions}), each
            )
    for rank, account in list(record.rank_accounts.items())[:MAX_SHOWN_RANKS]:
        if isinstance(account.get("memory"), Mapping):
            rows[f"rank {rank}"] = account["memory"]
    if not rows:
        return (note("The run has not recorded its memory."),)
    drawn = {
        name: {part: nbytes / 2**20 for part, nbytes in parts.items() if part != "peak"}
        for name, parts in rows.items()
        if not name.endswith("planned, peak of each category")  # these peaks are at different moments
    }
    parts = dict.fromkeys(part for each in rows.values() for part in each)
    table = Table(
        ["", *(Column(name, format_nbytes) for name in rows)],
        [
            (
                "high-water mark of the process" if part == "peak" else part,
                *(each.get(part) for each in rows.values()),
            )
            for part in parts
        ],
        note="Planned activations are the outputs of blocks; what a block saves inside for its backward is "
        "not in the plan.",
    )
    return figure_html(stacked_figure(drawn, "MiB"), f"memory-{place}"), table.html()


def _nbytes_section(record: RunRecord) -> str:
    actions = sent_by_action(record)
    if not actions:
        return note("Nothing is sent: the run has one rank, or has not recorded its program.")
    return Table(
        ["action", "transfer", Column("program", "{:,.0f} B"), Column("ledger", "{:,.0f} B")],
        [(each.action, each.description, each.planned, each.measured) for each in actions],
        max_rows=MAX_SHOWN_ACTIONS,
        more="and {} more actions",
    ).html()


def _machine_section(record: RunRecord) -> str:
    values = {**record.run_info.get("versions", {}), **record.run_info.get("machine", {})}
    if not values:
        return note("The run has not recorded them.")
    texts = {
        key: format_nbytes(value) if key == "memory" and isinstance(value, int) else str(value)
        for key, value in values.items()
    }
    return Table.of_pairs(texts).html()


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "unknown"
