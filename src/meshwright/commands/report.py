"""`report`: writes one HTML file about a run, or a comparison of several."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Group, RenderableType

import meshwright
from meshwright.plan.job.errors import refuse_write_errors
from meshwright.report.html.predicted_vs_measured import compare_run, comparison_table
from meshwright.report.html.run_page import run_page
from meshwright.report.html.run_summary import run_comparison_table
from meshwright.report.timeline.run_folder_reader import read_run_record

REPORT_FILE = "report.html"


def write_report(runs: Sequence[Path], out: Path | None) -> tuple[Path, RenderableType | None]:
    """Writes the report on the folders `runs`, compared if they are several.

    Returns the file, by default in the first folder, and tables for the terminal: predicted beside measured
    values of every run with a prediction, and the numbers of several runs. None: there is nothing to show.
    """
    records = [read_run_record(folder) for folder in runs]
    if len({record.name for record in records}) < len(records):
        records = [replace(record, name=str(folder)) for record, folder in zip(records, runs, strict=True)]
    path = out or runs[0] / REPORT_FILE
    text = run_page(records, meshwright.__version__)
    fix = "name a file in a folder that can be written to: --out FILE.html"
    with refuse_write_errors("the report", path, fix):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    found = {record.name: compare_run(record) for record in records}
    tables = [comparison_table(each, name) for name, each in found.items() if each]
    if len(records) > 1:
        tables.append(run_comparison_table(records))
    return path, Group(*tables) if tables else None
