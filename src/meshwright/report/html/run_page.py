"""Writes the report on one run, or on several that are compared, as one HTML file that needs no network.

    head                    one run only: duration, ranks, tokens, speed, the best evaluation
    runs                    several runs only: the same numbers as a table, and the keys in which plans differ
    curves                  loss, gradient norm, learning rate, speed, gradient noise if measured, over the
                            step
    per run, in a column    the plan, predicted and measured values, time by category, the timeline of a
                            step, memory, bytes, load of experts, samples, compiled blocks, versions and
                            machine

Every text from a run is escaped. What a run has not recorded is named in its place, with how to get it. What
takes no bytes has no row.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

from meshwright.plan.job.errors import format_nbytes
from meshwright.report.html.charts import (
    MAX_POINTS,
    OPTIONAL_PANELS,
    PANELS,
    curve_figures,
    run_colour,
    stacked_figure,
    task_figure,
    timeline_figure,
)
from meshwright.report.html.expert_load_section import expert_load_section
from meshwright.report.html.page_elements import (
    PAGE_STYLE,
    fact_list,
    figure_html,
    html_document,
    legend_html,
    note,
    section,
)
from meshwright.report.html.predicted_vs_measured import compare_run, comparison_table
from meshwright.report.html.run_summary import plan_difference_table, run_comparison_table, summarize_run
from meshwright.report.table import Column, Table
from meshwright.report.timeline.gantt_svg import schedule_svg
from meshwright.report.timeline.planned_vs_measured_bytes import (
    planned_memory,
    sent_by_action,
    sort_categories,
)
from meshwright.report.timeline.planned_vs_measured_spans import step_timeline
from meshwright.report.timeline.run_folder_reader import RunRecord

MAX_SHOWN_RANKS, MAX_SHOWN_ACTIONS, MAX_SHOWN_CAUSES, MAX_SHOWN_SAMPLES = 8, 24, 3, 5
NO_TRACE_HINT = "Train with <code>--run.trace_steps 3</code> to time every action of some steps."
NO_PREDICTION_HINT = (
    "Seconds are predicted if run.hardware names a profile that <code>meshwright bench device</code> wrote, "
    "or a kind of device."
)
SCHEDULE_NOTE = (
    "Forwards and backwards of each stage, by microbatch. Red: the rank waits (bubble). Amber: it waits for "
    "a message in flight. Below: the activations in memory, from the program."
)


ACTIVATION_NOTE = (
    "Planned activations are the outputs of blocks, what blocks save for their backward, and scratch memory "
    "of the loss and of one backward."
)
MEASURED_ACTIVATION_NOTE = (
    "Measured ones are the most at any moment of the first step of the last start, without scratch memory. "
    "The other categories are measured between two steps, so the sum of a rank is at no single moment."
)
COMPILED_NOTE = (
    "Since the last start. Compiled again: graphs that were compiled for training after its first two steps. "
    "A call without a graph ran its block as it is written."
)


def run_page(records: Sequence[RunRecord], version: str) -> str:
    """Returns the report on one or several runs as the text of an HTML file.

    `version` is that of meshwright.
    """
    body = run_body(records, f"Written by meshwright {escape(version)}. This file needs no network.")
    return html_document(_title(records), PAGE_STYLE, body)


def run_body(records: Sequence[RunRecord], last_note: str) -> str:
    """Returns what the report shows, as HTML: a header, and sections that end with `last_note`."""
    several = len(records) > 1
    rows = zip(
        *(_run_sections(record, place, several=several) for place, record in enumerate(records)), strict=True
    )
    kind = ("one", "two", "three")[min(len(records), 3) - 1]
    columns = "".join(f'<div class="columns {kind}">{_cells(row)}</div>' for row in rows if any(row))
    head = (
        "" if several else f"<p>{_run_headline(records[0])}</p>{fact_list(summarize_run(records[0]).facts())}"
    )
    body = [
        f"<header><h1>{_title(records)}</h1>{head}</header>",
        f'<main class="{"several" if several else "one"}">',
        _run_comparison(records) if several else "",
        section("Curves", *_curves(records)),
        columns,
        note(last_note),
        "</main>",
    ]
    return "".join(body)


def _title(records: Sequence[RunRecord]) -> str:
    names = [escape(record.name) for record in records]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _run_sections(record: RunRecord, place: int, *, several: bool) -> Iterator[str]:
    """The sections on one run, the same for each, so that runs can be compared side by side; "": none."""
    name = f": {_run_label(record, place)}" if several else ""
    notes = "".join(note(escape(text), "note warning") for text in record.notes)
    yield section(f"Notes{name}", notes) if notes else ""
    yield section(f"The plan{name}", _plan_summary(record))
    yield section(f"Predicted and measured{name}", *_prediction_section(record))
    yield section(f"Time by category{name}", *_time_section(record, place))
    yield section(f"Timeline of a step{name}", *_timeline_section(record, place))
    drawn = schedule_svg(record)
    parts = f'<div class="wide">{drawn}</div>', note(SCHEDULE_NOTE)
    yield section(f"Pipeline schedule{name}", *parts) if drawn else ""
    yield section(f"Memory per rank{name}", *_memory_section(record, place))
    yield section(f"Bytes by action, per rank and step{name}", _nbytes_section(record))
    load = expert_load_section(record, f"expert-load-{place}")
    yield section(f"Load of experts{name}", *load) if load else ""
    samples = _samples(record)
    yield section(f"Samples{name}", *samples) if samples else ""
    graphs = _compiled_blocks_table(record)
    yield section(f"Compiled blocks{name}", graphs) if graphs else ""
    yield section(f"Versions and machine{name}", _machine_section(record))


def _cells(sections: Sequence[str]) -> str:
    """The sections of all runs in one row of the page; an empty place for a run that has none."""
    return "".join(each or "<div></div>" for each in sections)


def _run_label(record: RunRecord, place: int) -> str:
    return f'<span style="color: {run_colour(place)}">{escape(record.name)}</span>'


def _run_headline(record: RunRecord) -> str:
    if not record.steps:
        return "no step yet"
    last, steps = record.steps[-1], record.settings.get("train.steps")
    of = f" of {steps:,}" if isinstance(steps, int) else ""
    mark = f"plan {escape(str(record.run_info['hash']))}, " if "hash" in record.run_info else ""
    return f"{mark}step {last['step']:,}{of}, loss {_number(last.get('loss'))}"


def _run_comparison(records: Sequence[RunRecord]) -> str:
    differences = plan_difference_table(records)
    return section("Runs", run_comparison_table(records).html()) + section(
        "What differs",
        note("Nothing: the plans are the same.") if differences is None else differences.html(),
    )


def _curves(records: Sequence[RunRecord]) -> Iterator[str]:
    if len(records) > 1:
        labels = (_run_label(record, place) for place, record in enumerate(records))
        yield f'<div class="runs">{"".join(labels)}</div>'
    titles = PANELS | OPTIONAL_PANELS
    panels = {
        key: f"<h3>{titles[key]}</h3>{figure_html(figure, f'curve-{key}', toolbar=key == 'loss')}"
        for key, figure in curve_figures(records).items()
    }
    yield panels.pop("loss")
    yield f'<div class="panels">{"".join(f"<div>{panel}</div>" for panel in panels.values())}</div>'
    tasks = task_figure(records)
    yield "" if tasks is None else f"<h3>tasks</h3>{figure_html(tasks, 'curve-tasks')}"
    most = max(len(record.steps) for record in records)
    yield note(f"Of {most:,} steps, evenly chosen ones are drawn." if most > MAX_POINTS else "")


def _samples(record: RunRecord) -> tuple[str, ...]:
    """The newest texts that the model has written, the last one first."""
    newest = list(reversed(record.samples))[:MAX_SHOWN_SAMPLES]
    return tuple(
        f"<h3>step {line['step']:,}</h3><pre>{escape(str(line.get('text', '')))}</pre>" for line in newest
    )


def _plan_summary(record: RunRecord) -> str:
    words = record.run_info.get("summary")
    if not isinstance(words, Mapping):
        words = {
            key: value
            for key, value in record.settings.items()
            if key.startswith(("model.", "mesh.", "train.", "strategies"))
        }
    return Table.of_pairs({key: value for key, value in words.items() if value != "0 B"}).html()


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
    figure = stacked_figure(rows, "milliseconds per step")
    return legend_html(figure), figure_html(figure, f"time-{place}"), note(text)


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
    figure = timeline_figure(timeline)
    drawn = f'<div class="wide timeline">{figure_html(figure, f"timeline-{place}", toolbar=True)}</div>'
    return legend_html(figure), drawn, *map(note, texts)


def _memory_section(record: RunRecord, place: int) -> tuple[str, ...]:
    resident = record.run_info.get("resident_memory")
    rows: dict[str, Mapping[str, Any]] = {}
    if record.program is not None and isinstance(resident, Mapping):
        for role in record.program.roles:
            name = f"{role.name} planned" if len(record.program.roles) > 1 else "planned"
            rows[f"{name}, at its peak"], rows[f"{name}, peak of each category"] = planned_memory(
                role.actions, resident.get(role.name, {})
            )
    measured = {
        f"rank {rank} measured": sort_categories(account["memory"])
        for rank, account in list(record.rank_accounts.items())[:MAX_SHOWN_RANKS]
        if isinstance(account.get("memory"), Mapping)
    }
    rows |= measured
    if not rows:
        return (note("The run has not recorded its memory."),)
    drawn = {
        name: {part: nbytes / 2**20 for part, nbytes in parts.items() if part != "peak"}
        for name, parts in rows.items()
        if not name.endswith("planned, peak of each category")  # these peaks are at different moments
    }
    figure = stacked_figure(drawn, "MiB")
    table = _memory_table(rows, measured).html()
    return legend_html(figure), figure_html(figure, f"memory-{place}"), table


def _memory_table(rows: Mapping[str, Mapping[str, Any]], measured: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row per category that has bytes in a column of `rows`; `measured` are the columns of ranks."""
    parts = sort_categories({part: nbytes for each in rows.values() for part, nbytes in each.items()})
    notes = []
    if len(rows) > len(measured):
        notes.append(ACTIVATION_NOTE)
    if any("activations" in each for each in measured.values()):
        notes.append(MEASURED_ACTIVATION_NOTE)
    elif measured:
        notes.append("The run has not measured its activations.")
    return Table(
        ["", *(Column(name, format_nbytes) for name in rows)],
        [
            (
                "high-water mark of the process" if part == "peak" else part,
                *(each.get(part) for each in rows.values()),
            )
            for part in parts
        ],
        note=" ".join(notes),
    )


