"""Runs on pages that renew themselves, in a client and in a real browser; prompts go to what is served."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="an extra: pip install meshwright[serve]")

from rich.console import Console
from starlette.testclient import TestClient

from meshwright.commands.serving.board import Board, show_board
from meshwright.plan.job.errors import PlanError
from meshwright.run.launch.failure_record import FailureRecord
from meshwright.run.launch.run_folder import claim_run_folder
from meshwright.run.serving.http_server import HttpServer
from tests.report.html.test_run_page import BROWSER, QUIET
from tests.report.small_runs import train_small_run

SAMPLE = {"kind": "sample", "step": 3, "prompt": "def ", "text": "def <b>f():"}
CLOSED = "http://127.0.0.1:9/v1"  # nobody listens there


def write_line(folder: Path, line: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with a run, and with a folder of one more, which has failed."""
    folder = tmp_path_factory.mktemp("runs")
    write_line(train_small_run(folder / "one"), SAMPLE)
    failed = train_small_run(folder / "tuned" / "two", ranks=1)
    plan = failed / "plan.toml"
    plan.write_text(plan.read_text().replace("steps = 6\n", "steps = 9\n"))
    with claim_run_folder(failed) as attempt:
        FailureRecord(0, 1.0, "hang", "Hang", "rank 1 did not issue <x>", "trace", 5).write(attempt.folder)
    return folder


def client(*folders: Path, served_at: str = CLOSED) -> TestClient:
    return TestClient(Board(folders, served_at).app(), base_url="http://127.0.0.1")


def test_all_runs_in_a_folder_are_listed_with_what_they_do(runs):
    text = client(runs).get("/").text
    assert re.search(r'<a href="/run/one">one</a>.*ended after step 6 of 6', text)
    assert re.search(r'<a href="/run/tuned/two">tuned/two</a>.*class="state failed"', text)
    assert "2 runs, 1 failed" in text
    assert client(runs).get("/runs/state").json()["text"] == "2 runs, 1 failed"


def test_one_run_is_shown_at_once_with_its_report_and_samples(runs):
    text = client(runs / "one").get("/").text
    assert "<h1>one</h1>" in text
    assert "Predicted and measured" in text
    assert "<h3>step 3</h3><pre>def &lt;b&gt;f():</pre>" in text
    assert '<script src="/plotly.js">' in text
    assert len(client(runs).get("/plotly.js").content) > 1_000_000


def test_a_failed_run_shows_its_hang_report(runs):
    page = client(runs).get("/run/tuned/two").text
    assert "How it failed" in page
    assert "rank 1 did not issue &lt;x&gt;" in page
    state = client(runs).get("/run/tuned/two/state").json()
    assert state["state"] == "failed"
    assert "timed out waiting at step 5" in state["text"]


def test_the_state_has_another_version_after_a_step(runs, tmp_path):
    shutil.copytree(runs / "one", tmp_path / "one")
    asked = client(tmp_path)
    first = asked.get("/run/one/state").json()["version"]
    write_line(tmp_path / "one", SAMPLE | {"step": 6})
    assert asked.get("/run/one/state").json()["version"] != first


def test_what_is_not_there_and_other_hosts_are_refused(runs, tmp_path):
    asked = client(runs)
    answer = asked.get("/run/three")
    assert (answer.status_code, "no run 'three'" in answer.text) == (404, True)
    assert asked.get("/run/../../etc/passwd").status_code == 404
    assert asked.get("/", headers={"host": "evil.example"}).status_code == 400
    with pytest.raises(PlanError, match=r"there is no such folder(?s:.*)a folder of runs"):
        show_board([tmp_path / "none"], CLOSED, 0, lambda: True, Console())


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """The API: says the prompt again, in two events; refuses a temperature of 9."""
    asked = json.loads((await receive())["body"])
    assert (scope["path"], asked["stream"]) == ("/v1/completions", True)
    refused = asked["temperature"] == 9
    events = [{"choices": [{"text": text}]} for text in (asked["prompt"].upper(), " \u00e9!")]
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    body = json.dumps({"error": {"message": "temperature 9 is too hot"}}) if refused else lines
    await send({"type": "http.response.start", "status": 400 if refused else 200, "headers": []})
    await send({"type": "http.response.body", "body": body.encode()})


