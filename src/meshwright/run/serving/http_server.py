"""Listens on an address, and runs an application in a thread beside generation."""

import socket
import threading
from types import TracebackType
from typing import Self

from meshwright.plan.job.errors import PlanError
from meshwright.run.launch.cluster_env import is_loopback

try:
    import uvicorn
    from starlette.types import ASGIApp
except ImportError as error:
    text = f"uvicorn, which serves over HTTP, cannot be imported: {error}"
    raise PlanError(text, fix='pip install "meshwright[serve]"', location="serve") from error

GRACE_S = 2  # for answers that are being sent, once the server stops


def check_address(host: str, port: int, api_key: str | None) -> None:
    """Raises PlanError for a host other than the loopback without an API key, and for an address that cannot
    be listened on.
    """
    if api_key is None and not is_loopback(host):
        text = f"--host {host} lets other hosts ask, and there is no API key"
        fix = "pass --api-key-file FILE, or set MESHWRIGHT_API_KEY; or leave --host out: the loopback alone"
        raise PlanError(text, fix=fix, location="serve")
    _listen(host, port).close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except (OSError, OverflowError) as error:
        reason = str(error).partition("] ")[2] or str(error)
        text = f"--host {host} --port {port} cannot be listened on: {reason}"
        fix = "choose another port: --port 8001, or --port 0 for any that is free"
        raise PlanError(text, fix=fix, location="--port") from error


class HttpServer:
    """Serves `app` on an address while it is entered; `url` is where."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._socket, self._host = _listen(host, port), host
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", loop="asyncio", http="h11", ws="none",
            timeout_graceful_shutdown=GRACE_S,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="HTTP server", daemon=True)

    @property
    def url(self) -> str:
        """The address of the server."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._socket.getsockname()[1]}"

    @property
    def is_running(self) -> bool:
        """Whether it still serves."""
        return self._thread.is_alive()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(3 * GRACE_S)
        self._socket.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])
