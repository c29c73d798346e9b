"""`board`: runs on a page that renews itself, on the loopback."""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO
from urllib.error import HTTPError, URLError

from plotly.offline import get_plotlyjs
from rich.console import Console

from meshwright.commands.serving.run_status import METRICS_FILE, files_version, run_status
from meshwright.plan.job.errors import PlanError
from meshwright.report.html.board_page import RunStatus, live_run_page, runs_page, status_of_all
from meshwright.report.timeline.run_folder_reader import RunRecord, read_run_record
from meshwright.run.serving.http_server import HttpServer, check_address

try:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import (
        HTMLResponse,
        PlainTextResponse,
        RedirectResponse,
        Response,
        StreamingResponse,
    )
    from starlette.routing import Route
except ImportError as error:
    text = f"starlette, which serves the board, cannot be imported: {error}"
    raise PlanError(text, fix='pip install "meshwright[serve]"', location="board") from error

HOST = "127.0.0.1"
PLOTLY = "/plotly.js"
DEPTHS = ("*", "*/*")  # where a folder of runs has them
ANSWER_S = 600.0  # how long a token of an answer may take
POLL_S = 0.2


class Board:
    """The runs in `folders`: runs themselves, or folders of runs, which are looked through for each page."""

    def __init__(self, folders: Sequence[Path], served_at: str) -> None:
        self._folders, self._served_at = folders, served_at.rstrip("/")

    def runs(self) -> dict[str, Path]:
        """Returns the folders of all runs, by the path that names them."""
        found = dict[str, Path]()
        for folder in self._folders:
            if _is_run(folder):
                found[folder.resolve().name] = folder
                continue
            inside = (path.parent for depth in DEPTHS for path in folder.glob(f"{depth}/{METRICS_FILE}"))
            found |= {str(path.relative_to(folder)): path for path in sorted(inside)}
        return found

    def app(self) -> Starlette:
        """Returns the application that answers requests which name a loopback host."""
        routes = [
            Route("/", self._start),
            Route("/runs", self._list),
            Route("/runs/state", self._state_of_all),
            Route(PLOTLY, _plotly),
            Route("/answer", self._answer, methods=["POST"]),
            Route("/run/{name:path}/state", self._state),
            Route("/run/{name:path}", self._run),
        ]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
        return Starlette(routes=routes, middleware=[hosts])

    def _start(self, request: Request) -> Response:
        runs = self.runs()
        if len(self._folders) == len(runs) == 1 and _is_run(self._folders[0]):
            return RedirectResponse(f"/run/{next(iter(runs))}")
        return RedirectResponse("/runs")

    def _list(self, request: Request) -> Response:
        runs = self.runs()
        version = files_version(runs.values())  # before they are read: what changes meanwhile is seen later
        return HTMLResponse(runs_page(list(_read_all(runs)), version))

    def _state_of_all(self, request: Request) -> Response:
        runs = self.runs()
        statuses = [status for *_, status in _read_all(runs)]
        return _json(status_of_all(statuses, files_version(runs.values())))

    def _run(self, request: Request) -> Response:
        return self._of_run(
            request,
            lambda record, status: HTMLResponse(live_run_page(record, status, self._served_at, PLOTLY)),
        )

    def _state(self, request: Request) -> Response:
        return self._of_run(request, lambda record, status: _json(status))

    def _of_run(self, request: Request, answer: Callable[[RunRecord, RunStatus], Response]) -> Response:
        name = request.path_params["name"]
        folder = self.runs().get(name)
        if folder is None:
            return PlainTextResponse(f"there is no run '{name}' here; / lists all", 404)
        version = files_version([folder])  # before it is read: what changes meanwhile is seen later
        record = read_run_record(folder)
        return answer(record, replace(run_status(folder, record), version=version))

    async def _answer(self, request: Request) -> Response:
        # a page of another site cannot send JSON without asking first
        if request.headers.get("content-type") != "application/json":
            return PlainTextResponse("send a JSON object: content-type application/json", 415)
        try:
            asked = json.loads(await request.body())
            body = json.dumps({**asked, "stream": True}).encode()
        except (ValueError, TypeError):
            return PlainTextResponse("send a JSON object with a prompt", 400)
        return await run_in_threadpool(self._stream, body)

    def _stream(self, body: bytes) -> Response:
        asked = urllib.request.Request(
            f"{self._served_at}/completions", body, {"content-type": "application/json"}
        )
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            answer = direct.open(asked, timeout=ANSWER_S)
        except HTTPError as error:
            return PlainTextResponse(_error_text(error.read()), 502)
        except (URLError, OSError, ValueError) as error:
            text = f"no model answers at {self._served_at} ({error}). Repair: meshwright serve RUN"
            return PlainTextResponse(f"{text}; or name where it is served: --api URL", 502)
        return StreamingResponse(_texts(answer), media_type="text/plain; charset=utf-8")


def show_board(
    folders: Sequence[Path], served_at: str, port: int, should_stop: Callable[[], bool], console: Console
) -> None:
    """Shows the runs in `folders` until `should_stop()`; prints where.

    Raises PlanError for a folder that does not exist, and for a port that cannot be listened on.
    """
    for folder in folders:
        if not folder.is_dir():
            fix = "name the folder of a run (run.folder of its config), or a folder of runs"
            raise PlanError("there is no such folder", fix=fix, location=str(folder))
    check_address(HOST, port, None)
    board = Board(folders, served_at)
    with HttpServer(board.app(), HOST, port) as server:
        console.print(f"{_num_runs(board)} at {server.url} (Ctrl-C ends)", markup=False, soft_wrap=True)
        while server.is_running and not should_stop():
            time.sleep(POLL_S)


def _num_runs(board: Board) -> str:
    number = len(board.runs())
    return f"{number} run{'' if number == 1 else 's'}"


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (METRICS_FILE, "plan.toml"))


def _read_all(runs: Mapping[str, Path]) -> Iterator[tuple[str, RunRecord, RunStatus]]:
    for path, folder in runs.items():
        with suppress(PlanError, OSError):  # removed meanwhile
            record = read_run_record(folder)
            yield path, record, run_status(folder, record)


def _json(status: RunStatus) -> Response:
    return Response(status.as_json(), media_type="application/json", headers={"cache-control": "no-store"})


async def _plotly(request: Request) -> Response:
    headers = {"cache-control": "max-age=86400"}
    return Response(get_plotlyjs(), media_type="text/javascript", headers=headers)


def _texts(answer: IO[bytes]) -> Iterator[str]:
    """Yields the text of each event of a streamed answer."""
    with answer:
        for line in answer:
            data = line.removeprefix(b"data: ").strip()
            if not line.startswith(b"data: ") or data == b"[DONE]":
                continue
            event = json.loads(data)
            yield event["choices"][0]["text"] if "choices" in event else f"\n{_error_text(data)}"


def _error_text(body: bytes) -> str:
    """Returns the message of an error of the API, or its body where it has none."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return body.decode(errors="replace")
