"""The HTML page of a run: readable offline, for one run and for two, for complete and for sparse records."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.report.html.charts import curves_figure
from meshwright.report.html.run_page import run_page
from meshwright.report.timeline.run_folder_reader import RunRecord, read_run_record
from tests.report.small_runs import train_small_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
OFFLINE = ("--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000", "--dump-dom")

CURVE = r'class="js-line"[^>]* d="M[^"]+L[^"]+"'  # the sample in a legend has no L


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> RunRecord:
    return read_run_record(train_small_run(tmp_path_factory.mktemp("runs") / "one"))


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> RunRecord:
    return read_run_record(
        train_small_run(tmp_path_factory.mktemp("runs") / "other", ranks=1, lr=0.5, trace_steps=0)
    )


def rendered(folder: Path, *records: RunRecord) -> str:
    """The page as a browser shows it, without its scripts."""
    if BROWSER is None:
        pytest.skip("no Chromium was found: apt-get install chromium")
    file = folder / "report.html"
    file.write_text(run_page(records, "0"), encoding="utf-8")
    argv = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        *QUIET,
        *OFFLINE,
        f"--user-data-dir={folder / 'profile'}",
        file.as_uri(),
    ]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=100, check=True, env={"HOME": str(folder)}
    )
    return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)


def drawing(text: str, name: str) -> str:
    """Returns what the browser has drawn in the figure `name`."""
    start = text.index(f'id="{name}"')
    end = re.search(r"</section>", text[start:])
    return text[start : start + end.start()]


def test_a_browser_draws_the_curves_the_step_and_where_time_and_memory_went(tmp_path, one):
    text = rendered(tmp_path, one)
    assert "<title>one</title>" in text
    assert len(re.findall(CURVE, drawing(text, "curves"))) == 4
    for word in ("loss", "gradient norm", "learning rate", "tokens per second"):
        assert word in drawing(text, "curves")
    step = drawing(text, "timeline-0")
    for row in (
        "planned",
        "pp0 compute",
        "pp0 comm",
        "rank 0 compute",
        "rank 2 comm",
        "measured, step",
    ):
        assert row in step
    acts = one.program.roles[0][1]
    bars = re.findall(r'class="point"><path[^>]* d="M', step)
    assert len(bars) > 4 * len(acts), "each act is drawn as planned, and for each of three ranks"
    assert "exposed communication" in drawing(text, "time-0")
    assert len(re.findall(r'class="point"><path', drawing(text, "memory-0"))) >= 4 * 3
    assert "12 samples = 3 ranks x 2 microbatches of 2" in text


def test_a_browser_shows_two_runs_beside_each_other_and_what_differs_first(tmp_path, one, other):
    text = rendered(tmp_path, one, other)
    assert "<h1>one and other</h1>" in text
    assert text.index("What differs") < text.index("Curves")
    row = re.search(r"<tr><td>optimizer.lr</td><td>(.*?)</td><td>(.*?)</td></tr>", text)
    assert row.groups() == ("0.01", "0.5")
    assert len(re.findall(CURVE, drawing(text, "curves"))) == 8
    assert "rank 2 compute" in drawing(text, "timeline-0")
    assert "scaled by operations; no times are known" in drawing(text, "timeline-1")
    assert "--run.trace_steps 3" in text


def without_scripts(text: str) -> str:
    return re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_nothing_is_fetched(one, other):
    text = run_page([one, other], "0")
    assert text.count("Plotly.newPlot(") >= 7
    assert not re.search(
        r"<script[^>]+src|<link|<img|<iframe|@import|url\(\s*['\"]?http", without_scripts(text)
    )
    assert not re.search(r"<script[^>]*\ssrc=", text)
    assert "http" not in without_scripts(text)


def test_texts_of_a_run_are_escaped(one):
    evil = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    about = {**one.run_info, "hash": evil, "summary": {evil: evil}, "versions": {evil: evil}}
    traces = json.loads(json.dumps(one.traces).replace("REDUCE(0)", evil.replace('"', "")))
    traces = {int(rank): trace for rank, trace in traces.items()}
    settings = {**one.settings, "model.source": evil}
    record = replace(one, name=evil, run_info=about, traces=traces, notes=(evil,), settings=settings)
    text = run_page([record, one], "0")
    assert evil not in text
    assert "<script>alert" not in text
    assert "<img" not in without_scripts(text)
    assert html.escape(evil) in text


def test_a_run_that_recorded_only_metrics_has_its_curves_and_says_what_is_missing(one):
    text = run_page([RunRecord("bare", one.steps, [], {})], "0")
    assert 'id="curves"' in text
    for said in (
        "has not recorded its time by category",
        "neither its program nor a trace",
        "has not recorded its memory",
        "Nothing is sent",
        "has not recorded them",
    ):
        assert said in text
    assert text.count("--run.trace_steps 3") == 2


def test_a_run_without_a_step_has_a_page(one):
    text = run_page(
        [replace(one, steps=[], traces={}, rank_accounts={}, notes=("no step has ended yet",))], "0"
    )
    assert "no step yet" in text
    assert "no step has ended yet" in text


def test_without_a_trace_the_time_of_all_steps_is_shown_by_phase(one):
    text = run_page([replace(one, traces={})], "0")
    assert "Means over all steps of the last start" in text
    assert 'id="time-0"' in text


def test_a_long_run_is_thinned_and_that_is_said(one):
    steps = [{**one.steps[0], "step": step} for step in range(1, 9002)]
    long = replace(one, steps=steps)
    assert len(curves_figure([long]).data[0].x) <= 4000
    assert "Of 9,001 steps, evenly chosen ones are drawn." in run_page([long], "0")


def test_evaluations_are_drawn_with_the_loss(one):
    evaluated = replace(one, evaluations=[{"kind": "evaluation", "step": 3, "loss": 1.5}])
    added = [trace for trace in curves_figure([evaluated]).data if "evaluation" in trace.name]
    assert [(trace.x, trace.y) for trace in added] == [((3,), (1.5,))]


def test_the_noise_of_the_gradient_has_a_curve_where_a_run_measured_it(one):
    assert len(curves_figure([one]).data) == 4
    measured = replace(
        one, steps=[{**line, "noise_scale": None if line["step"] < 3 else 7.5} for line in one.steps]
    )
    figure = curves_figure([one, measured])
    assert len(figure.data) == 10
    assert set(figure.data[-1].y) == {7.5}
    assert min(figure.data[-1].x) == 3
    assert "gradient noise scale (samples)" in [note.text for note in figure.layout.annotations]


def test_two_runs_with_the_same_plan_say_so(one):
    assert "Nothing: the two plans are the same." in run_page([one, one], "0")
