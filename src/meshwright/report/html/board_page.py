"""Pages that show runs while they train: the report on a run that renews itself, and a list of runs.

    runs           a row per run: what it does, its step, loss and speed
    one run        what it does, how it failed, a box to ask the model, and its report

A page asks `state` every two seconds, and fetches its parts anew when files of the run have changed. What a
reader has typed stays. The page fetches from the server that it came from, and from nowhere else.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal
from urllib.parse import quote

from meshwright.report.html.page_elements import PAGE_STYLE, html_document, note, section
from meshwright.report.html.run_page import run_body
from meshwright.report.html.run_summary import summarize_run
from meshwright.report.timeline.run_folder_reader import RunRecord

BOARD_STYLE = """
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: center; padding: 8px 32px; }
nav { background: var(--card); border-bottom: 1px solid var(--line); position: sticky; top: 0; z-index: 9; }
nav a, td a { color: inherit; } .state { font-weight: 600; } nav label { margin-left: auto; }
.training { color: #15803d; } .waiting, .stopped { color: var(--warning); } .failed { color: #dc2626; }
.ask { max-width: 1240px; margin: 0 auto; padding: 0 24px; }
.ask textarea { width: 100%; box-sizing: border-box; font: 13px/1.5 ui-monospace, monospace; }
.ask form { display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: center; }
.ask input { width: 6em; } summary { cursor: pointer; font-weight: 600; }
"""
SCRIPT = """
const word = (name) => document.getElementById(name);
let version = __VERSION__, busy = false;
function show(state) {
  word("state").textContent = state.text;
  word("state").className = "state " + state.state;
}
function replaceParts(page) {
  for (const name of ["header", "#failure", "main"]) {
    const [old, made] = [document.querySelector(name), page.querySelector(name)];
    if (old && made) old.replaceWith(document.adoptNode(made));
  }
  for (const old of document.querySelectorAll("main script")) {
    const made = document.createElement("script");
    made.textContent = old.textContent;
    old.replaceWith(made);
  }
}
async function look() {
  if (busy || document.hidden || !word("live").checked) return;
  busy = true;
  try {
    const state = await (await fetch(location.pathname.replace(/\\/$/, "") + "/state")).json();
    show(state);
    if (state.version !== version) {
      const text = await (await fetch(location.pathname)).text();
      replaceParts(new DOMParser().parseFromString(text, "text/html"));
      version = state.version;
    }
  } catch (error) {
    show({state: "failed", text: "the board does not answer: " + error.message});
  } finally { busy = false; }
}
setInterval(look, 2000);
async function ask(event) {
  event.preventDefault();
  const asked = {prompt: word("prompt").value, max_tokens: +word("tokens").value,
                 temperature: +word("temperature").value};
  const output = word("answer");
  word("ask").disabled = true;
  output.textContent = "";
  try {
    const headers = {"content-type": "application/json"};
    const answer = await fetch("/answer", {method: "POST", headers, body: JSON.stringify(asked)});
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    if (answer.ok) output.textContent = asked.prompt;
    for (;;) {
      const {done, value} = await reader.read();
      if (done) break;
      output.textContent += value;
    }
  } catch (error) { output.textContent += "\\n" + error.message; }
  word("ask").disabled = false;
}
word("form")?.addEventListener("submit", ask);
"""
ASK = """
<div class="ask"><section><details><summary>Ask the model</summary><form id="form">
<textarea id="prompt" rows="3" aria-label="prompt" placeholder="a prompt"></textarea>
<button id="ask">Ask</button>
<label>tokens <input id="tokens" type="number" value="64" min="1"></label>
<label>temperature <input id="temperature" type="number" value="0.7" min="0" step="0.1"></label>
</form><pre id="answer"></pre>__NOTE__</details></section></div>
"""


RunState = Literal["training", "waiting", "ended", "failed", "stopped"]
SHOWN_FIRST: tuple[RunState, ...] = ("failed", "waiting", "training", "stopped")


@dataclass(frozen=True)
class RunStatus:
    """What a run does: `text` in one line, and `failure` the report of the rank that failed first.

    training: its ranks live. waiting: they do, and no step has ended for long. ended: all steps are done.
    failed, stopped: its ranks are gone before. `version` differs when a file of the run has changed.
    """

    state: RunState
    text: str
    failure: str
    version: str

    def as_json(self) -> str:
        """Returns what the script of a page asks for."""
        return json.dumps({"state": self.state, "text": self.text, "version": self.version})


def live_run_page(record: RunRecord, status: RunStatus, served_at: str, plotly: str) -> str:
    """Returns the page of one run. `served_at` is the API that answers prompts, `plotly` the address of its
    script.
    """
    failure = section("How it failed", f"<pre>{escape(status.failure)}</pre>") if status.failure else ""
    where = f"Answered by what <code>meshwright serve</code> serves at {escape(served_at)}."
    body = [
        _bar(status, '<a href="/runs">all runs</a>'),
        f'<div id="failure" class="ask">{failure}</div>',
        ASK.replace("__NOTE__", note(where)),
        run_body([record], "The page renews itself while the run trains."),
    ]
    return _page(escape(record.name), body, status.version, plotly)


def runs_page(runs: Sequence[tuple[str, RunRecord, RunStatus]], version: str) -> str:
    """Returns the list of runs; each has the path of its page, what it recorded, and what it does."""
    heads = ("run", "state", "steps", "loss", "tokens/s")
    rows = "".join(_row(*run) for run in runs)
    table = f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{rows}</table>"
    body = [
        _bar(status_of_all([status for *_, status in runs], version), ""),
        "<header><h1>Runs</h1></header>",
        f"<main>{section('', table if runs else note('No run is here yet.'))}</main>",
    ]
    return _page("Runs", body, version, None)


def status_of_all(statuses: Sequence[RunStatus], version: str) -> RunStatus:
    """Returns what the runs with these `statuses` do together."""
    counts = Counter(each.state for each in statuses)
    text = f"{len(statuses)} run{'' if len(statuses) == 1 else 's'}"
    text = ", ".join([text, *(f"{counts[state]} {state}" for state in counts if state != "ended")])
    state: RunState = next((each for each in SHOWN_FIRST if counts[each]), "ended")
    return RunStatus(state, text, "", version)


def _row(path: str, record: RunRecord, status: RunStatus) -> str:
    summary = summarize_run(record)
    loss, speed = summary.final_loss, summary.tokens_per_s
    cells = (
        f'<a href="/run/{quote(path)}">{escape(path)}</a>',
        f'<span class="state {status.state}">{escape(status.text)}</span>',
        "" if summary.last_step is None else f"{summary.last_step:,}",
        "" if loss is None else f"{loss:.4f}",
        "" if speed is None else f"{speed:,.0f}",
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _bar(status: RunStatus, link: str) -> str:
    text = f'<span id="state" class="state {status.state}">{escape(status.text)}</span>'
    live = '<label><input id="live" type="checkbox" checked> live</label>'
    return f"<nav>{link}{text}{live}</nav>"


def _page(title: str, body: Sequence[str], version: str, plotly: str | None) -> str:
    script = f"<script>{SCRIPT.replace('__VERSION__', json.dumps(version))}</script>"
    return html_document(title, PAGE_STYLE + BOARD_STYLE, "".join([*body, script]), plotly or "")
