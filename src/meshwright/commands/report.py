"""`report`: writes one HTML file about a run, or a comparison of two."""

from dataclasses import replace
from pathlib import Path

from rich.console import Group, RenderableType

import meshwright
from meshwright.plan.job.errors import refuse_write_errors
from meshwright.report.html.predicted_vs_measured import compare_run, comparison_table
from meshwright.report.html.run_page import run_page
from meshwright.report.timeline.run_folder_reader import read_run_record

REPORT_FILE = "report.html"


def write_report(run: Path, other: Path | None, out: Path | None) -> tuple[Path, RenderableType | None]:
    """Writes the report on `run`, compared with `other` if given; returns the file, by default in the folder
    of `run`.

    Returns also the comparison of predicted and measured values; None without a prediction.
    """
    records = [read_run_record(folder) for folder in (run, other) if folder is not None]
    if other is not None and records[0].name == records[1].name:
        pairs = zip(records, (run, other), strict=True)
        records = [replace(record, name=str(folder)) for record, folder in pairs]
    path = out or run / REPORT_FILE
    text = run_page(records, meshwright.__version__)
    fix = "name a file in a folder that can be written to: --out FILE.html"
    with refuse_write_errors("the report", path, fix):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    found = {record.name: compare_run(record) for record in records}
    tables = [comparison_table(each, name) for name, each in found.items() if each]
    return path, Group(*tables) if tables else None