def _nbytes_section(record: RunRecord) -> str:
    actions = [each for each in sent_by_action(record) if each.planned or each.measured]
    if not actions:
        return note("Nothing is sent: the run has one rank, or has not recorded its program.")
    return Table(
        ["action", "transfer", Column("program", "{:,.0f} B"), Column("ledger", "{:,.0f} B")],
        [(each.action, each.description, each.planned, each.measured) for each in actions],
        max_rows=MAX_SHOWN_ACTIONS,
        more="and {} more actions",
    ).html()


def _compiled_blocks_table(record: RunRecord) -> str:
    rows = []
    for rank, account in list(record.rank_accounts.items())[:MAX_SHOWN_RANKS]:
        found = account.get("compiled_blocks")
        if not isinstance(found, Mapping):
            continue
        causes = [f"compiled again: {found['late_cause']}"] if found.get("late_cause") else []
        causes += [f"uncompiled: {name}: {why}" for name, why in found.get("uncompiled", {}).items()]
        shown, keys = "; ".join(causes[:MAX_SHOWN_CAUSES]), ("graphs", "breaks", "late", "uncompiled_calls")
        shown += f"; and {len(causes) - MAX_SHOWN_CAUSES} more" if len(causes) > MAX_SHOWN_CAUSES else ""
        rows.append((f"rank {rank}", *(found.get(key) for key in keys), shown))
    heads = ("graphs", "graph breaks", "compiled again", "calls without a graph")
    columns = ["", *(Column(head, "{:,}") for head in heads), "cause"]
    return Table(columns, rows, note=COMPILED_NOTE).html() if rows else ""


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
