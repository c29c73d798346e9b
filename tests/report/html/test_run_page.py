"""The HTML page of a run: readable offline and on a narrow screen, for one run and for several, for complete
and for sparse records.
"""

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.plan.compiled_graphs import CompiledGraphs
from meshwright.report.html.run_page import run_page
from meshwright.report.timeline.run_folder_reader import RunRecord, read_run_record
from tests.paper_model import FIRST_ROLE, program_of
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
    return in_browser(folder, run_page(records, "0"))


def in_browser(folder: Path, text: str) -> str:
    """The document `text` after its scripts have run, without them."""
    if BROWSER is None:
        pytest.skip("no Chromium was found: apt-get install chromium")
    file = folder / "report.html"
    file.write_text(text, encoding="utf-8")
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
    assert len(re.findall(CURVE, drawing(text, "curve-loss"))) == 4
    for word in ("gradient norm", "learning rate", "tokens per second"):
        assert word in drawing(text, "curve-loss")
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
    acts = one.program.actions(FIRST_ROLE)
    bars = re.findall(r'class="point"><path[^>]* d="M', step)
    assert len(bars) > 4 * len(acts), "each act is drawn as planned, and for each of three ranks"
    assert "exposed communication</li>" in text
    assert len(re.findall(r'class="point"><path', drawing(text, "memory-0"))) >= 4 * 3
    assert "12 samples = 3 ranks x 2 microbatches of 2" in text


def test_a_browser_shows_two_runs_beside_each_other_and_what_differs_first(tmp_path, one, other):
    text = rendered(tmp_path, one, other)
    assert "<h1>one and other</h1>" in text
    assert text.index("What differs") < text.index("Curves")
    row = re.search(r"<tr><td>optimizer.lr</td><td>(.*?)</td><td>(.*?)</td></tr>", text)
    assert row.groups() == ("0.01", "0.5")
    assert len(re.findall(CURVE, drawing(text, "curve-loss"))) == 8
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
    assert 'id="curve-loss"' in text
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


def test_of_a_long_run_the_page_says_that_it_is_thinned(one):
    long = replace(one, steps=[{**one.steps[0], "step": step} for step in range(1, 9002)])
    assert "Of 9,001 steps, evenly chosen ones are drawn." in run_page([long], "0")


def test_two_runs_with_the_same_plan_say_so(one):
    assert "Nothing: the plans are the same." in run_page([one, one], "0")


def test_the_head_says_how_long_how_large_and_how_good_the_run_was(one):
    steps = [{**line, "seconds": 20.0, "data_s": 1.0, "save_s": 1.0, "tokens": 400} for line in one.steps]
    evaluations = [{"step": 3, "loss": 1.5, "seconds": 4.0}, {"step": 6, "loss": 1.75, "seconds": 4.0}]
    text = run_page([replace(one, steps=steps, evaluations=evaluations)], "0")
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text[: text.index("</header>")]))
    assert facts.pop("tokens per second")
    assert facts == {
        "duration": "0:02:14",
        "ranks": "3",
        "tokens": "2,400",
        "best evaluation": "1.5000 at step 3",
    }


def test_measured_activations_are_beside_planned_ones_and_the_note_is_true_of_the_run(one):
    def activations(record: RunRecord) -> list[str]:
        text = run_page([record], "0")
        row = re.search(r"<tr><td>activations</td>(.*?)</tr>", text[text.index("<h2>Memory per rank") :])
        return re.findall(r">([^<]*)</td>", row.group(1))

    assert all(activations(one)), "planned twice, and measured by three ranks"
    assert len(activations(one)) == 5
    text = run_page([one], "0")
    assert "is not in the plan" not in text, "the plan has what blocks save for their backward"
    assert "Measured ones are the most at any moment of the first step" in text
    accounts = {
        rank: {**account, "memory": {**account["memory"], "activations": 0}}
        for rank, account in one.rank_accounts.items()
    }
    assert activations(replace(one, rank_accounts=accounts))[2:] == ["", "", ""]
    for account in accounts.values():
        del account["memory"]["activations"]
    assert "The run has not measured its activations." in run_page(
        [replace(one, rank_accounts=accounts)], "0"
    )


def test_what_takes_no_bytes_has_no_row(one, other):
    (row,) = {each for each in one.rank_accounts[0]["memory"] if each == "buckets"}
    assert f"<td>{row}</td>" in run_page([one], "0")
    assert f"<td>{row}</td>" not in run_page([other], "0"), "one rank has no buckets"
    assert "<td>0 B</td>" not in run_page([other], "0")
    nothing = {rank: {**account, "sent": {}} for rank, account in one.rank_accounts.items()}
    program = program_of({FIRST_ROLE: [a for a in one.program.actions(FIRST_ROLE) if not a.transfers]})
    assert "Nothing is sent" in run_page([replace(one, rank_accounts=nothing, program=program)], "0")


def test_three_runs_are_compared_by_their_numbers_and_by_what_differs(one, other):
    third = replace(one, name="third", settings={**one.settings, "optimizer.lr": 0.25})
    text = run_page([one, other, third], "0")
    assert "<h1>one, other and third</h1>" in text
    table = text[text.index("<h2>Runs") : text.index("<h2>What differs")]
    for head in ("tokens/s", "final loss", "best loss"):
        assert f">{head}</th>" in table
    assert all(f"<b>{name}</b>" in table for name in ("one", "other", "third"))
    assert "<tr><td>optimizer.lr</td><td>0.01</td><td>0.5</td><td>0.25</td></tr>" in text
    assert text.count("<h2>Memory per rank: ") == 3


@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_itself_never_scrolls_sideways(tmp_path, one, other, width):
    """Wide tables and timelines scroll in their own boxes. The page is in a frame `width` pixels wide."""
    measure = "[document.documentElement.scrollWidth, document.querySelectorAll('.main-svg').length]"
    script = f"addEventListener('load', () => parent.document.body.dataset.found = {measure})"
    page = run_page([one, replace(other, name="a-rather-long-name-" * 6)], "0")
    page = html.escape(page.replace("</body>", f"<script>{script}</script></body>"))
    frame = f'<iframe style="border: 0; width: {width}px; height: 900px" srcdoc="{page}"></iframe>'
    text = in_browser(tmp_path, f"<!DOCTYPE html><html><body>{frame}</body></html>")
    scroll_width, drawn = map(int, re.search(r'data-found="(\d+),(\d+)"', text).groups())
    assert drawn > 10
    assert scroll_width <= width


def test_graphs_of_compiled_blocks_and_calls_without_one_are_shown(other):
    graphs = CompiledGraphs({"layers.0": "Layer"}, uncompiled={"layers.0": "a <loop>"}, late_cause="eps == 1")
    graphs.num_late, graphs.num_uncompiled_calls = 1234, 56
    said = {**other.rank_accounts[0], "compiled_blocks": graphs.as_dict()}
    text = run_page([replace(other, rank_accounts={0: said})], "0")
    part = text[text.index("Compiled blocks") :]
    for shown in ("1,234", "56", "compiled again: eps == 1; uncompiled: layers.0: a &lt;loop&gt;"):
        assert shown in part
    assert "Compiled blocks" not in run_page([other], "0")