@pytest.fixture
def api() -> Iterator[str]:
    with HttpServer(echo, "127.0.0.1", 0) as server:
        yield f"{server.url}/v1"


def test_a_prompt_is_answered_by_what_is_served(runs, api):
    asked = client(runs, served_at=api)
    answer = asked.post("/answer", json={"prompt": "def f", "max_tokens": 2, "temperature": 1})
    assert (answer.status_code, answer.text) == (200, "DEF F \u00e9!")
    answer = asked.post("/answer", json={"prompt": "def f", "max_tokens": 2, "temperature": 9})
    assert (answer.status_code, answer.text) == (502, "temperature 9 is too hot")


def test_a_prompt_without_a_served_model_says_how_to_serve_one(runs):
    answer = client(runs).post("/answer", json={"prompt": "def f"})
    assert answer.status_code == 502
    assert "no model answers at http://127.0.0.1:9/v1" in answer.text
    assert "meshwright serve RUN" in answer.text


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        ('{"prompt": "a"}', "text/plain", 415),
        ("[1", "application/json", 400),
        ("[1]", "application/json", 400),
    ],
)
def test_a_prompt_that_is_no_json_object_is_refused(runs, content, kind, status):
    answer = client(runs).post("/answer", content=content, headers={"content-type": kind})
    assert answer.status_code == status


def in_browser(folder: Path, url: str) -> str:
    """The page at `url` after ten seconds of a browser, without scripts."""
    if BROWSER is None:
        pytest.skip("no Chromium was found: apt-get install chromium")
    argv = [BROWSER, "--headless", "--no-sandbox", *QUIET, "--virtual-time-budget=10000", "--dump-dom"]
    argv += [f"--user-data-dir={folder / 'profile'}", url]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=100, check=True, env={"HOME": str(folder)}
    )
    return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)


def once_served(app: Any, path: str, happens: Callable[[], None], script: str = "") -> Any:
    """`app`, of which the first page at `path` ends with `script`; then something `happens`."""
    pages = list[bytes]()

    async def served(scope: Any, receive: Any, send: Any) -> None:
        async def changed(message: Any) -> None:
            if scope["path"] == path and message["type"] == "http.response.start":
                message["headers"] = [each for each in message["headers"] if each[0] != b"content-length"]
            if scope["path"] == path and message["type"] == "http.response.body" and not pages:
                pages.append(message["body"])
                message = message | {"body": message["body"] + f"<script>{script}</script>".encode()}
                happens()
            await send(message)

        await app(scope, receive, changed)

    return served


def test_a_browser_renews_the_page_when_a_step_has_ended_and_keeps_what_was_typed(runs, tmp_path):
    shutil.copytree(runs / "one", tmp_path / "one")
    typed = "document.getElementById('answer').textContent = 'typed before';"
    sample = SAMPLE | {"step": 6, "text": "written meanwhile"}
    app = Board([tmp_path / "one"], CLOSED).app()
    app = once_served(app, "/run/one", lambda: write_line(tmp_path / "one", sample), typed)
    with HttpServer(app, "127.0.0.1", 0) as server:
        text = in_browser(tmp_path, server.url)
    assert "written meanwhile" in text
    assert "typed before" in text
    assert re.search(r'class="js-line"[^>]* d="M[^"]+L[^"]+"', text), "curves are drawn again"


def test_a_browser_asks_the_model(runs, tmp_path, api):
    ask = "document.getElementById('prompt').value = 'def <f>';"
    ask += "document.getElementById('form').requestSubmit();"
    app = once_served(Board([runs / "one"], api).app(), "/run/one", lambda: None, ask)
    with HttpServer(app, "127.0.0.1", 0) as server:
        text = in_browser(tmp_path, server.url)
    assert "def &lt;f&gt;DEF &lt;F&gt; \u00e9!</pre>" in text
